"""Cache: index + retention + memory tier, as the scheduler uses them. Saves a slot's rows, restores them, forgets them.

Used from the engine thread only. A fault in here is a miss with a reason, never a failed request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from headstart.core.blocks import BlockId, Chain, Tokens, as_tokens, block_id
from headstart.core.index import Entry, Index
from headstart.core.planner import Mode, Plan
from headstart.core.retention import Retention
from headstart.engines.base import Engine, Rows, Span
from headstart.errors import EngineError
from headstart.runtime.slots import Slot
from headstart.stores.memory import Memory

log = logging.getLogger("headstart.cache")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a slot that is worth saving."""

    id: BlockId
    parent: BlockId
    tokens: Tokens
    start: int
    canonical: bool


class Cache:
    """Rows outside the slots.

    Attributes:
        counters: pieces `saved` and `evicted`; refusals as `skipped_<reason>`; faults as `fault_<reason>`.
    """

    def __init__(self, engine: Engine, memory: Memory, mode: Mode, clock: Callable[[], float], policy: str = "value") -> None:
        self.index = Index(engine.traits.grid)
        self.memory = memory
        self.counters: Counter[str] = Counter()
        self._engine = engine
        self._mode = mode
        self._clock = clock
        self._grid = engine.traits.grid
        self._transient = 0
        self._retention = Retention(memory.name, self.index, self._saved_per_byte, policy)

    def _saved_per_byte(self, entry: Entry) -> float:
        # In units of one token's prefill. That later tokens cost more is left out: it would rank the end of a long prompt
        # above the beginning of every other.
        return len(entry.tokens) / self.memory.cell_bytes

    # ── save ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, slot: Slot, *, needed: bool = False) -> None:
        """Copies out what `slot` holds and memory lacks (or has only derived). Afterwards the slot is not dirty.

        `needed`: a request waits for these rows, so they are let in whatever else they displace.
        """
        if not slot.dirty:
            return
        slot.dirty = False
        if not self._wanted(slot) or not self._claim(len(slot)):
            return
        wanted = self._wanted(slot)  # again: the claim may have evicted
        chain = [entry for piece in slot.ids if (entry := self.index.get(piece)) is not None]
        cells: list[int] = []
        for entry in chain:
            entry.pins += 1
        try:
            now = self._clock()
            for piece in wanted:
                if not self._room(piece, now, needed=needed) or (cell := self.memory.allocate()) is None:
                    break
                cells.append(cell)
            refused = wanted[len(cells) :]
            if refused:
                self._skip("budget", len(refused))
                for piece in refused:
                    self._retention.refuse(piece.id, now)
            spans = [
                Span(piece.start, piece.start + len(piece.tokens), self.memory.cell(cell))
                for piece, cell in zip(wanted, cells, strict=False)
            ]
            try:
                if spans:
                    self._engine.export_rows(slot.number, spans)
            except BaseException as error:
                for cell in cells:
                    self.memory.release(cell)
                if not isinstance(error, EngineError):
                    raise
                self._fault("export", error)
                return
            for piece, cell in zip(wanted, cells, strict=False):
                self._publish(piece, cell, now)
        finally:
            for entry in chain:
                entry.pins -= 1

    def _wanted(self, slot: Slot) -> list[_Piece]:
        if not self._mode.traits.sliceable:
            return []
        found: list[_Piece] = []
        tokens, name = slot.tokens, self.memory.name
        whole = len(tokens) // self._grid
        for number, piece in enumerate(slot.ids):
            start = number * self._grid
            canonical = start + self._grid <= slot.canonical
            if (canonical or not self._mode.exact) and self.index.wants(piece, name, canonical=canonical):
                block = as_tokens(tokens[start : start + self._grid])
                found.append(_Piece(piece, slot.parent_of(number), block, start, canonical))
        rest = tokens[whole * self._grid :]
        canonical = self._mode.any_cut
        if len(rest) and (canonical or not self._mode.exact):
            tail = as_tokens(rest)
            parent = slot.parent_of(whole)
            if not self.index.covers(parent, tail):
                found.append(_Piece(block_id(parent, tail), parent, tail, whole * self._grid, canonical))
        return found

    def _publish(self, piece: _Piece, cell: int, now: float) -> None:
        name = self.memory.name
        for shorter in self.index.covered(piece.parent, piece.tokens):
            if not shorter.pins:
                self._drop(shorter)
        entry = Entry(piece.id, piece.parent, piece.tokens, piece.start)
        if not self.index.add(entry, name, canonical=piece.canonical):
            self.memory.release(cell)
            return
        self.memory.commit(piece.id, cell)
        known = self.index.get(piece.id)
        assert known is not None
        self._retention.use(known, now)
        self.counters["saved"] += 1

    # ── restore ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def restore(self, slot: Slot, chain: Chain, plan: Plan) -> bool:
        """Brings `plan.restore` into `slot`. False if a piece turns out bad: it is dropped, and the slot is empty."""
        pieces: list[Rows] = []
        for entry in plan.restore:
            data = self.memory.read(entry.id)
            if data is None:
                self._drop(entry)
                self._fault("missing", None)
                return False
            pieces.append(Rows(data, len(entry.tokens), len(entry.tokens)))
        last = pieces[-1]
        pieces[-1] = Rows(last.data, last.tokens, plan.take)
        if not self._claim(plan.start, pinned=plan.restore):
            return False
        try:
            self._engine.import_rows(slot.number, pieces)
        except EngineError as error:
            self._fault("import", error)
            slot.truncate(0)
            for entry in reversed(plan.restore):
                self._drop(entry)
            return False
        slot.assign(chain, plan.start, plan.canonical)
        return True

    def hit(self, chain: Chain, plan: Plan) -> None:
        """Counts a use of all that the request stands on, wherever it was found."""
        now = self._clock()
        for piece in chain.ids[: plan.start // self._grid]:
            entry = self.index.get(piece)
            if entry is not None:
                self._retention.use(entry, now)
        if plan.restore and len(plan.restore[-1].tokens) != self._grid:
            self._retention.use(plan.restore[-1], now)

    # ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _room(self, piece: _Piece, now: float, *, needed: bool) -> bool:
        """Evicts until a cell is free for `piece`; unless it is needed, nothing that is worth more than it."""
        while self.memory.available <= 0:
            victim = self._retention.victim()
            newcomer = Entry(piece.id, piece.parent, piece.tokens, piece.start)
            if victim is None or not (needed or self._retention.outranks(newcomer, victim, now)):
                return False
            self._evict(victim)
        return True

    def _claim(self, tokens: int, pinned: tuple[Entry, ...] = ()) -> bool:
        """Counts the engine's transfer buffer for `tokens` tokens against the budget; evicts first."""
        shape = self._engine.shape
        # In eighths, so that a growing conversation claims a few times only.
        need = -(-8 * tokens // shape.ctx) * (-(-shape.transfer_bytes // 8))
        if need <= self._transient:
            return True
        if need > self.memory.budget // 2:
            self._skip("transfer", 1)
            return False
        for entry in pinned:
            entry.pins += 1
        try:
            self.memory.claim(need)
            while self.memory.available < 0:
                victim = self._retention.victim()
                if victim is None:
                    self.memory.claim(self._transient)
                    self._skip("transfer", 1)
                    return False
                self._evict(victim)
            self._transient = need
            self.memory.claim(need)
        finally:
            for entry in pinned:
                entry.pins -= 1
        return True

    def _evict(self, entry: Entry) -> None:
        self.counters["evicted"] += 1
        self.counters["evicted_tokens"] += len(entry.tokens)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        name = self.memory.name
        self.memory.delete(entry.id)
        self._retention.forget(entry)
        if name in entry.copies:
            self.index.remove(entry.id, name)

    def _skip(self, reason: str, pieces: int) -> None:
        self.counters[f"skipped_{reason}"] += pieces
        log.info("not saved: %s (%d pieces)", reason, pieces)

    def _fault(self, reason: str, error: Exception | None) -> None:
        self.counters[f"fault_{reason}"] += 1
        log.warning("cache fault, treated as a miss: %s%s", reason, f" ({error})" if error else "")

    def check(self) -> None:
        """Raises AssertionError if index, retention and memory disagree."""
        self.index.check()
        self.memory.check()
        assert len(self.index) == len(self.memory) == len(self._retention)
        assert all(entry.id in self.memory for entry in self.index)
        assert not any(entry.pins for entry in self.index)
