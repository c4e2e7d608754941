"""Proofs at load: what the engine can do with this model, build and device is measured, not assumed.

Of a model that has rows only:

    A   one call of 2 grids, then a short tail
    B   the same tokens in other calls: rows and the tail's logits must have A's bits; once more deep in a sequence
    C   A's rows imported, then the same tail: A's logits

Of a model with state the same, with checkpoints beside rows, and after a prefix that is deep and, where a
window is not too long, longer than it. B begins with the prefix restored in another slot, beside A's.

    D   A's slot rewound to where the tail began, then the tail: A's logits

Exactness depends on which kernels a call hits, and those switch at sizes: attention over 512 or more cells goes another
way than over fewer. Rows alone are deep for free: A's imported several times over are numbers without meaning, but rows.
A state has to be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from headstart.engines.base import Bytes, Engine, Logits, Rows, Span, Step, Traits
from headstart.engines.llama.padding import TILE
from headstart.errors import EngineError

GRID = TILE
"""Where prefill may stop on llama.cpp: its attention kernels change at 64 tokens a call, and its tiles are 64 cells."""
_TAIL = 8
_A = 2 * GRID
_DEPTH = 320  # behind 256 cells, so that attention runs over 512
_ODD = 37
_LONGEST_WINDOW = 1024
"""Of windows, in tokens: beyond longer ones nothing is computed, for it would take too long."""
MOST_TOKENS = _LONGEST_WINDOW + GRID + _A + _TAIL

Tokens = npt.NDArray[np.int32]


class Unmovable(Exception):
    """What is moved does not arrive, or not as it was."""


@dataclass(frozen=True)
class Saved:
    """The first `tokens` tokens of a slot: their rows, and the checkpoint at their end (no bytes without state)."""

    tokens: int
    rows: Bytes
    state: Bytes

    def same(self, other: Saved) -> bool:
        return self.tokens == other.tokens and _same(self.rows, other.rows) and _same(self.state, other.state)


@dataclass(frozen=True)
class Prover:
    """Runs proofs on an engine whose slots are all empty."""

    engine: Engine
    tokens: Tokens
    tail: Tokens

    def feed(self, calls: Sequence[int], slot: int = 0) -> None:
        """Goes on in calls of these sizes."""
        for size in calls:
            start = self.engine.length(slot)
            self.engine.prefill(slot, self.tokens[start : start + size], logits=False)

    def cold(self, calls: Sequence[int]) -> Saved:
        """Computes the first tokens in calls of these sizes."""
        self.engine.truncate(0, 0)
        self.feed(calls)
        return self.saved()

    def saved(self, slot: int = 0) -> Saved:
        """What the slot holds. Raises Unmovable."""
        length = self.engine.length(slot)
        state = np.empty(self.engine.shape.state_bytes, np.uint8)
        try:
            if len(state):
                state = state[: self.engine.export_checkpoint(slot, state)]
            return Saved(length, self.rows(slot, 0, length), state)
        except EngineError as error:
            raise Unmovable(f"a slot cannot be exported: {error}") from error

    def rows(self, slot: int, start: int, stop: int) -> Bytes:
        out = np.empty((stop - start) * self.engine.shape.row_bytes, np.uint8)
        self.engine.export_rows(slot, [Span(start, stop, out)])
        return out

    def finish(self, slot: int = 0) -> Logits:
        """Logits behind the tail, computed in one call."""
        self.engine.prefill(slot, self.tail, logits=True)
        return self.engine.logits(slot)

    def restored(self, saved: Saved) -> Logits:
        """Logits behind the tail, after the rest was imported."""
        if len(saved.state):
            self.put(saved, 0)
        else:
            self.engine.import_rows(0, [Rows(saved.rows, saved.tokens, saved.tokens)])
        return self.finish()

    def put(self, saved: Saved, slot: int, *, in_place: bool = False) -> None:
        """Rewinds or fills the slot, and looks whether it then holds what was saved. Raises Unmovable."""
        how = "rewound" if in_place else "imported"
        try:
            if in_place:
                self.engine.rewind(slot, saved.tokens, saved.state)
            else:
                self.engine.import_checkpoint(slot, [Rows(saved.rows, saved.tokens, saved.tokens)], saved.state)
        except EngineError as error:
            raise Unmovable(f"a slot cannot be {how}: {error}") from error
        if not self.saved(slot).same(saved):
            raise Unmovable(f"a slot that was {how} holds something else")

    def deep(self, saved: Saved, length: int) -> None:
        """Fills the first slot with copies of these rows, to `length`."""
        self.engine.truncate(0, 0)
        tokens = saved.tokens
        pieces = [Rows(saved.rows, tokens, min(tokens, length - start)) for start in range(0, length, tokens)]
        self.engine.import_rows(0, pieces)

    def chunks_deep(self, saved: Saved) -> bool:
        """Whether A's tokens get the same rows in one call and in two where attention spans 512 cells."""
        depth = _DEPTH if self.engine.shape.ctx >= _DEPTH + _A else 0
        found = []
        for size in (_A, GRID):
            self.deep(saved, depth)
            for start in range(0, _A, size):
                self.engine.prefill(0, self.tokens[start : start + size], logits=False)
            found.append(self.rows(0, depth, depth + _A))
        return _same(*found)

    def decode(self, slots: Sequence[int]) -> Logits:
        """Logits of the first slot after the tail was decoded into all of them, token by token."""
        for token in self.tail:
            self.engine.decode([Step(slot, int(token)) for slot in slots])
        return self.engine.logits(slots[0])


def prove(engine: Engine, tokens: Tokens, *, window: int = 0) -> Traits:
    """The traits of an engine that says of itself whether it is sliceable. Its slots are empty, before and after.

    Args:
        tokens: ordinary tokens to compute on, at least `MOST_TOKENS`.
        window: tokens that the model's sliding windows see; 0 if it has none.

    Raises:
        EngineError: it cannot even compute.
    """
    prover, sliceable = Prover(engine, tokens, tokens[-_TAIL:]), engine.traits.sliceable
    try:
        return replace(_prove_rows(prover) if sliceable else _prove_state(prover, window), sliceable=sliceable)
    except Unmovable as error:
        return Traits(GRID, canonical=False, sliceable=False, movable=False, notes=(str(error),))
    finally:
        _empty(engine)


def answer(engine: Engine, tokens: Tokens) -> bytes | None:
    """Digest of what is computed for one grid of tokens and short tails: rows, state and logits. Slots as for `prove`.

    A sample of the bits that a proof compares, for a sixth of its tokens or less. None if what is moved out and in again
    does not go on with the same bits.
    """
    prover = Prover(engine, tokens, tokens[-_TAIL:])
    try:
        saved = prover.cold([GRID])
        logits = prover.finish()
        if not _same(prover.restored(saved), logits):
            return None
        found: list[npt.NDArray[np.generic]] = [saved.rows, saved.state, logits]
        if engine.traits.sliceable:
            prover.deep(saved, min(_DEPTH, engine.shape.ctx - _TAIL))
            found.append(prover.finish())
        return blake3(b"".join(part.tobytes() for part in found)).digest()
    except Unmovable:
        return None
    finally:
        _empty(engine)


def _empty(engine: Engine) -> None:
    for slot in range(engine.shape.slots):
        engine.truncate(slot, 0)


def _prove_rows(prover: Prover) -> Traits:
    whole = prover.cold([_A])
    logits = prover.finish()
    if not _same(prover.restored(whole), logits):
        return Traits(GRID, canonical=False, notes=("rows that were exported and imported do not give the same logits",))
    decoded = _decode_is_prefill(prover, whole)
    if decoded and prover.cold([_ODD, _A - _ODD]).same(whole):
        return Traits(GRID, decode_is_prefill=True, notes=("decoding and prefill in calls of any size give the same bits",))
    if prover.cold([GRID, GRID]).same(whole) and prover.chunks_deep(whole):
        note = f"prefill in calls of {GRID} and of {_A} tokens gives the same bits; decoding gives others"
        return Traits(GRID, notes=(note,))
    return _without_chunking(prover)


def _decode_is_prefill(prover: Prover, whole: Saved) -> bool:
    length = min(_DEPTH, prover.engine.shape.ctx - _TAIL - 1) - 3  # odd: inside a tile
    prover.deep(whole, length)
    logits = prover.finish()
    computed = prover.rows(0, length, length + _TAIL)
    slots = [0]
    for neighbour in (False, True):
        if neighbour:
            if prover.engine.shape.slots == 1:
                break
            slots = [0, 1]
            prover.engine.import_rows(1, [Rows(whole.rows, _A, _ODD)])
        prover.deep(whole, length)
        if not _same(prover.decode(slots), logits) or not _same(prover.rows(0, length, length + _TAIL), computed):
            return False
    return True


def _prove_state(prover: Prover, window: int) -> Traits:
    engine = prover.engine
    beyond = -(-window // GRID) * GRID + GRID
    room = (engine.shape.ctx - _A - _TAIL) // GRID * GRID
    depth = min(room, beyond if 0 < window <= _LONGEST_WINDOW else _DEPTH - _A)
    batch = engine.shape.batch
    prover.feed([min(batch, depth - start) for start in range(0, depth, batch)])
    prefix = prover.saved()
    prover.feed([_A])
    whole = prover.saved()
    logits = prover.finish()
    prover.put(whole, 0, in_place=True)
    exact = _same(prover.finish(), logits)
    other = min(1, engine.shape.slots - 1)
    found = []
    for calls in ([GRID, GRID], [_A]):
        prover.put(prefix, other)
        prover.feed(calls, other)
        found.append(prover.saved(other).same(whole))
        if found[-1]:
            break
    if not exact or not found[-1] or not _same(prover.restored(whole), logits):
        return Traits(GRID, canonical=False, notes=("what is restored does not give the same bits",))
    if found[0]:
        reach = f"{whole.tokens} tokens deep" + (f", of a window of {window}" if whole.tokens <= window else "")
        note = f"prefill in calls of {GRID} and of {_A} tokens and checkpoints give the same bits, {reach}"
        return Traits(GRID, notes=(note,))
    return _without_chunking(prover)


def _without_chunking(prover: Prover) -> Traits:
    # Whatever a call's size does to the bits, the same call twice must give the same.
    grid = prover.engine.shape.batch
    if grid + _TAIL > prover.engine.shape.ctx:
        grid = GRID
    first = prover.cold([grid])
    logits = prover.finish()
    again = prover.cold([grid])
    traits = Traits(grid, chunking=False, notes=(f"prefill in calls of different sizes gives different bits: grid of {grid}",))
    if again.same(first) and _same(prover.finish(), logits) and _same(prover.restored(first), logits):
        return traits
    return replace(traits, canonical=False, notes=(*traits.notes, "the same prefill twice does not give the same bits"))


def _same(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> bool:
    return a.tobytes() == b.tobytes()
