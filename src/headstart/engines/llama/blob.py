"""The blob of `llama_state_seq_get_data_ext`, as llama.cpp writes it for one sequence.

    blob            u32 magic, i32 sequence, then those of these parts that the model has: KV, window, recurrence
    partial blob    the same without the KV: state, which cannot be truncated

    KV, window      u32 streams, then for each stream: u32 cells: 0, or in the one that holds the sequence
                        cells × {i32 position, u32 1, [8 or 12 bytes of the token, with M-RoPE], i32 sequence}
                        u32 v_trans (0), u32 layers
                        layers × K {i32 type, u64 row, cells × row bytes}
                        layers × V {i32 type, u64 row, cells × row bytes}          (as many as the model keeps)
    recurrence      u32 1, i32 position, u32 0, then always the same number of bytes

The KV is that of all tokens. The window is that of the last tokens, as far back as sliding windows see. A *plane* is K or V of
one layer, and a *row* is one token's bytes in a plane. The KV of `n` tokens is exported as ``[plane][token][row]``: one buffer
in which each plane is contiguous. If cells have bytes of the token, these come first.

    checkpoint      u32 length of the sequence, u32 cells of the window, the window's KV exported as above, recurrence

It holds the content of a partial blob, without what depends on the slot and on the number of slots.

A window is imported with a cell for *every* earlier token. Cells of tokens that it no longer sees are **blank** (zeros). So
each token is in the cell where a cold run has it. That matters for the bits: llama.cpp's attention takes 64 cells together,
and if several threads decode one token, each gets an equal share of all cells up to the last one in use.

The blob has neither a version nor a checksum. So only this layout is accepted, and the engine proves at load that it is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.engines.llama.part import Layout, LayoutError, Part, find, parse, words
from headstart.interfaces.engine import KVSegment
from headstart.interfaces.tokens import Bytes

_HEAD = 8
_CHECKPOINT = 8  # bytes of its head


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of a blob; None, or no bytes, where it has none."""

    kv: Part | None
    window: Part | None
    recurrence: Bytes


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """The layout of the blobs of one context.

    Attributes:
        kv, window: None if the model has none.
        recurrence: bytes of the recurrent state; 0 if the model has none.
    """

    magic: int
    kv: Layout | None
    window: Layout | None = None
    recurrence: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv.kv_bytes_per_token if self.kv is not None else 0

    def size(self, tokens: int, cells: int) -> int:
        """Most bytes of a blob that llama.cpp writes for up to `tokens` > 0, up to `cells` of them in the window."""
        kv = self.kv.size(tokens) if self.kv is not None else 0
        window = self.window.size(cells) if self.window is not None else 0
        return _HEAD + kv + window + self.recurrence

    def blank(self, checkpoint: Bytes) -> int:
        """Tokens that the window of a checked checkpoint no longer sees."""
        length, cells = words(checkpoint, 0, 2)
        return length - cells if self.window is not None else 0

    def checkpoint_size(self, cells: int) -> int:
        """Bytes of a checkpoint with `cells` in its window."""
        return _CHECKPOINT + (self.window.kv_bytes_per_token * cells if self.window is not None else 0) + self.recurrence

    def open(self, blob: Bytes, tokens: int, *, partial: bool = False) -> Opened:
        """Checks that `blob` is of a sequence of `tokens`, in every part.

        Raises:
            LayoutError: it is not, or it is of another form.
        """
        if words(blob, 0, _HEAD // 4)[0] != self.magic:
            raise LayoutError("a blob with another head")
        at, end = _HEAD, len(blob) - self.recurrence
        kv = window = None
        if self.kv is not None and not partial:
            kv = self.kv.open(blob[at : at + self.kv.size(tokens)], 0, tokens)
            at += len(kv.data)
        if self.window is not None:
            cells = find(blob[at:end])[1]
            window = self.window.open(blob[at:end], tokens - cells, cells)
            at = end
        recurrence = blob[at:]
        self._check_recurrence(recurrence, tokens)
        return Opened(kv, window, recurrence)

    def _check_recurrence(self, data: Bytes, tokens: int) -> None:
        if len(data) != self.recurrence or (len(data) and words(data, 0, 3) != [1, tokens - 1, 0]):
            raise LayoutError(f"{len(data)} bytes that are not the recurrent state of {tokens} tokens")

    def cut_checkpoint(self, opened: Opened, tokens: int, out: Bytes) -> int:
        """Writes the checkpoint of an opened partial blob to the front of `out`; returns its bytes. Raises LayoutError."""
        cells = opened.window.tokens if opened.window is not None else 0
        size = self.checkpoint_size(cells)
        if size > len(out):
            raise LayoutError(f"a checkpoint of {size} bytes does not fit into {len(out)}")
        out[:_CHECKPOINT].view("<u4")[:] = (tokens, cells)
        if opened.window is not None:
            opened.window.cut(0, cells, out[_CHECKPOINT:])
        out[size - self.recurrence : size] = opened.recurrence
        return size

    def check(self, checkpoint: Bytes, tokens: int) -> None:
        """Raises LayoutError unless this is a checkpoint of a sequence of `tokens`."""
        length, cells = words(checkpoint, 0, 2)
        if length != tokens:
            raise LayoutError(f"a checkpoint of {length} tokens where one of {tokens} was due")
        if cells > tokens or (cells > 0) != (self.window is not None) or len(checkpoint) != self.checkpoint_size(cells):
            raise LayoutError(f"a checkpoint of {len(checkpoint)} bytes with {cells} tokens in its window")
        self._check_recurrence(checkpoint[len(checkpoint) - self.recurrence :], tokens)

    def join(self, segments: Sequence[KVSegment] | None, checkpoint: Bytes | None, out: Bytes) -> int:
        """Writes a blob to the front of `out`: KV segments without gaps from position 0, and the checkpoint at their end.

        Args:
            segments: None makes a partial blob.
            checkpoint: a checked one; None if the model has only KV.
            out: at least `size(tokens, tokens)` bytes, all of them zero if anything is `blank`.

        Returns:
            Bytes of the blob.
        """
        out[:_HEAD].view("<u4")[:] = (self.magic, 0)
        at = _HEAD
        if self.kv is not None and segments is not None:
            at += self.kv.join(segments, out[at:])
        if checkpoint is not None:
            if self.window is not None:
                (cells,) = words(checkpoint, 4, 1)
                at += self.window.join(
                    [KVSegment(checkpoint[_CHECKPOINT:], cells, cells)], out[at:], blank=self.blank(checkpoint)
                )
            out[at : at + self.recurrence] = checkpoint[len(checkpoint) - self.recurrence :]
            at += self.recurrence
        return at


def learn(full: Bytes, partial: Bytes, tokens: int, *, each: int, each_partial: int) -> BlobLayout:
    """The layout of a context's blobs, learnt from the blobs of a sequence that a window still sees whole.

    Args:
        full, partial: the blobs; `partial` is empty for a model that has KV only.
        tokens: of the sequence.
        each, each_partial: bytes that one more token adds to them.

    Raises:
        LayoutError: it is not the known layout.
    """
    state = partial[_HEAD:]
    end = len(full) - len(state)
    if full[end:].tobytes() != state.tobytes():
        raise LayoutError("a blob that does not end as its partial blob does")
    (magic,) = words(full, 0, 1)
    kv = parse(full[_HEAD:end], tokens, each - each_partial) if end > _HEAD else None
    window = parse(state, tokens, each_partial) if each_partial else None
    form = BlobLayout(magic, kv, window, len(state) - (window.size(tokens) if window is not None else 0))
    form.open(full, tokens)
    if len(partial):
        form.open(partial, tokens, partial=True)
    return form
