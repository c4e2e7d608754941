"""The blob of `llama_state_seq_get_data`, as llama.cpp writes it for one sequence of a full-attention model.

    u32 magic, i32 sequence, u32 streams, then for each stream: u32 cells — 0, or of the one that holds the sequence:
        cells × {i32 position, u32 1, i32 sequence}
        u32 v_trans (0), u32 layers
        layers × K {i32 type, u64 row, cells × row bytes}
        layers × V {i32 type, u64 row, cells × row bytes}          (as many as the model keeps)

A *plane* is what K or V of one layer holds. The rows of `n` tokens are cut as ``[plane][token][row]``: one buffer, in which
every plane's part is contiguous. The blob has neither a version nor a checksum, so `parse` accepts nothing but this form,
and the engine proves at load that it is the form in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headstart.engines.base import Bytes, Rows

_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_PLANE = np.dtype([("type", "<i4"), ("row", "<u8")])  # packed, 12 bytes


class LayoutError(ValueError):
    """The blob is not of the known form."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive planes with rows of equal size.

    `before`: bytes of one token in all planes before. `head`: their headers, (count, 12).
    """

    before: int
    first: int
    count: int
    row: int
    head: Bytes


def _word(blob: Bytes, at: int) -> int:
    if at + 4 > len(blob):
        raise LayoutError("it ends early")
    return int(blob[at : at + 4].view("<u4")[0])


@dataclass(frozen=True)
class Layout:
    """What is constant in the blobs of one context.

    Attributes:
        planes: (element type, bytes of a row) of each plane.
        layers: planes of K; the others are of V.
    """

    magic: int
    streams: int
    layers: int
    planes: tuple[tuple[int, int], ...]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token in all planes."""
        return sum(row for _, row in self.planes)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        runs: list[Run] = []
        before = first = 0
        for stop in range(1, len(self.planes) + 1):
            row = self.planes[first][1]
            if stop == len(self.planes) or self.planes[stop][1] != row:
                head = np.array(self.planes[first:stop], dtype=_PLANE).view(np.uint8).reshape(-1, _PLANE.itemsize)
                runs.append(Run(before, first, stop - first, row, head))
                before += (stop - first) * row
                first = stop
        return tuple(runs)

    def size(self, tokens: int) -> int:
        """Bytes of the blob of a sequence of `tokens` > 0."""
        return self._body(tokens) + _PLANE.itemsize * len(self.planes) + self.row_bytes * tokens

    def _cells(self) -> int:
        return 12 + 4 * self.streams

    def _body(self, tokens: int) -> int:
        return self._cells() + _CELL.itemsize * tokens + 8

    def _headers(self, blob: Bytes, run: Run, tokens: int) -> Bytes:
        """View of the headers of a run's planes."""
        return self._planes(blob, run, tokens, 0, _PLANE.itemsize)

    def _rows(self, blob: Bytes, run: Run, tokens: int, start: int, stop: int) -> Bytes:
        """View of tokens [start, stop) of a run: (plane, bytes), each plane's part contiguous."""
        return self._planes(blob, run, tokens, _PLANE.itemsize + start * run.row, (stop - start) * run.row)

    def _planes(self, blob: Bytes, run: Run, tokens: int, skip: int, width: int) -> Bytes:
        at = self._body(tokens) + _PLANE.itemsize * run.first + run.before * tokens + skip
        pitch = _PLANE.itemsize + run.row * tokens
        return np.lib.stride_tricks.as_strided(blob[at:], shape=(run.count, width), strides=(pitch, 1))

    def check(self, blob: Bytes, tokens: int) -> None:
        """Raises LayoutError unless `blob` is this layout's blob of positions 0 … tokens - 1, in order."""
        if len(blob) != self.size(tokens):
            raise LayoutError(f"it has {len(blob)} bytes, not {self.size(tokens)}")
        if _word(blob, 0) != self.magic or _word(blob, 8) != self.streams:
            raise LayoutError("its head is another one")
        counts = [_word(blob, 12 + 4 * stream) for stream in range(self.streams)]
        # A stream's count is followed by its cells, so of the counts only those up to the first that is not 0 are here.
        used = next((number for number, count in enumerate(counts) if count), None)
        if used is None or counts[used] != tokens:
            raise LayoutError("it holds another number of cells")
        body = blob[16 + 4 * used :]
        cells = body[: _CELL.itemsize * tokens].view(_CELL)
        if (cells["position"] != np.arange(tokens)).any() or (cells["sequences"] != 1).any():
            raise LayoutError("its cells are not in the order of the tokens")

    def cut(self, blob: Bytes, tokens: int, start: int, stop: int, out: Bytes) -> None:
        """Copies the rows of tokens [start, stop) of a blob that holds `tokens` to the front of `out`."""
        taken = stop - start
        for run in self.runs:
            part = out[run.before * taken :][: run.count * run.row * taken].reshape(run.count, -1)
            np.copyto(part, self._rows(blob, run, tokens, start, stop))

    def join(self, pieces: Sequence[Rows], out: Bytes) -> int:
        """Writes into `out` the blob of the pieces, end to end from position 0; returns its size in bytes."""
        tokens = sum(piece.take for piece in pieces)
        at = self._cells()
        head = out[:at].view("<u4")
        head[:] = 0
        head[0], head[2], head[3] = self.magic, self.streams, tokens
        if self.streams > 1:
            # The cells follow the count of their own stream, which here is the first; the other streams' come last.
            at = 16
        cells = out[at : at + _CELL.itemsize * tokens].view(_CELL)
        cells["position"] = np.arange(tokens)
        cells["sequences"] = 1
        cells["sequence"] = 0
        return at
