"""Cache: index + retention + tiers, as the scheduler uses them. Saves a slot's rows, restores them, forgets them.

Rows go from a slot to memory, and whole blocks from there on to disk, behind the engine's back. Rows on disk come to
memory before they go into a slot.

Used from the engine thread only. A fault in here is a miss with a reason, never a failed request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from headstart.core.blocks import BlockId, Chain, Tokens, as_tokens, block_id, root_id
from headstart.core.index import Entry, Index
from headstart.core.planner import Mode, Plan
from headstart.core.retention import Retention
from headstart.core.spelling import Spelled, Spellings
from headstart.engines.base import Engine, Rows, Span
from headstart.errors import EngineError
from headstart.runtime.slots import Slot
from headstart.runtime.spill import Spill
from headstart.stores.behind import NoDisk
from headstart.stores.disk import Label, Note
from headstart.stores.memory import Memory

log = logging.getLogger("headstart.cache")


SECURE = 5.0
"""Seconds of work after which finished blocks are copied out of a busy slot: what a crash may cost."""
SECURE_SHARE = 0.02
"""Most of the engine's time that this may take."""

MIN_CELLS = 8
"""Cells that the engine's transfer buffer leaves in memory."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a slot that is worth saving."""

    id: BlockId
    parent: BlockId
    tokens: Tokens
    start: int
    canonical: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore brought into a slot: all that was planned, or less if memory had no room; tokens of each tier."""

    plan: Plan
    tiers: dict[str, int]


class Cache:
    """Rows outside the slots.

    Attributes:
        seconds: of prefill that a token costs; whoever measures it says so.
        counters: pieces `saved` and `evicted`; refusals as `skipped_<reason>`; faults as `fault_<reason>`.
    """

    def __init__(
        self,
        engine: Engine,
        memory: Memory,
        mode: Mode,
        clock: Callable[[], float],
        policy: str = "value",
        disk: NoDisk | None = None,
        spellings: Spellings | None = None,
    ) -> None:
        self.index = Index(engine.traits.grid)
        self.memory = memory
        self.disk = NoDisk() if disk is None else disk
        self.seconds = 1e-3
        self.counters: Counter[str] = Counter()
        self._engine = engine
        self._mode = mode
        self._clock = clock
        self._grid = engine.traits.grid
        self._transient = 0
        self._read_cost = 1e-3  # seconds that a piece from disk takes
        self._save_cost = 0.0  # seconds that the last copy out of a busy slot took
        self._fetched: set[BlockId] = set()  # for the request at hand, which counts as their use
        self._retention = Retention(memory.name, self.index, self._saved_per_byte, policy)
        self.spill = Spill(
            self.index, memory, self.disk, Spellings() if spellings is None else spellings, self._label, self._stored
        )

    def _saved_per_byte(self, entry: Entry) -> float:
        # In units of one token's prefill. That later tokens cost more is left out: it would rank the end of a long prompt
        # above the beginning of every other.
        return len(entry.tokens) / self.memory.cell_bytes

    # ── save ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, slot: Slot, *, needed: bool = False, spare: Sequence[Entry] = (), again: bool = False) -> None:
        """Copies out what `slot` holds and memory lacks (or has only derived). Afterwards the slot is not dirty, unless some of
        it has to wait.

        `needed`: a request waits for these rows, so they are let in whatever else they displace, but for `spare`.
        `again`: it is tried every now and then, so that what is refused does not count as a use.
        """
        if not slot.dirty:
            return
        wanted = self._wanted(slot)
        # Derived rows that are being written must stay as they are until then.
        slot.dirty = any(piece.id in self.spill.writing for piece in wanted)
        if not wanted:
            return
        pinned, cells = list(spare), list[int]()
        for entry in pinned:
            entry.pins += 1
        try:
            if not self._claim(len(slot)):
                return
            wanted = [piece for piece in self._wanted(slot) if piece.id not in self.spill.writing]  # the claim may have evicted
            held = [known for piece in slot.ids if (known := self.index.get(piece)) is not None]
            for entry in held:
                entry.pins += 1
            pinned += held
            now = self._clock()
            for piece in wanted:
                if not self._room(piece, now, needed=needed) or (cell := self.memory.allocate()) is None:
                    break
                cells.append(cell)
            refused = wanted[len(cells) :]
            if refused:
                self._skip("budget", len(refused))
                for piece in refused if not again else ():
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
            if slot.reply >= 0:
                self._retention.replied([piece.id for piece in wanted], slot.reply)
        finally:
            for entry in pinned:
                entry.pins -= 1

    def secure(self, slots: Sequence[Slot]) -> None:
        """Copies finished blocks out of a slot that has been at work for a while, one slot at a time."""
        now = self._clock()
        for slot in slots:
            if now >= slot.secured + max(SECURE, self._save_cost / SECURE_SHARE) and self._exposed(slot):
                self.save(slot, again=True)
                slot.secured = self._clock()
                self._save_cost = slot.secured - now
                return

    def _exposed(self, slot: Slot) -> bool:
        """Whether a crash would lose finished blocks of `slot`."""
        if not (self.disk.on and slot.dirty):
            return False
        last = (slot.canonical if self._mode.exact else len(slot)) // self._grid - 1
        canonical = (last + 1) * self._grid <= slot.canonical
        return last >= 0 and self.index.wants(slot.ids[last], self.memory.name, canonical=canonical)

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
        self.spill.offer(known)

    def _label(self, entry: Entry, canonical: bool) -> Label:
        tokens = tuple(entry.tokens.tolist())
        seconds = len(tokens) * self.seconds
        return Label(entry.id, entry.parent, self._engine.fingerprint, entry.start, tokens, canonical, seconds)

    def flush(self, slots: Sequence[Slot]) -> None:
        """Offers the disk all that it lacks, rows of slots too: before the end."""
        if self.disk.on:
            for slot in slots:
                self.save(slot)
            self.spill.flush()

    # ── restore ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def restore(self, slot: Slot, chain: Chain, plan: Plan) -> Restored | None:
        """Brings `plan.restore` into `slot`, as far as there is room. None if a piece turns out bad: the slot is then empty."""
        plan = _shortened(plan, sum(self._transfer(entry.stop) <= self._most_transfer for entry in plan.restore))
        pinned = plan.restore
        for entry in pinned:
            entry.pins += 1
        try:
            if not self._claim(plan.start):
                return Restored(_shortened(plan, 0), {})
            if not self._fetch(pinned):
                return None
            plan = _shortened(plan, len(list(takewhile(self._at_hand, pinned))))
            if plan.restore and not self._import(slot, plan):
                return None
        finally:
            for entry in pinned:
                entry.pins -= 1
        slot.assign(chain, plan.start, plan.canonical)
        fetched = sum(min(entry.stop, plan.start) - entry.start for entry in plan.restore if entry.id in self._fetched)
        return Restored(plan, {self.memory.name: plan.start - fetched, self.disk.name: fetched})

    def _import(self, slot: Slot, plan: Plan) -> bool:
        pieces: list[Rows] = []
        for entry in plan.restore:
            data = self.memory.read(entry.id)
            assert data is not None  # it is at hand, and pinned
            pieces.append(Rows(data, len(entry.tokens), len(entry.tokens)))
        last = pieces[-1]
        pieces[-1] = Rows(last.data, last.tokens, plan.take)
        try:
            self._engine.import_rows(slot.number, pieces)
        except EngineError as error:
            self._fault("import", error)
            slot.truncate(0)
            for entry in reversed(plan.restore):
                if entry.id not in self.spill.writing:  # whose cell is being read
                    self._drop(entry)
            return False
        return True

    def prefetch(self, plan: Plan, seconds: float) -> bool:
        """Brings pieces of a plan from disk to memory, for about so long; whether that was all, or all there is room for."""
        missing = [entry for entry in plan.restore if not self._at_hand(entry)]
        some = missing[: max(1, int(seconds / self._read_cost))]
        pinned = plan.restore
        for entry in pinned:
            entry.pins += 1
        try:
            before = len(self._fetched)
            return self._fetch(some) and (len(some) == len(missing) or len(self._fetched) == before)
        finally:
            for entry in pinned:
                entry.pins -= 1

    def _at_hand(self, entry: Entry) -> bool:
        """Whether the best rows that are known of a piece are in memory."""
        return entry.copies.get(self.memory.name) == entry.canonical

    def _fetch(self, entries: Sequence[Entry]) -> bool:
        """Brings pieces from disk to memory, as many from the first on as it has room for. False if one is bad."""
        wanted: list[tuple[Entry, int]] = []
        now = self._clock()
        for entry in entries:
            if self._at_hand(entry):
                continue
            if entry.id in self.spill.writing:  # other rows of it, in a cell that is being read
                break
            if not self._room(entry, now, needed=True) or (cell := self.memory.allocate()) is None:
                self._skip("restore", 1)
                break
            wanted.append((entry, cell))
        if not wanted:
            return True
        size = self._engine.shape.row_bytes
        cells = [self.memory.cell(cell)[: len(entry.tokens) * size] for entry, cell in wanted]
        faults = self.disk.read(
            [(self._label(entry, entry.canonical), out) for (entry, _), out in zip(wanted, cells, strict=True)]
        )
        self._read_cost = (self._clock() - now) / len(wanted)
        bad = [fault for fault in faults if fault is not None]
        if bad:
            self._fault("disk", bad[0], len(bad))
        for (entry, cell), fault in zip(wanted, faults, strict=True):
            if fault is not None:
                self.memory.release(cell)
                self.spill.gone(entry.id)
                continue
            self.memory.commit(entry.id, cell)
            self.index.add(entry, self.memory.name, canonical=entry.copies[self.disk.name])
            self._retention.use(entry, now)
            self._fetched.add(entry.id)
        return not bad

    def hit(self, chain: Chain, plan: Plan) -> None:
        """Counts a use of all that the request stands on, wherever it was found."""
        now = self._clock()
        for piece in chain.ids[: plan.start // self._grid]:
            entry = self.index.get(piece)
            if entry is not None and self.memory.name in entry.copies and piece not in self._fetched:
                self._retention.use(entry, now)
        if plan.restore and len(plan.restore[-1].tokens) != self._grid:
            self._retention.use(plan.restore[-1], now)
        if self.disk.on:
            self.disk.use(chain.ids[: plan.start // self._grid])
        self._fetched.clear()

    def elsewhere(self, chain: Chain, salt: str) -> bool:
        """Whether the prompt's beginning is on disk as computed by another model, engine or setting; for the same salt only."""
        if len(chain) < self._grid:
            return False
        first = chain.block(0)
        return any(block_id(root_id(other, salt), first) in keys for other, keys in self.disk.foreign().items())

    def _stored(self, piece: BlockId) -> None:
        if (reply := self._retention.reply(piece)) >= 0:
            self.disk.replied([piece], reply)

    def replied(self, slot: Slot, tokens: int) -> None:
        """Tells how long the reply was to the request that has used all that `slot` stands on."""
        slot.reply = tokens
        self._retention.replied(slot.ids, tokens)
        self.disk.replied(slot.ids, tokens)

    def spelled(self, chain: Chain, spelled: Spelled) -> None:
        """Keeps how the reply to a prompt was spelled: without that, the rows of what follows could not be found again."""
        if chain.ids:
            self.disk.note(Note(spelled.key, chain.ids[-1], spelled.pack()))

    # ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _room(self, piece: _Piece | Entry, now: float, *, needed: bool) -> bool:
        """Evicts until a cell is free for `piece`; unless it is needed, nothing that is worth more and nowhere else."""
        while self.memory.available <= 0:
            victim = self._retention.victim()
            if victim is None:
                return False
            # A newcomer that is refused is lost; what is on disk too is not.
            newcomer = Entry(piece.id, piece.parent, piece.tokens, piece.start)
            if not (needed or self.disk.name in victim.copies or self._retention.outranks(newcomer, victim, now)):
                return False
            self._evict(victim)
        return True

    def _claim(self, tokens: int) -> bool:
        """Counts the engine's transfer buffer for `tokens` tokens against the budget; evicts first."""
        need = self._transfer(tokens)
        if need <= self._transient:
            return True
        if need > self._most_transfer:
            self._skip("transfer", 1)
            return False
        self.memory.claim(need)
        while self.memory.available < 0:
            victim = self._retention.victim()
            if victim is None:
                self.memory.claim(self._transient)
                self._skip("transfer", 1)
                return False
            self._evict(victim)
        self._transient = need
        self.memory.claim(need)  # again: what was evicted gives its pages back
        return True

    def _transfer(self, tokens: int) -> int:
        """Bytes of the transfer buffer, in eighths, so that a growing conversation claims a few times only."""
        shape = self._engine.shape
        return -(-8 * tokens // shape.ctx) * (-(-shape.transfer_bytes // 8))

    @property
    def _most_transfer(self) -> int:
        return max(self._transient, self.memory.budget - MIN_CELLS * self.memory.cell_bytes)

    def _evict(self, entry: Entry) -> None:
        self.counters["evicted"] += 1
        self.counters["evicted_tokens"] += len(entry.tokens)
        if self.spill.lacking(entry):
            self._skip("disk", 1)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        name = self.memory.name
        self.memory.delete(entry.id)
        self._retention.forget(entry)
        self.spill.forget(entry)
        if name in entry.copies:
            self.index.remove(entry.id, name)

    def _skip(self, reason: str, pieces: int) -> None:
        self.counters[f"skipped_{reason}"] += pieces
        log.info("not saved: %s (%d pieces)", reason, pieces)

    def _fault(self, reason: str, error: Exception, pieces: int = 1) -> None:
        self.counters[f"fault_{reason}"] += pieces
        log.warning("cache fault, treated as a miss: %s (%s; %d pieces)", reason, error, pieces)

    def check(self) -> None:
        """Raises AssertionError if index, retention and memory disagree."""
        self.index.check()
        self.memory.check()
        held = [entry for entry in self.index if self.memory.name in entry.copies]
        assert len(held) == len(self.memory) == len(self._retention)
        assert all(entry.id in self.memory for entry in held)
        assert all(entry.pins == (entry.id in self.spill.writing) for entry in self.index)


def _shortened(plan: Plan, pieces: int) -> Plan:
    """The plan with its first `pieces` pieces only."""
    if pieces == len(plan.restore):
        return plan
    restore = plan.restore[:pieces]
    start = restore[-1].stop if restore else 0
    take = len(restore[-1].tokens) if restore else 0
    return replace(plan, restore=restore, take=take, start=start, canonical=min(plan.canonical, start))
