"""The layers of each architecture, and writing its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import gguf
import numpy as np

from tiny import layers
from tiny.layers import HEAD, HEADS, KV_HEADS, RANK, SSM_STATE, WIDTH, Dice, Part, Tensors, full
from tiny.vocabulary import N_VOCAB, vocabulary

LAYERS = 8
CTX = 16_384

Value = int | float | list[int] | list[bool]


def _tied(dice: Dice) -> Tensors:
    """The embedding is the output matrix too."""
    yield "output_norm.weight", full(WIDTH)


def _tied_lfm2(dice: Dice) -> Tensors:
    yield "token_embd_norm.weight", full(WIDTH)


def _untied(dice: Dice) -> Tensors:
    yield from _tied(dice)
    yield "output.weight", dice.matrix(N_VOCAB, WIDTH, gain=4.0)


def _untied_rwkv(dice: Dice) -> Tensors:
    yield from _untied(dice)
    yield "output_norm.bias", full(WIDTH, 0.0)
    yield "token_embd_norm.weight", full(WIDTH)
    yield "token_embd_norm.bias", full(WIDTH, 0.0)


@dataclass(frozen=True)
class Architecture:
    """`pattern`: the parts of the first layers, repeated until there are `layers`. `ends`: tensors outside the layers."""

    hyperparameters: Mapping[str, Value]
    pattern: tuple[tuple[Part, ...], ...]
    ends: Part = _tied
    layers: int = LAYERS


_COMMON: dict[str, Value] = {
    "context_length": CTX,
    "embedding_length": WIDTH,
    "feed_forward_length": layers.FFN,
    "vocab_size": N_VOCAB,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
_ATTENTION: dict[str, Value] = {
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.freq_base": 100_000.0,
    "rope.dimension_count": HEAD,
}
_TRANSFORMER = _COMMON | _ATTENTION
_SSM: dict[str, Value] = {
    "ssm.conv_kernel": layers.CONV,
    "ssm.state_size": SSM_STATE,
    "ssm.group_count": layers.SSM_GROUPS,
    "ssm.time_step_rank": layers.SSM_HEADS,
}
_MAMBA2 = _SSM | {"ssm.inner_size": layers.INNER}


def _windows(*pattern: bool) -> dict[str, Value]:
    """The layers with a sliding window, by the pattern."""
    return {
        "attention.sliding_window": layers.WINDOW,
        "attention.sliding_window_pattern": list(islice(cycle(pattern), LAYERS)),
    }


def _attention_in(*pattern: bool) -> dict[str, Value]:
    """The layers with attention, by the pattern; the others have state."""
    return {"attention.head_count_kv": [KV_HEADS * there for there in islice(cycle(pattern), LAYERS)]}


ARCHITECTURES = {
    # KV only.
    "llama": Architecture(_TRANSFORMER, ((layers.attention, layers.feed_forward),)),
    # Sliding windows beside full attention.
    "gemma3": Architecture(
        _TRANSFORMER | _windows(True, True, True, False) | {"rope.freq_base_swa": 10_000.0},
        ((layers.normed_attention, layers.feed_forward_gemma),),
    ),
    "gpt-oss": Architecture(
        _TRANSFORMER
        | _windows(True, False)
        | {"expert_count": layers.EXPERTS, "expert_used_count": layers.USED, "expert_feed_forward_length": layers.EXPERT_FFN},
        ((layers.attention_with_sinks, layers.experts),),
        _untied,
    ),
    # Recurrent layers beside full attention.
    "qwen35": Architecture(
        _TRANSFORMER
        | _SSM
        | {
            "ssm.inner_size": layers.SSM_HEADS * SSM_STATE,
            "full_attention_interval": 4,
            "rope.dimension_sections": [6, 5, 5, 0],
        },
        (*[(layers.delta_net, layers.feed_forward_qwen)] * 3, (layers.gated_attention, layers.feed_forward_qwen)),
    ),
    "lfm2": Architecture(
        _TRANSFORMER | _attention_in(False, True) | {"shortconv.l_cache": layers.SHORT_CONV},
        ((layers.short_convolution, layers.feed_forward), (layers.normed_attention, layers.feed_forward)),
        _tied_lfm2,
    ),
    "granitehybrid": Architecture(
        _TRANSFORMER | _MAMBA2 | _attention_in(False, False, False, True),
        (*[(layers.mamba2, layers.feed_forward)] * 3, (layers.attention, layers.feed_forward)),
    ),
    "falcon-h1": Architecture(
        _TRANSFORMER | _MAMBA2, ((layers.attention_beside_mamba2, layers.feed_forward_falcon),), layers=6
    ),
    # State only.
    "mamba2": Architecture(_COMMON | _MAMBA2, ((layers.mamba2,),)),
    "rwkv7": Architecture(
        _COMMON
        | {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.decay_lora_rank": layers.RANK,
            "attention.iclr_lora_rank": layers.RANK,
            "attention.value_residual_mix_lora_rank": layers.RANK,
            "attention.gate_lora_rank": layers.RANK,
            "token_shift_count": 2,
            "wkv.head_size": layers.WKV_HEAD,
        },
        ((layers.rwkv7_time, layers.rwkv7_channel),),
        _untied_rwkv,
    ),
}

STATEFUL = tuple(name for name in ARCHITECTURES if name != "llama")
"""Architectures that have more than KV: sliding windows, recurrent layers."""


def _put(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def write(
    path: Path,
    architecture: str = "llama",
    seed: int = 0,
    chat_template: str | None = None,
    window: int | None = None,
    layers: int | None = None,
    long_rope: bool = False,
) -> Path:
    """Writes a model of under 5 MB, with the same bytes for the same arguments.

    `chat_template`: None for the bundled model's. `window`: tokens of its sliding windows; `layers`: their number, 0.3 MB each;
    None for the architecture's own. `long_rope`: whether positions have other frequencies if the context is longer than the
    trained one.
    """
    kind, dice = ARCHITECTURES[architecture], Dice(seed)
    layers = layers or kind.layers
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture} {seed}")
    writer.add_block_count(layers)
    windows = {} if window is None else {"attention.sliding_window": window}
    for key, value in {**kind.hyperparameters, **windows}.items():
        _put(writer, f"{architecture}.{key}", value)
    vocabulary().write(writer, chat_template)
    writer.add_tensor("token_embd.weight", dice.matrix(N_VOCAB, WIDTH, gain=4.0))
    if long_rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_tensor("rope_factors_short.weight", full(HEAD // 2))
        writer.add_tensor("rope_factors_long.weight", full(HEAD // 2, 2.0))
    for name, tensor in kind.ends(dice):
        writer.add_tensor(name, tensor)
    for layer, parts in enumerate(islice(cycle(kind.pattern), layers)):
        for part in parts:
            for name, tensor in part(dice):
                writer.add_tensor(f"blk.{layer}.{name}", tensor)
    return _end(writer, path)


def write_adapter(path: Path, seed: int = 0) -> Path:
    """Writes a LoRA adapter for the output of the first layer of the `llama` architecture."""
    writer, dice = gguf.GGUFWriter(path, "llama"), Dice(seed)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(RANK))
    writer.add_tensor("blk.0.attn_output.weight.lora_a", dice.matrix(RANK, WIDTH, dtype=np.float32))
    writer.add_tensor("blk.0.attn_output.weight.lora_b", dice.matrix(WIDTH, RANK, dtype=np.float32))
    return _end(writer, path)


def _end(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
