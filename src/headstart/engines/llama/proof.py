"""Proofs at load: what the engine can do with this model, build and device is measured, not assumed.

    A   one call of 3 grids, then a short tail
    B   the same tokens in other calls: rows and the tail's logits must have A's bits
    C   A's rows imported, then the same tail: A's logits

Exactness depends on which kernels a call hits, and those switch at sizes: attention over 512 or more cells goes another
way than over fewer. So the decode proof runs deep in a sequence, on A's rows imported several times over (numbers without
meaning, but rows all the same: depth for free).
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

    def deep(self, rows: Bytes, tokens: int, slot: int = 0) -> int:
        """Fills `slot` with copies of these rows, to an odd length; returns it."""
        room = self.engine.shape.ctx - _TAIL - 1
        length = min(_DEPTH, room) - 3
        pieces = [Rows(rows, tokens, min(tokens, length - start)) for start in range(0, length, tokens)]
        self.engine.import_rows(slot, pieces)
        return length

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
    whole = prover.cold([3 * GRID])
    logits = prover.finish()
    if not _same(prover.restored(whole, 3 * GRID), logits):
        return Traits(GRID, canonical=False, notes=("rows that were exported and imported do not give the same logits",))
    decoded = _decode_is_prefill(prover, whole)
    if decoded and _same(prover.cold([_ODD, GRID - _ODD, 2 * GRID]), whole):
        return Traits(GRID, decode_is_prefill=True, notes=("decoding and prefill in calls of any size give the same bits",))
    if _same(prover.cold([GRID, 2 * GRID]), whole):
        note = f"prefill in calls of any multiple of {GRID} tokens gives the same bits; decoding gives others"
        return Traits(GRID, notes=(note,))
    return _without_chunking(prover)


def _decode_is_prefill(prover: Prover, rows: Bytes) -> bool:
    tokens = 3 * GRID
    length = prover.deep(rows, tokens)
    logits = prover.finish()
    computed = prover.rows(0, length, length + _TAIL)
    slots = [0]
    for neighbour in (False, True):
        if neighbour:
            if prover.engine.shape.slots == 1:
                break
            slots = [0, 1]
            prover.engine.import_rows(1, [Rows(rows, tokens, _ODD)])
        prover.deep(rows, tokens)
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
