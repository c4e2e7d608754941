"""The blob of `llama_state_seq_get_data`, as llama.cpp writes it for one sequence of a full-attention model.

    u32 magic, i32 sequence, u32 streams, then for each stream: u32 cells: 0, or in the one that holds the sequence
        cells × {i32 position, u32 1, i32 sequence}
        u32 v_trans (0), u32 layers
        layers × K {i32 type, u64 row, cells × row bytes}
        layers × V {i32 type, u64 row, cells × row bytes}          (as many as the model keeps)

A *plane* is what K or V of one layer holds. The rows of `n` tokens are cut as ``[plane][token][row]``: one buffer, in which
every plane's part is contiguous. The blob has neither a version nor a checksum, so nothing but this form is accepted, and
the engine proves at load that it is the form in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headstart.engines.base import Bytes, Rows

_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_PLANE = np.dtype([("type", "<i4"), ("row", "<u8")])
_HEAD = _PLANE.itemsize  # 12: packed
_MAX_ROW = 1 << 24


class LayoutError(ValueError):
    """The blob is not of the known form."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive planes with rows of `row` bytes.

    `before`: bytes of one token in all earlier planes. `heads`: headers, (count, 12).
    """

    first: int
    count: int
    row: int
    before: int
    heads: Bytes


@dataclass(frozen=True)
class Layout:
    """What the blobs of one context have in common.

    Attributes:
        layers: planes of K; the rest are of V.
        planes: element type and bytes of a row, of each plane.
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
        # One strided copy serves a whole run; most models are a single one.
        runs: list[Run] = []
        first = before = 0
        for stop in range(1, len(self.planes) + 1):
            row = self.planes[first][1]
            if stop == len(self.planes) or self.planes[stop][1] != row:
                heads = np.array(list(self.planes[first:stop]), dtype=_PLANE).view(np.uint8).reshape(-1, _HEAD)
                runs.append(Run(first, stop - first, row, before, heads))
                before += (stop - first) * row
                first = stop
        return tuple(runs)

    def size(self, tokens: int) -> int:
        """Bytes of the blob of a sequence of `tokens` > 0."""
        fixed = 12 + 4 * self.streams + 8 + _HEAD * len(self.planes)
        return fixed + (_CELL.itemsize + self.row_bytes) * tokens

    def _strided(self, blob: Bytes, body: int, tokens: int, run: Run, skip: int, width: int) -> Bytes:
        """View of `width` bytes, `skip` bytes behind the start of each plane of a run: (plane, bytes)."""
        at = body + _CELL.itemsize * tokens + 8 + _HEAD * run.first + run.before * tokens + skip
        pitch = _HEAD + run.row * tokens
        assert at + (run.count - 1) * pitch + width <= len(blob)
        return np.lib.stride_tricks.as_strided(blob[at:], shape=(run.count, width), strides=(pitch, 1))

    def open(self, blob: Bytes, tokens: int) -> int:
        """Checks that `blob` holds positions 0 … tokens - 1 in order; returns the offset of its first cell.

        Raises:
            LayoutError: it does not, or it is of another form.
        """
        if len(blob) != self.size(tokens):
            raise LayoutError(f"a blob of {len(blob)} bytes where {self.size(tokens)} were due")
        magic, streams, body = _open(blob, tokens)
        cells = blob[body : body + _CELL.itemsize * tokens].view(_CELL)
        at = body + cells.nbytes
        trans, layers = blob[at : at + 8].view("<u4")
        if (magic, streams, trans, layers) != (self.magic, self.streams, 0, self.layers):
            raise LayoutError("a blob with another head")
        if (cells["position"] != np.arange(tokens)).any() or (cells["sequences"] != 1).any():
            raise LayoutError("a blob whose cells are not in the order of the tokens")
        for run in self.runs:
            if (self._strided(blob, body, tokens, run, 0, _HEAD) != run.heads).any():
                raise LayoutError("a blob with other planes")
        return body

    def cut(self, blob: Bytes, body: int, tokens: int, start: int, stop: int, out: Bytes) -> None:
        """Copies the rows of tokens [start, stop) to the front of `out`; `body` is what `open` returned."""
        taken = stop - start
        for run in self.runs:
            part = out[run.before * taken :][: run.count * run.row * taken].reshape(run.count, -1)
            np.copyto(part, self._strided(blob, body, tokens, run, _HEAD + start * run.row, taken * run.row))

    def join(self, pieces: Sequence[Rows], out: Bytes) -> int:
        """Writes the blob of the pieces, end to end from position 0, to the front of `out`; returns its bytes."""
        tokens = sum(piece.take for piece in pieces)
        size = self.size(tokens)
        blob, body = out[:size], 16
        blob[:body].view("<u4")[:] = (self.magic, 0, self.streams, tokens)
        cells = blob[body : body + _CELL.itemsize * tokens].view(_CELL)
        cells["position"] = np.arange(tokens)
        cells["sequences"] = 1
        cells["sequence"] = 0
        blob[body + cells.nbytes :][:8].view("<u4")[:] = (0, self.layers)
        blob[size - 4 * (self.streams - 1) :] = 0  # the other streams' counts; which one is used does not matter
        for run in self.runs:
            self._strided(blob, body, tokens, run, 0, _HEAD)[:] = run.heads
            start = 0
            for piece in pieces:
                part = piece.data[run.before * piece.tokens :][: run.count * run.row * piece.tokens]
                width = piece.take * run.row
                place = self._strided(blob, body, tokens, run, _HEAD + start * run.row, width)
                np.copyto(place, part.reshape(run.count, -1)[:, :width])
                start += piece.take
        return size


def parse(blob: Bytes, tokens: int) -> Layout:
    """The layout of a blob that holds `tokens` tokens.

    Raises:
        LayoutError: the blob is not of the known form.
    """
    magic, streams, body = _open(blob, tokens)
    at = body + _CELL.itemsize * tokens
    trans, layers = _words(blob, at, 2)
    if trans != 0:
        raise LayoutError("a blob with transposed values")
    at += 8
    # Behind the planes come the (zero) counts of the streams that follow the used one.
    end = len(blob) - 4 * (streams - 1 - (body - 16) // 4)
    planes: list[tuple[int, int]] = []
    while at < end:
        kind, low, high = _words(blob, at, 3)
        row = low | high << 32
        at += _HEAD + row * tokens
        if not 0 < row <= _MAX_ROW or at > end:
            raise LayoutError("a blob with planes of another form")
        planes.append((kind, row))
    if not 0 < layers <= len(planes) <= 2 * layers:
        raise LayoutError(f"a blob with {len(planes)} planes for {layers} layers")
    layout = Layout(magic, streams, layers, tuple(planes))
    layout.open(blob, tokens)
    return layout


def _words(blob: Bytes, at: int, count: int) -> list[int]:
    if at < 0 or at + 4 * count > len(blob):
        raise LayoutError("a blob that ends early")
    return [int(word) for word in blob[at : at + 4 * count].view("<u4")]


def _open(blob: Bytes, tokens: int) -> tuple[int, int, int]:
    """Magic, number of streams, and where the cells of the one stream that is in use begin."""
    magic, _, streams = _words(blob, 0, 3)
    for stream in range(streams):
        at = 12 + 4 * stream
        (count,) = _words(blob, at, 1)
        if count == tokens:
            return magic, streams, at + 4
        if count:
            break
    raise LayoutError(f"a blob without a stream of {tokens} cells")
