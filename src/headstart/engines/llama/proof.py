"""Proofs at load: what the engine can do with this model, build and device is measured, not assumed.

    A   one call of 2 grids, then a short tail
    B   the same tokens in other calls: rows and the tail's logits must have A's bits; once more deep in a sequence
    C   A's rows imported, then the same tail: A's logits

Exactness depends on which kernels a call hits, and those switch at sizes: attention over 512 or more cells goes another
way than over fewer. Depth is had for free by importing A's rows several times over: numbers without meaning, but rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headstart.engines.base import Bytes, Engine, Logits, Rows, Span, Step, Traits

GRID = 64
"""Where prefill may stop on llama.cpp: its attention kernels change at 64 tokens a call, and its tiles are 64 cells."""
_TAIL = 8
_A = 2 * GRID
_DEPTH = 320  # behind 256 cells, so that attention runs over 512
_ODD = 37

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Prover:
    """Runs proofs on an engine whose slots are all empty, and leaves them empty."""

    engine: Engine
    tokens: Tokens
    tail: Tokens

    def cold(self, calls: Sequence[int], slot: int = 0) -> Bytes:
        """Computes the first tokens in calls of these sizes; their rows."""
        self.engine.truncate(slot, 0)
        start = 0
        for size in calls:
            self.engine.prefill(slot, self.tokens[start : start + size], logits=False)
            start += size
        return self.rows(slot, 0, start)

    def rows(self, slot: int, start: int, stop: int) -> Bytes:
        out = np.empty((stop - start) * self.engine.shape.row_bytes, np.uint8)
        self.engine.export_rows(slot, [Span(start, stop, out)])
        return out

    def finish(self, slot: int = 0) -> Logits:
        """Logits behind the tail, computed in one call."""
        self.engine.prefill(slot, self.tail, logits=True)
        return self.engine.logits(slot)

    def restored(self, rows: Bytes, tokens: int, slot: int = 0) -> Logits:
        self.engine.import_rows(slot, [Rows(rows, tokens, tokens)])
        return self.finish(slot)

    def deep(self, rows: Bytes, tokens: int, length: int, slot: int = 0) -> None:
        """Fills `slot` with copies of these rows, to `length`."""
        self.engine.truncate(slot, 0)
        pieces = [Rows(rows, tokens, min(tokens, length - start)) for start in range(0, length, tokens)]
        self.engine.import_rows(slot, pieces)

    def chunks_deep(self, rows: Bytes) -> bool:
        """Whether A's tokens get the same rows in one call and in two where attention spans 512 cells."""
        depth = _DEPTH if self.engine.shape.ctx >= _DEPTH + _A else 0
        found = []
        for size in (_A, GRID):
            self.deep(rows, _A, depth)
            for start in range(0, _A, size):
                self.engine.prefill(0, self.tokens[start : start + size], logits=False)
            found.append(self.rows(0, depth, depth + _A))
        return _same(*found)

    def decode(self, slots: Sequence[int]) -> Logits:
        """Logits of the first slot after the tail was decoded into all of them, token by token."""
        for token in self.tail:
            self.engine.decode([Step(slot, int(token)) for slot in slots])
        return self.engine.logits(slots[0])


def prove(engine: Engine, tokens: Tokens) -> Traits:
    """The traits of a sliceable engine.

    Args:
        tokens: ordinary tokens to compute on, more than `engine.shape.batch`.

    Raises:
        EngineError: it cannot even compute.
    """
    prover = Prover(engine, tokens, tokens[-_TAIL:])
    try:
        return _prove(prover)
    finally:
        for slot in range(engine.shape.slots):
            engine.truncate(slot, 0)


def _prove(prover: Prover) -> Traits:
    whole = prover.cold([_A])
    logits = prover.finish()
    if not _same(prover.restored(whole, _A), logits):
        return Traits(GRID, canonical=False, notes=("rows that were exported and imported do not give the same logits",))
    decoded = _decode_is_prefill(prover, whole)
    if decoded and _same(prover.cold([_ODD, _A - _ODD]), whole):
        return Traits(GRID, decode_is_prefill=True, notes=("decoding and prefill in calls of any size give the same bits",))
    if _same(prover.cold([GRID, GRID]), whole) and prover.chunks_deep(whole):
        note = f"prefill in calls of {GRID} and of {_A} tokens gives the same bits; decoding gives others"
        return Traits(GRID, notes=(note,))
    return _without_chunking(prover)


def _decode_is_prefill(prover: Prover, rows: Bytes) -> bool:
    length = min(_DEPTH, prover.engine.shape.ctx - _TAIL - 1) - 3  # odd: inside a tile
    prover.deep(rows, _A, length)
    logits = prover.finish()
    computed = prover.rows(0, length, length + _TAIL)
    slots = [0]
    for neighbour in (False, True):
        if neighbour:
            if prover.engine.shape.slots == 1:
                break
            slots = [0, 1]
            prover.engine.import_rows(1, [Rows(rows, _A, _ODD)])
        prover.deep(rows, _A, length)
        if not _same(prover.decode(slots), logits) or not _same(prover.rows(0, length, length + _TAIL), computed):
            return False
    return True


def _without_chunking(prover: Prover) -> Traits:
    # Whatever a call's size does to the bits, the same call twice must give the same.
    grid = prover.engine.shape.batch
    if grid + _TAIL > prover.engine.shape.ctx:
        grid = GRID
    first = prover.cold([grid])
    logits = prover.finish()
    again = prover.cold([grid])
    traits = Traits(grid, chunking=False, notes=(f"prefill in calls of different sizes gives different bits: grid of {grid}",))
    if _same(again, first) and _same(prover.finish(), logits) and _same(prover.restored(first, grid), logits):
        return traits
    return replace(traits, canonical=False, notes=(*traits.notes, "the same prefill twice does not give the same bits"))


def _same(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> bool:
    return a.tobytes() == b.tobytes()
