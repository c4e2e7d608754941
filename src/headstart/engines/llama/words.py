"""Words: the text of tokens, from the vocabulary of a model file alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headstart.engines.llama.vocab import VocabularyTokenizer


class Words:
    """The vocabulary of a model file. Close it.

    Raises:
        ModelError: the file cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._tokenizer = VocabularyTokenizer(file)
        self._controls = {control.id for control in self._tokenizer.controls}

    def text(self, tokens: Iterable[int]) -> str:
        """The text of tokens. A control token becomes a space; tokens that are not in the vocabulary are left out."""
        known = (token for token in tokens if 0 <= token < self._tokenizer.n_vocab)
        return b"".join(self._bytes(token) for token in known).decode("utf-8", "replace")

    def _bytes(self, token: int) -> bytes:
        return b" " if token in self._controls else self._tokenizer.token_bytes(token)

    def close(self) -> None:
        self._tokenizer.close()
