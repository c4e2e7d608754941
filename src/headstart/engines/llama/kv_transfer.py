"""Moves KV and checkpoints out of and into a llama.cpp context, through one host buffer. It is reused, because a fresh buffer
costs ten times the copy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.engines.llama import blob as llama_blob
from headstart.engines.llama import log as llama_log
from headstart.engines.llama.binding import lib
from headstart.engines.llama.blob import BlobLayout, Opened
from headstart.engines.llama.part import LayoutError
from headstart.errors import EngineError
from headstart.interfaces.engine import KVSegment, Span
from headstart.interfaces.tokens import Bytes

_Pointer = ctypes.POINTER(ctypes.c_uint8)
WHOLE, PARTIAL = 0, 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


def size(context: Any, slot: int, flags: int = WHOLE) -> int:
    """Bytes of the blob of `slot`."""
    return int(lib.llama_state_seq_get_size_ext(context, slot, flags))


def read(context: Any, slot: int, out: Bytes, flags: int = WHOLE) -> int:
    """Writes the blob of `slot` to the front of `out`; returns its bytes, 0 on failure."""
    lib.llama_synchronize(context)
    return int(lib.llama_state_seq_get_data_ext(context, out.ctypes.data_as(_Pointer), len(out), slot, flags))


def write(context: Any, slot: int, blob: Bytes, flags: int = WHOLE) -> int:
    """Replaces the content of `slot`, or the parts of it that a partial blob has; returns the number of bytes read."""
    return int(lib.llama_state_seq_set_data_ext(context, blob.ctypes.data_as(_Pointer), len(blob), slot, flags))


def learn(context: Any, slot: int, tokens: int, sizes: tuple[int, int], *, sliceable: bool) -> BlobLayout:
    """The layout of this context's blobs. It is proved on `slot`: cutting, joining and loading a blob gives the same bytes.

    Args:
        tokens: in `slot`: at least 2, and few enough for every window.
        sizes: bytes of its whole and its partial blob with one token less.
        sliceable: whether the model has KV only.

    Raises:
        LayoutError: it is not the known layout.
        EngineError: a blob could not be loaded.
    """

    def blobs() -> list[Bytes]:
        found = [np.empty(size(context, slot, flags), np.uint8) for flags in ((WHOLE,) if sliceable else (WHOLE, PARTIAL))]
        for blob, flags in zip(found, (WHOLE, PARTIAL), strict=False):
            if read(context, slot, blob, flags) != len(blob):
                raise LayoutError("a blob that is shorter than announced")
        return found

    first = blobs()
    whole, partial = (*first, np.empty(0, np.uint8))[:2]
    grown = (len(whole) - sizes[0], len(partial) - sizes[1] if len(partial) else 0)
    form = llama_blob.learn(whole, partial, tokens, each=grown[0], each_partial=grown[1])
    transfer = Transfer(context, form, tokens, tokens)
    middle = tokens // 2
    spans = [Span(a, b, np.empty((b - a) * form.kv_bytes_per_token, np.uint8)) for a, b in ((0, middle), (middle, tokens))]
    transfer.export(slot, tokens, spans)
    state = None
    if not sliceable:
        state = np.empty(form.checkpoint_size(tokens), np.uint8)
        state = state[: transfer.checkpoint(slot, tokens, state)]
    lib.llama_memory_seq_rm(lib.llama_get_memory(context), slot, -1, -1)
    transfer.restore(
        slot, tokens, [KVSegment(span.data, span.stop - span.start, span.stop - span.start) for span in spans], state
    )
    if any(again.tobytes() != before.tobytes() for again, before in zip(blobs(), first, strict=True)):
        raise LayoutError("a blob that does not survive being cut and joined")
    return form


class Transfer:
    """Moves KV and checkpoints of one context. Holds `bytes` of host memory: the largest blob that llama.cpp writes.

    Args:
        ctx: tokens that a slot can hold.
        window: most tokens that sliding windows see.
    """

    def __init__(self, context: Any, form: BlobLayout, ctx: int, window: int) -> None:
        self._context = context
        self._form = form
        self._buffer = np.empty(form.size(ctx, window), np.uint8)

    @property
    def only_windows(self) -> bool:
        """Whether a checkpoint holds windows only. The cells of the slot have the same content, unless they are blank."""
        return self._form.recurrence == 0

    def blank(self, state: Bytes) -> int:
        """Number of first tokens with blank cells in the windows of a slot that imported this checkpoint."""
        return self._form.blank(state)

    @property
    def bytes(self) -> int:
        return len(self._buffer)

    def release(self) -> None:
        """Gives the buffer's pages back to the system; the next move takes as many as it needs."""
        self._buffer = np.empty(len(self._buffer), np.uint8)

    def export(self, slot: int, tokens: int, spans: Sequence[Span]) -> None:
        """Copies spans out of `slot`, which holds `tokens`. Raises EngineError."""
        if self._form.kv_bytes_per_token == 0:
            return
        kv = self._open(slot, tokens, WHOLE).kv
        assert kv is not None
        for span in spans:
            kv.cut(span.start, span.stop, span.data)

    def checkpoint(self, slot: int, tokens: int, out: Bytes) -> int:
        """Copies the checkpoint of `slot`, which holds `tokens`, to the front of `out`; its bytes. Raises EngineError."""
        opened = self._open(slot, tokens, PARTIAL)
        try:
            return self._form.cut_checkpoint(opened, tokens, out)
        except LayoutError as error:
            raise EngineError(f"llama.cpp gave {error}") from error

    def check(self, state: Bytes, tokens: int) -> None:
        """Raises EngineError unless `state` is a checkpoint of a sequence of `tokens`."""
        try:
            self._form.check(state, tokens)
        except LayoutError as error:
            raise EngineError(f"this is {error}") from error

    def restore(self, slot: int, tokens: int, segments: Sequence[KVSegment] | None, state: Bytes | None) -> None:
        """Replaces the content of `slot` by the segments and the checked checkpoint at their end.

        Without segments it replaces the state only.

        Args:
            tokens: in `slot` afterwards.

        Raises EngineError; the slot's content is then unknown.
        """
        flags = PARTIAL if segments is None else WHOLE
        out = self._buffer
        if state is not None and self._form.blank(state):
            # Fresh pages are zeros and take memory only where they are written, which is less than the buffer gives back.
            self.release()
            try:
                out = np.zeros(self._form.size(tokens, tokens), np.uint8)
            except MemoryError as error:
                raise EngineError(f"there is no room to put {tokens} tokens into slot {slot}") from error
        blob = out[: self._form.join(segments, state, out)]
        if write(self._context, slot, blob, flags) != len(blob):
            raise EngineError(f"llama.cpp could not load the content of slot {slot}: {llama_log.cause()}")

    def _open(self, slot: int, tokens: int, flags: int) -> Opened:
        blob = self._buffer[: read(self._context, slot, self._buffer, flags)]
        if not len(blob):
            raise EngineError(f"llama.cpp could not copy the content of slot {slot}: {llama_log.cause()}")
        try:
            return self._form.open(blob, tokens, partial=flags == PARTIAL)
        except LayoutError as error:
            raise EngineError(f"llama.cpp gave {error}") from error
