"""Converts a GGUF to mlx-lm's format, with the same weights and tokens: `python -m benchmarks.mlx_models MODEL.gguf FOLDER`.

It supports the architectures of `CONVERTERS`. Weights become float32, in which mlx is fastest on a CPU. mlx-lm pairs the V
heads of a gated DeltaNet with its K heads in another order, so a random model gives other replies, but the work is the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Config = dict[str, Any]
Weights = dict[str, npt.NDArray[np.float32]]

CONTROL, USER_DEFINED = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED


class Fields:
    """The metadata of a GGUF; `fields[name]` is a field of its architecture."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self.architecture = str(self.any("general.architecture"))

    def any(self, name: str, default: Any = None) -> Any:
        return self._fields[name].contents() if name in self._fields else default

    def __getitem__(self, name: str) -> Any:
        return self.any(f"{self.architecture}.{name}")


def _common(fields: Fields) -> Config:
    return {
        "hidden_size": fields["embedding_length"],
        "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": fields["attention.head_count"],
        "head_dim": fields["attention.key_length"] or fields["embedding_length"] // fields["attention.head_count"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": fields["context_length"],
        "rope_theta": fields["rope.freq_base"],
    }


def _qwen35(fields: Fields) -> Config:
    return _common(fields) | {
        "model_type": "qwen3_5",
        "num_key_value_heads": fields["attention.head_count_kv"],
        "linear_num_value_heads": fields["ssm.time_step_rank"],
        "linear_num_key_heads": fields["ssm.group_count"],
        "linear_key_head_dim": fields["ssm.state_size"],
        "linear_value_head_dim": fields["ssm.inner_size"] // fields["ssm.time_step_rank"],
        "linear_conv_kernel_dim": fields["ssm.conv_kernel"],
        "full_attention_interval": fields["full_attention_interval"],
        "tie_word_embeddings": True,
        "rope_parameters": {
            "type": "default",
            "rope_theta": fields["rope.freq_base"],
            "partial_rotary_factor": fields["rope.dimension_count"] / fields["attention.key_length"],
        },
    }


def _llama(fields: Fields) -> Config:
    heads = fields["attention.head_count_kv"]
    return _common(fields) | {"model_type": "llama", "num_key_value_heads": heads, "tie_word_embeddings": True}


def _lfm2(fields: Fields) -> Config:
    heads = fields["attention.head_count_kv"]
    return _common(fields) | {
        "model_type": "lfm2",
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "conv_bias": False,
        "conv_L_cache": fields["shortconv.l_cache"],
        "block_dim": fields["embedding_length"],
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


def _gemma3(fields: Fields) -> Config:
    pattern = fields["attention.sliding_window_pattern"]
    return _common(fields) | {
        "model_type": "gemma3_text",
        "num_key_value_heads": fields["attention.head_count_kv"],
        "query_pre_attn_scalar": fields["attention.key_length"],
        "sliding_window": fields["attention.sliding_window"],
        "sliding_window_pattern": pattern.index(False) + 1 if pattern else 6,
        "rope_local_base_freq": fields["rope.freq_base_swa"] or 10_000.0,
    }


_PROJECTIONS = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
_QWEN35 = _PROJECTIONS | {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_LLAMA = _PROJECTIONS | {"ffn_norm.weight": "post_attention_layernorm.weight"}
_LFM2 = _PROJECTIONS | {
    "attn_output.weight": "self_attn.out_proj.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn_gate.weight": "feed_forward.w1.weight",
    "ffn_down.weight": "feed_forward.w2.weight",
    "ffn_up.weight": "feed_forward.w3.weight",
    "shortconv.in_proj.weight": "conv.in_proj.weight",
    "shortconv.conv.weight": "conv.conv.weight",
    "shortconv.out_proj.weight": "conv.out_proj.weight",
}
_GEMMA3 = _PROJECTIONS | {
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class Converter:
    """`layer`: names within a layer; `norm`: the norm after all layers; `shift`: what mlx-lm adds to a norm's weights; `pairs`:
    whether the GGUF has next to each other what RoPE turns together in Q and K. In mlx-lm it is half a head apart."""

    config: Callable[[Fields], Config]
    layer: Mapping[str, str]
    norm: str = "norm"
    shift: float = 0.0
    pairs: bool = False

    def place(self, name: str) -> str:
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            return f"model.layers.{layer}.{self.layer[rest]}"
        ends = {"token_embd.weight": "embed_tokens", "output_norm.weight": self.norm, "token_embd_norm.weight": self.norm}
        return f"model.{ends[name]}.weight"

    def weights(self, reader: gguf.GGUFReader) -> Weights:
        found: Weights = {}
        fields = Fields(reader)
        heads = {"attn_q.weight": "head_count", "attn_k.weight": "head_count_kv"} if self.pairs else {}
        for tensor in reader.tensors:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if tensor.name.endswith("conv1d.weight") or tensor.name.endswith("conv.weight"):
                array = array[:, :, None]
            elif tensor.name.endswith("ssm_a"):
                array = np.log(-array)
            elif "norm" in tensor.name:
                array = array - np.float32(self.shift)
            elif kind := heads.get(".".join(tensor.name.split(".")[-2:])):
                turned = array.reshape(fields[f"attention.{kind}"], -1, 2, array.shape[1])
                array = turned.swapaxes(1, 2).reshape(array.shape)
            found[self.place(tensor.name)] = np.ascontiguousarray(array)
        return found


CONVERTERS = {
    "llama": Converter(_llama, _LLAMA, pairs=True),
    "qwen35": Converter(_qwen35, _QWEN35),
    "lfm2": Converter(_lfm2, _LFM2, norm="embedding_norm"),
    "gemma3": Converter(_gemma3, _GEMMA3, shift=1.0),
}


def _byte_level(vocabulary: dict[str, int], fields: Fields) -> Any:
    """GPT-2's tokenizer with separate digits, as in the bundled SmolLM2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in fields.any("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: dict[str, int], fields: Fields) -> Any:
    """Gemma's tokenizer; its scores give the order of the merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = dict(zip(vocabulary, fields.any("tokenizer.ggml.scores"), strict=True))
    pairs = ((token[:cut], token[cut:]) for token in vocabulary for cut in range(1, len(token)))
    merges = [(left, right) for left, right in pairs if left in vocabulary and right in vocabulary]
    merges.sort(key=lambda pair: -scores[pair[0] + pair[1]])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


TOKENIZERS = {"gpt2": _byte_level, "llama": _sentence_piece}


def _write_tokenizer(fields: Fields, folder: Path) -> None:
    from tokenizers import AddedToken

    tokens, types = fields.any("tokenizer.ggml.tokens"), fields.any("tokenizer.ggml.token_type")
    tokenizer = TOKENIZERS[fields.any("tokenizer.ggml.model")]({token: number for number, token in enumerate(tokens)}, fields)
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(token, normalized=False) for token, this in zip(tokens, types, strict=True) if this == kind])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {name: tokens[fields.any(f"tokenizer.ggml.{name}_token_id")] for name in ("bos", "eos")}
    config: Config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{name}_token": token for name, token in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def convert(model: Path, folder: Path) -> None:
    """Writes config, weights, tokenizer and any chat template to `folder`. Raises KeyError for an unknown architecture."""
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(model)
    fields = Fields(reader)
    converter = CONVERTERS[fields.architecture]
    folder.mkdir(parents=True)
    config = converter.config(fields) | {
        "vocab_size": len(fields.any("tokenizer.ggml.tokens")),
        "bos_token_id": fields.any("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.any("tokenizer.ggml.eos_token_id"),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(converter.weights(reader), folder / "model.safetensors", {"format": "pt"})
    _write_tokenizer(fields, folder)
    if template := fields.any("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
