"""Words: the text of tokens, from the vocabulary of a model file alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llama_cpp import llama_cpp as lib

from headstart.engines.llama.load import open_vocabulary
from headstart.engines.llama.vocab import LlamaTokenizer


class Words:
    """The vocabulary of a model file. Close it.

    Raises:
        ModelError: the file cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._model = open_vocabulary(file)
        self._tokenizer = LlamaTokenizer(self._model)
        self._controls = {control.id for control in self._tokenizer.controls}

    def text(self, tokens: Iterable[int]) -> str:
        """The text of tokens. A control token becomes a space; tokens that are not in the vocabulary are left out."""
        known = (token for token in tokens if 0 <= token < self._tokenizer.n_vocab)
        return b"".join(self._bytes(token) for token in known).decode("utf-8", "replace")

    def _bytes(self, token: int) -> bytes:
        return b" " if token in self._controls else self._tokenizer.token_bytes(token)

    def close(self) -> None:
        lib.llama_model_free(self._model)
