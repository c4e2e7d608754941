"""Words: the text of tokens, from the vocabulary of a model alone. No weight is read, and MLX is not loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headstart.engines.hf_tokenizer import HFTokenizer
from headstart.engines.model_folder import is_model_folder
from headstart.interfaces.tokenizer import LoadedTokenizer


class Words:
    """The vocabulary of a model: of a GGUF file, or of a folder in Hugging Face's form. Close it.

    Raises:
        ModelError: it cannot be read.
    """

    def __init__(self, model: Path) -> None:
        self._tokenizer = _vocabulary(model)
        self._controls = {control.id for control in self._tokenizer.controls}

    def text(self, tokens: Iterable[int]) -> str:
        """The text of tokens. A control token becomes a space; tokens that are not in the vocabulary are left out."""
        known = (token for token in tokens if 0 <= token < self._tokenizer.n_vocab)
        return b"".join(self._bytes(token) for token in known).decode("utf-8", "replace")

    def _bytes(self, token: int) -> bytes:
        return b" " if token in self._controls else self._tokenizer.token_bytes(token)

    def close(self) -> None:
        self._tokenizer.close()


def _vocabulary(model: Path) -> LoadedTokenizer:
    if is_model_folder(str(model)):
        return HFTokenizer(model)
    from headstart.engines.llama.vocab import VocabularyTokenizer  # loads llama.cpp

    return VocabularyTokenizer(model)
