"""KV save: copies out of the slots what memory lacks, before it is lost and while there is time."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.errors import EngineError
from headstart.interfaces.engine import Engine, Span
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import block_id
from headstart.prefix_cache.index import Entry
from headstart.prefix_cache.planner import Mode
from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST
from headstart.serving.kv_store import KvStore
from headstart.serving.memory_budget import pinned
from headstart.serving.slots import Slot
from headstart.serving.state_checkpoints import StateCheckpoints
from headstart.tiers.memory import Cell

SECURE = 5.0
"""Seconds of work after which finished blocks are copied out of a busy slot: what a crash may cost."""
SECURE_SHARE = 0.02
"""Most of the engine's time that this may take."""


class KvSave:
    """For the engine thread."""

    def __init__(self, engine: Engine, mode: Mode, store: KvStore, checkpoints: StateCheckpoints) -> None:
        self._engine = engine
        self._mode = mode
        self._store = store
        self._checkpoints = checkpoints
        self._block_size = engine.traits.block_size
        self._cost = 0.0  # seconds that the last copy out of a busy slot took

    def save(self, slot: Slot, *, needed: bool = False, spare: Sequence[Entry] = (), again: bool = False) -> None:
        """Copies out what `slot` holds and memory lacks (or has only derived). Afterwards the slot is not dirty, unless some of
        it has to wait; it is `kept` if nothing was refused.

        `needed`: a request waits for these rows, so they are let in whatever else they displace, but for `spare`.
        `again`: it is tried every now and then, so that what is refused does not count as a use.
        """
        if slot.forsaken:
            slot.dirty, slot.kept = False, True
        if not slot.dirty:
            return
        taken = slot.busy or self._checkpoints.take(slot, spare=spare) is not None
        slot.kept = not slot.busy and (taken or self._checkpoints.at(slot) is None)
        wanted, writing = self._wanted(slot), self._store.offload.writing
        # Derived rows that are being written must stay as they are until then.
        slot.dirty = any(entry.id in writing for entry, _ in wanted)
        if not wanted:
            return
        with pinned(spare):
            if not self._store.memory_budget.claim(len(slot)):
                slot.kept = False
                return
            wanted = [(entry, _) for entry, _ in self._wanted(slot) if entry.id not in writing]  # some was evicted
            held = [known for piece in slot.ids if (known := self._store.index.get(piece)) is not None]
            with pinned(held):
                self._copy_out(slot, wanted, needed=needed, again=again)

    def _copy_out(self, slot: Slot, wanted: Sequence[tuple[Entry, bool]], *, needed: bool, again: bool) -> None:
        now, cells = self._store.clock(), list[Cell]()
        for entry, _ in wanted:
            if (cell := self._store.memory_budget.take(entry, now, needed=needed, request_traits=slot.request_traits)) is None:
                break
            cells.append(cell)
        refused = wanted[len(cells) :]
        if refused:
            slot.kept = False
            self._store.memory_budget.skip("budget", len(refused))
        memory = self._store.memory
        spans = [Span(entry.start, entry.stop, memory.cell(cell)) for (entry, _), cell in zip(wanted, cells, strict=False)]
        try:
            if spans and memory.cell_bytes:
                self._engine.export_kv(slot.number, spans)
        except BaseException as error:
            for cell in cells:
                self._store.memory.release(cell)
            if not isinstance(error, EngineError):
                raise
            self._store.memory_budget.fault("export", error)
            slot.kept = False
            return
        for (entry, canonical), cell in zip(wanted, cells, strict=False):
            self._store.publish(entry, cell, now, canonical=canonical)
        for entry, _ in refused if not again else ():  # behind what was let in: that is what they follow
            self._store.retention.refuse(entry, now, slot.request_traits)
        if slot.request_traits is not UNKNOWN_REQUEST:
            self._store.retention.replied([entry.id for entry, _ in wanted], slot.request_traits)

    def secure(self, slots: Sequence[Slot]) -> None:
        """Copies finished blocks out of a slot that has been at work for a while, one slot at a time."""
        now = self._store.clock()
        for slot in slots:
            if now >= slot.secured + max(SECURE, self._cost / SECURE_SHARE) and self._exposed(slot):
                self.save(slot, again=True)
                slot.secured = self._store.clock()
                self._cost = slot.secured - now
                return

    def _exposed(self, slot: Slot) -> bool:
        """Whether a crash would lose finished blocks of `slot`."""
        if not (self._store.disk.on and slot.dirty):
            return False
        last = (slot.canonical if self._mode.exact else len(slot)) // self._block_size - 1
        canonical = (last + 1) * self._block_size <= slot.canonical
        return last >= 0 and self._store.index.wants(slot.ids[last], self._store.memory.name, canonical=canonical)

    def _wanted(self, slot: Slot) -> list[tuple[Entry, bool]]:
        """The rows of a slot that are worth saving, and whether they are canonical."""
        if not self._mode.traits.movable:
            return []
        found: list[tuple[Entry, bool]] = []
        tokens, name, owner = slot.tokens, self._store.memory.name, owner_of(slot.root)
        whole = len(tokens) // self._block_size
        for number, piece in enumerate(slot.ids):
            start = number * self._block_size
            canonical = start + self._block_size <= slot.canonical
            if (canonical or not self._mode.exact) and self._store.index.wants(piece, name, canonical=canonical):
                block, written = (
                    as_tokens(tokens[start : start + self._block_size]),
                    slot.written(start, start + self._block_size),
                )
                found.append((Entry(piece, slot.parent_of(number), block, start, owner=owner, written=written), canonical))
        rest = tokens[whole * self._block_size :]
        canonical = self._mode.any_cut
        if len(rest) and (canonical or not self._mode.exact):
            tail = as_tokens(rest)
            parent = slot.parent_of(whole)
            written = slot.written(whole * self._block_size)
            entry = Entry(block_id(parent, tail), parent, tail, whole * self._block_size, owner=owner, written=written)
            if self._mode.traits.stateful:  # rows in a longer piece would not do for a checkpoint at this very end
                wanted = self._store.index.wants(entry.id, name, canonical=canonical)
            else:
                wanted = not self._store.index.covers(parent, tail)
            if wanted:
                found.append((entry, canonical))
        return [(entry, canonical) for entry, canonical in found if not self._store.spent(entry)]

    def flush(self, slots: Sequence[Slot]) -> None:
        """Offers the disk all that it lacks, rows of slots too: before the end."""
        if self._store.disk.on:
            for slot in slots:
                slot.busy = False
                self.save(slot)
            self._store.offload.flush()
