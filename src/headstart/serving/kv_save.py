"""KV save: copies KV from slots to memory, before it is lost or while the engine is idle."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.errors import EngineError
from headstart.interfaces.engine import Engine, Span
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import block_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.planner import Mode
from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST
from headstart.serving.kv_store import KvStore
from headstart.serving.memory_budget import holding
from headstart.serving.slots import Slot
from headstart.serving.state_checkpoints import StateCheckpoints
from headstart.tiers.memory import Cell

SECURE = 5.0
"""Seconds of work after which the finished blocks of a busy slot are saved. A crash costs about so much work."""
SECURE_SOON = 0.5
"""The same where it is cheap (the trait `random_access`), and where other servers get what is computed: the conversation may
move, or others begin alike."""
SECURE_SHARE = 0.02
"""Largest share of the engine's time for this."""


class KvSave:
    """For the engine thread."""

    def __init__(self, engine: Engine, mode: Mode, store: KvStore, checkpoints: StateCheckpoints) -> None:
        self._engine = engine
        self._mode = mode
        self._store = store
        self._checkpoints = checkpoints
        self._block_size = engine.traits.block_size
        self._cost = 0.0  # seconds that the last save of a busy slot took

    def save(self, slot: Slot, *, needed: bool = False, spare: Sequence[Entry] = (), again: bool = False) -> None:
        """Saves the entries of `slot` that memory lacks, or has only as derived KV.

        The slot is then no longer dirty, unless some entries have to wait, or it has text that is being deleted. It is `kept`
        if no entry was refused.

        Args:
            needed: a request waits for this KV, so it may evict entries of any value, except those in `spare`.
            again: this is a repeated attempt, so a refused entry does not count as used.
        """
        if slot.unsavable:
            slot.dirty, slot.kept = False, True
        if not slot.dirty or self._store.barred.meets(slot.ids):  # a deletion would leave what follows; afterwards it is saved
            return
        taken = slot.busy or self._checkpoints.take(slot, spare=spare) is not None
        slot.kept = not slot.busy and (taken or self._checkpoints.at(slot) is None)
        wanted = self._wanted(slot)
        waits = any(entry.id in self._store.offload.writing for entry, _ in wanted)
        if wanted:
            self._evict_and_copy(slot, spare, needed=needed, again=again)
        # Set last, because other threads may read it. Derived KV that the disk is writing must not change until then.
        slot.dirty = waits

    def _evict_and_copy(self, slot: Slot, spare: Sequence[Entry], *, needed: bool, again: bool) -> None:
        with holding(spare):
            if not self._store.memory_budget.claim(len(slot)):
                slot.kept = False
                return
            writing = self._store.offload.writing
            wanted = [(entry, _) for entry, _ in self._wanted(slot) if entry.id not in writing]  # `claim` may have evicted some
            held = [known for key in slot.ids if (known := self._store.index.get(key)) is not None]
            with holding(held):
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
        for entry, _ in refused if not again else ():  # after the stored entries, because they follow them
            self._store.retention.refuse(entry, now, slot.request_traits)
        if slot.request_traits is not UNKNOWN_REQUEST:
            self._store.retention.replied([entry.id for entry, _ in wanted], slot.request_traits)

    def computed(self, slot: Slot) -> None:
        """A prompt is computed. If other servers get it, its blocks are saved after this step: when the reply is over, the
        conversation may go on elsewhere."""
        slot.moves = "computed" in self._store.shared.saves

    def secure(self, slots: Sequence[Slot]) -> None:
        """Saves the finished blocks of slots whose prompts are computed, else of the one that has been busy for longest."""
        if moving := [slot for slot in slots if slot.moves]:
            for slot in moving:
                slot.moves = False
                if self._exposed(slot):
                    self._secure(slot)
            return
        now = self._store.clock()
        soon = self._mode.traits.random_access or "computed" in self._store.shared.saves
        pause = max(SECURE_SOON if soon else SECURE, self._cost / SECURE_SHARE)
        for slot in sorted(slots, key=lambda slot: slot.secured):
            if now >= slot.secured + pause and self._exposed(slot):
                self._secure(slot)
                return

    def _secure(self, slot: Slot) -> None:
        now = self._store.clock()
        self.save(slot, again=True)
        slot.secured = self._store.clock()
        self._cost = slot.secured - now

    def _exposed(self, slot: Slot) -> bool:
        """Whether a crash would lose finished blocks of `slot`."""
        if not (slot.dirty and (self._store.disk.on or "computed" in self._store.shared.saves)):
            return False
        if self._store.barred.meets(slot.ids):
            return False
        last = (slot.canonical if self._mode.exact else len(slot)) // self._block_size - 1
        canonical = (last + 1) * self._block_size <= slot.canonical
        return last >= 0 and self._store.index.wants(slot.ids[last], self._store.memory.name, canonical=canonical)

    def _wanted(self, slot: Slot) -> list[tuple[Entry, bool]]:
        """The entries of a slot that are worth saving, each with whether it is canonical."""
        if not self._mode.traits.movable:
            return []
        found: list[tuple[Entry, bool]] = []
        tokens, name, owner = slot.tokens, self._store.memory.name, owner_of(slot.root)
        whole = len(tokens) // self._block_size
        for number, key in enumerate(slot.ids):
            start = number * self._block_size
            canonical = start + self._block_size <= slot.canonical
            if (canonical or not self._mode.exact) and self._store.index.wants(key, name, canonical=canonical):
                block, written = (
                    as_tokens(tokens[start : start + self._block_size]),
                    slot.written(start, start + self._block_size),
                )
                found.append((Entry(key, slot.parent_of(number), block, start, owner=owner, written=written), canonical))
        rest = tokens[whole * self._block_size :]
        canonical = self._mode.any_cut
        if len(rest) and (canonical or not self._mode.exact):
            tail = as_tokens(rest)
            parent = slot.parent_of(whole)
            written = slot.written(whole * self._block_size)
            entry = Entry(block_id(parent, tail), parent, tail, whole * self._block_size, owner=owner, written=written)
            if self._mode.traits.stateful:  # a checkpoint needs KV that ends exactly here, not a longer entry
                wanted = self._store.index.wants(entry.id, name, canonical=canonical)
            else:
                wanted = not self._store.index.covers(parent, tail)
            if wanted:
                found.append((entry, canonical))
        return [(entry, canonical) for entry, canonical in found if not self._store.spent(entry)]

    def flush(self, slots: Sequence[Slot]) -> None:
        """Saves all slots, and offers the lower tiers every entry that they lack. For the time before the server stops."""
        if self._store.disk.on or self._store.shared.saves:
            for slot in slots:
                slot.busy = False
                self.save(slot)
            self._store.offload.flush()
        self._store.shared_offer.leave()
