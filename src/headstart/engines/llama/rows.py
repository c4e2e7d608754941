"""Rows in and out of a llama.cpp context, through one host buffer that is reused: a fresh one costs ten times the copy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from headstart.engines.base import Bytes, Rows, Span
from headstart.engines.llama import log as llama_log
from headstart.engines.llama.blob import Layout, LayoutError, parse
from headstart.errors import EngineError

_Pointer = ctypes.POINTER(ctypes.c_uint8)


def read(context: Any, slot: int, out: Bytes) -> int:
    """Writes the blob of `slot` into `out`; returns its bytes, 0 on failure."""
    lib.llama_synchronize(context)
    return int(lib.llama_state_seq_get_data(context, out.ctypes.data_as(_Pointer), len(out), slot))


def write(context: Any, slot: int, blob: Bytes) -> int:
    """Replaces the content of `slot`; returns how many bytes were read, 0 on failure."""
    return int(lib.llama_state_seq_set_data(context, blob.ctypes.data_as(_Pointer), len(blob), slot))


def learn(context: Any, slot: int, tokens: int) -> Layout:
    """The layout of this context's blobs, proved on `slot`, which holds `tokens` ≥ 2: cut, joined, loaded, and the same again.

    Raises:
        LayoutError: it is not the known one.
    """
    first = np.empty(int(lib.llama_state_seq_get_size(context, slot)), np.uint8)
    if read(context, slot, first) != len(first):
        raise LayoutError("a blob that is shorter than announced")
    layout = parse(first, tokens)
    rows = Transfer(context, layout, tokens)
    middle = tokens // 2
    spans = [Span(a, b, np.empty((b - a) * layout.row_bytes, np.uint8)) for a, b in ((0, middle), (middle, tokens))]
    rows.export(slot, tokens, spans)
    lib.llama_memory_seq_rm(lib.llama_get_memory(context), slot, -1, -1)
    rows.restore(slot, [Rows(span.data, span.stop - span.start, span.stop - span.start) for span in spans])
    again = np.empty_like(first)
    if read(context, slot, again) != len(again) or (first != again).any():
        raise LayoutError("a blob that does not survive being cut and joined")
    return layout


class Transfer:
    """Moves rows of one context. Holds `bytes` of host memory: the blob of `ctx` tokens."""

    def __init__(self, context: Any, layout: Layout, ctx: int) -> None:
        self._context = context
        self._layout = layout
        self._buffer = np.empty(layout.size(ctx), np.uint8)

    @property
    def bytes(self) -> int:
        return len(self._buffer)

    def export(self, slot: int, tokens: int, spans: Sequence[Span]) -> None:
        """Copies spans out of `slot`, which holds `tokens`. Raises EngineError."""
        blob = self._buffer[: self._layout.size(tokens)]
        if read(self._context, slot, blob) != len(blob):
            raise EngineError(f"llama.cpp could not give the rows of slot {slot}")
        try:
            body = self._layout.open(blob, tokens)
        except LayoutError as error:
            raise EngineError(f"llama.cpp gave {error}") from error
        for span in spans:
            self._layout.cut(blob, body, tokens, span.start, span.stop, span.data)

    def restore(self, slot: int, pieces: Sequence[Rows]) -> None:
        """Replaces the content of `slot` by the pieces. Raises EngineError; the slot's content is then unknown."""
        blob = self._buffer[: self._layout.join(pieces, self._buffer)]
        if write(self._context, slot, blob) != len(blob):
            raise EngineError(f"llama.cpp could not take the rows for slot {slot}: {llama_log.cause()}")
