"""Vocabulary: text ↔ tokens by llama.cpp's tokenizer."""

from __future__ import annotations

import ctypes
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from headstart.engines.llama.binding import lib
from headstart.engines.llama.load import open_vocabulary
from headstart.interfaces.tokenizer import Control

_NAMES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "pad", "sep_token": "sep"}


class LlamaTokenizer:
    """The tokenizer of a loaded model; usable as long as the model is. Thread-safe.

    Attributes: those of `headstart.interfaces.tokenizer.Tokenizer`.
    """

    def __init__(self, model: Any) -> None:
        self._vocab: Any = lib.llama_model_get_vocab(model)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self._vocab)
        self._bytes: list[bytes | None] = [None] * self.n_vocab
        template = lib.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None
        # Vocabularies are large: a loop in Python over all tokens would take a tenth of a second of each load.
        each = map(lib.llama_vocab_get_attr, repeat(self._vocab), range(self.n_vocab))
        attributes = np.fromiter(each, np.int32, self.n_vocab)
        # llama.cpp itself leaves these as text, unless it is asked to parse special tokens.
        special = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        self.controls: tuple[Control, ...] = tuple(
            Control(
                text,
                token,
                lstrip=bool(attributes[token] & lib.LLAMA_TOKEN_ATTR_LSTRIP),
                rstrip=bool(attributes[token] & lib.LLAMA_TOKEN_ATTR_RSTRIP),
            )
            for token in np.flatnonzero(attributes & special).tolist()
            if (text := self._text(token))
        )
        # llama.cpp marks what ends a reply as control tokens, but for those that the file names.
        marked = {*np.flatnonzero(attributes != lib.LLAMA_TOKEN_ATTR_NORMAL).tolist()}
        marked |= {int(named(self._vocab)) for named in (lib.llama_vocab_eos, lib.llama_vocab_eot)} - {-1}
        self.eog: frozenset[int] = frozenset(token for token in marked if lib.llama_vocab_is_eog(self._vocab, token))
        self.names: dict[str, str] = {}
        for name, short in _NAMES.items():
            token = int(getattr(lib, f"llama_vocab_{short}")(self._vocab))
            if token >= 0:
                self.names[name] = self._text(token)
        for token in np.flatnonzero(attributes & lib.LLAMA_TOKEN_ATTR_UNKNOWN).tolist():
            self.names.setdefault("unk_token", self._text(token))
        bos = int(lib.llama_vocab_bos(self._vocab))
        self.bos: Control | None = None
        if bos >= 0 and lib.llama_vocab_get_add_bos(self._vocab):
            known = {control.id: control for control in self.controls}
            self.bos = known.get(bos) or Control(self._text(bos), bos)

    def _text(self, token: int) -> str:
        text: bytes = lib.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace")

    def tokenize(self, text: str) -> list[int]:
        """Tokens of plain text; see `Tokenizer.tokenize`."""
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 8
        while True:
            tokens = np.empty(capacity, np.int32)
            pointer = tokens.ctypes.data_as(lib.llama_token_p)
            count = int(lib.llama_tokenize(self._vocab, data, len(data), pointer, capacity, False, False))
            if count >= 0:
                found: list[int] = tokens[:count].tolist()
                return found
            capacity = -count

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; see `Tokenizer.token_bytes`."""
        known = self._bytes[token]
        if known is None:
            capacity = 64
            while True:
                buffer = ctypes.create_string_buffer(capacity)
                count = int(lib.llama_token_to_piece(self._vocab, token, buffer, capacity, 0, True))
                if count >= 0:
                    break
                capacity = -count
            known = self._bytes[token] = buffer.raw[:count]
        return known


class VocabularyTokenizer(LlamaTokenizer):
    """The tokenizer of a model file, without its weights: a `LoadedTokenizer`.

    Raises:
        ModelError: the file cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._model: Any = open_vocabulary(file)
        super().__init__(self._model)

    def close(self) -> None:
        """Frees the vocabulary. Nobody may use it any more. Idempotent."""
        model, self._model, self._vocab = self._model, None, None
        if model is not None:
            lib.llama_model_free(model)
