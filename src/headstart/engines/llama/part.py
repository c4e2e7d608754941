"""Part: the KV of consecutive tokens in a blob. `blob` describes the layout and the words *plane*, *row* and *cell*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from headstart.interfaces.engine import KVSegment
from headstart.interfaces.tokens import Bytes

_CELL = 12  # bytes of a cell, without its extra ones
_EXTRAS = (0, 8, 12)  # with M-RoPE: two numbers, in newer versions and the token too
_PLANE = np.dtype([("type", "<i4"), ("row", "<u8")])
_HEAD = _PLANE.itemsize  # 12: packed
_MAX_ROW = 1 << 24


class LayoutError(ValueError):
    """The blob does not have the known layout."""


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
    """The layout of the same part of all blobs of one context.

    Attributes:
        streams: of the context.
        layers: number of planes of K; the rest are of V.
        planes: element type and bytes of a row, for each plane.
        extra: bytes of a cell that belong to the token, as its KV does.
    """

    streams: int
    layers: int
    planes: tuple[tuple[int, int], ...]
    extra: int = 0

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token: in all planes, and in its cell."""
        return self.extra + sum(row for _, row in self.planes)

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

    @cached_property
    def _cell(self) -> np.dtype[Any]:
        return _cell(self.extra)

    def size(self, tokens: int) -> int:
        """Bytes of a part that holds `tokens` > 0."""
        return 4 + 4 * self.streams + 8 + _HEAD * len(self.planes) + (_CELL + self.kv_bytes_per_token) * tokens

    def planes_of(self, data: Bytes, body: int, tokens: int, run: Run, skip: int, width: int) -> Bytes:
        """View of `width` bytes, `skip` bytes after the start of each plane of a run: (plane, bytes)."""
        at = body + self._cell.itemsize * tokens + 8 + _HEAD * run.first + run.before * tokens + skip
        pitch = _HEAD + run.row * tokens
        assert at + (run.count - 1) * pitch + width <= len(data)
        return np.lib.stride_tricks.as_strided(data[at:], shape=(run.count, width), strides=(pitch, 1))

    def cells_of(self, data: Bytes, body: int, tokens: int) -> Any:
        """View of the cells: a structured array."""
        return data[body : body + self._cell.itemsize * tokens].view(self._cell)

    def open(self, data: Bytes, first: int, tokens: int) -> Part:
        """Checks that `data` is a part of positions `first` … `first + tokens - 1`, in order.

        Raises:
            LayoutError: it is not, or it has another layout.
        """
        if len(data) != self.size(tokens):
            raise LayoutError(f"a part of {len(data)} bytes instead of {self.size(tokens)}")
        streams, count, body = find(data)
        if (streams, count) != (self.streams, tokens):
            raise LayoutError(f"a part of {count} tokens in {streams} streams")
        cells = self.cells_of(data, body, tokens)
        if tuple(words(data, body + cells.nbytes, 2)) != (0, self.layers):
            raise LayoutError("a part with another number of layers, or transposed values")
        if not _in_order(cells, first):
            raise LayoutError("a part whose cells are not in the order of the tokens")
        for run in self.runs:
            if (self.planes_of(data, body, tokens, run, 0, _HEAD) != run.heads).any():
                raise LayoutError("a part with other planes")
        return Part(self, data, body, tokens)

    def join(self, segments: Sequence[KVSegment], out: Bytes, *, blank: int = 0) -> int:
        """Writes the segments, one after the other, as a part to the front of `out`; returns its bytes.

        Args:
            blank: positions before the segments. Their cells are written; their KV stays as it is in `out`, which is zeros.
        """
        tokens = blank + sum(segment.take for segment in segments)
        size = self.size(tokens)
        data, body = out[:size], 8
        data[:body].view("<u4")[:] = (self.streams, tokens)
        cells = self.cells_of(data, body, tokens)
        cells["position"] = np.arange(tokens)
        cells["sequences"] = 1
        cells["sequence"] = 0
        data[body + cells.nbytes :][:8].view("<u4")[:] = (0, self.layers)
        data[size - 4 * (self.streams - 1) :] = 0  # the other streams' counts; which one is used does not matter
        start = blank
        for segment in segments:
            extra = segment.data[: self.extra * segment.tokens].reshape(segment.tokens, self.extra)
            cells["extra"][start : start + segment.take] = extra[: segment.take]
            start += segment.take
        for run in self.runs:
            self.planes_of(data, body, tokens, run, 0, _HEAD)[:] = run.heads
            start = blank
            for segment in segments:
                part = segment.data[(self.extra + run.before) * segment.tokens :][: run.count * run.row * segment.tokens]
                width = segment.take * run.row
                place = self.planes_of(data, body, tokens, run, _HEAD + start * run.row, width)
                np.copyto(place, part.reshape(run.count, -1)[:, :width])
                start += segment.take
        return size


@dataclass(frozen=True, slots=True)
class Part:
    """A part that was checked against its layout. Its cells begin at `body`."""

    layout: Layout
    data: Bytes
    body: int
    tokens: int

    def cut(self, start: int, stop: int, out: Bytes) -> None:
        """Copies the KV of the tokens [start, stop), counted from the part's first, to the front of `out`."""
        layout, taken = self.layout, stop - start
        extra = out[: layout.extra * taken].reshape(taken, layout.extra)
        extra[:] = layout.cells_of(self.data, self.body, self.tokens)["extra"][start:stop]
        for run in layout.runs:
            part = out[(layout.extra + run.before) * taken :][: run.count * run.row * taken].reshape(run.count, -1)
            place = layout.planes_of(self.data, self.body, self.tokens, run, _HEAD + start * run.row, taken * run.row)
            np.copyto(part, place)


def parse(data: Bytes, tokens: int, each: int) -> Layout:
    """The layout of the part at the start of `data`, which has the positions 0 … `tokens - 1`.

    Args:
        each: bytes that one more token adds to the part.

    Raises:
        LayoutError: the part does not have the known layout.
    """
    streams, count, body = find(data)
    if count != tokens:
        raise LayoutError(f"a part of {count} tokens instead of {tokens}")
    for extra in _EXTRAS:
        cells = data[body : body + (_CELL + extra) * tokens]
        if len(cells) == (_CELL + extra) * tokens and _in_order(cells.view(_cell(extra)), 0):
            break
    else:
        raise LayoutError("a part whose cells are not in the order of the tokens")
    at = body + len(cells)
    trans, layers = words(data, at, 2)
    if trans != 0:
        raise LayoutError("a part with transposed values")
    at += 8
    planes: list[tuple[int, int]] = []
    left = each - _CELL - extra
    while left > 0:
        kind, low, high = words(data, at, 3)
        row = low | high << 32
        at += _HEAD + row * tokens
        if not 0 < row <= min(left, _MAX_ROW):
            raise LayoutError("a part with planes of another layout")
        planes.append((kind, row))
        left -= row
    if left or not layers <= len(planes) <= 2 * layers:
        raise LayoutError(f"a part with {len(planes)} planes for {layers} layers")
    layout = Layout(streams, layers, tuple(planes), extra)
    layout.open(data[: layout.size(tokens)], 0, tokens)
    return layout


def words(data: Bytes, at: int, count: int) -> list[int]:
    """Unsigned 32-bit words. Raises LayoutError if `data` ends too early."""
    if at < 0 or at + 4 * count > len(data):
        raise LayoutError("a blob that ends early")
    return [int(word) for word in data[at : at + 4 * count].view("<u4")]


def find(data: Bytes) -> tuple[int, int, int]:
    """Number of streams of a part, number of cells in the stream that is in use, and where these cells begin."""
    (streams,) = words(data, 0, 1)
    for stream in range(streams):
        at = 4 + 4 * stream
        (count,) = words(data, at, 1)
        if count:
            return streams, count, at + 4
    raise LayoutError("a part without tokens")


def _cell(extra: int) -> np.dtype[Any]:
    return np.dtype([("position", "<i4"), ("sequences", "<u4"), ("extra", "u1", (extra,)), ("sequence", "<i4")])


def _in_order(cells: Any, first: int) -> bool:
    return bool((cells["position"] == np.arange(first, first + len(cells))).all() and (cells["sequences"] == 1).all())
