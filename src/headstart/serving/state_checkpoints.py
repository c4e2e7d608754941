"""State checkpoints: copies the state of a slot to memory, for models whose state cannot be truncated.

A checkpoint can be taken only at the moment at which the slot has exactly that length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headstart.errors import EngineError
from headstart.interfaces.engine import Engine
from headstart.interfaces.landmarks import Landmarks
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.prefix_cache.blocks import block_id, checkpoint_id
from headstart.prefix_cache.checkpoints import LATTICE
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.planner import Mode
from headstart.prefix_cache.quota import owner_of
from headstart.serving.kv_store import KvStore
from headstart.serving.memory_budget import holding
from headstart.serving.slots import Slot

NOWHERE = Landmarks()


class StateCheckpoints:
    """For the engine thread."""

    def __init__(self, engine: Engine, mode: Mode, store: KvStore) -> None:
        self._engine = engine
        self._mode = mode
        self._store = store
        self._block_size = engine.traits.block_size

    def at(self, slot: Slot, landmarks: Landmarks = NOWHERE, *, protected: bool = True) -> Entry | None:
        """The checkpoint of `slot` at its present length; None if it is of no use, or memory has an equally good one."""
        if not self._mode.traits.stateful:
            return None
        length = len(slot)
        canonical = slot.canonical == length
        number, rest = divmod(length, self._block_size)
        if not length or (self._mode.exact and (rest or not canonical)):
            return None
        start = length - (rest or self._block_size)
        tokens = as_tokens(slot.tokens[start:])
        parent = block_id(slot.parent_of(number), tokens) if rest else slot.ids[number - 1]
        owner, written = owner_of(slot.root), slot.written(0, length)
        entry = Entry(
            checkpoint_id(parent), parent, tokens, start, state=True, protected=protected, owner=owner, written=written
        )
        store = self._store
        if slot.unsavable or store.expired(owner, written) or slot.written(slot.restored) <= store.terms.before:
            return None
        if store.barred.meets(slot.ids):
            return None
        if entry.id in store.offload.writing or not store.index.wants(entry.id, store.memory.name, canonical=canonical):
            return None
        stay = {mark // self._block_size for mark in (landmarks.anchor, landmarks.turn)}
        before = (at for at in range(start // self._block_size, 0, -1) if self._store.marked(slot.ids[at - 1]))
        if protected:  # the others may be dropped before this one is needed
            before = (at for at in before if at in stay or self._store.index.is_branch_point(slot.ids[at - 1]))
        entry.gap = length - next(before, 0) * self._block_size
        return entry

    def replace(self, slot: Slot, before: BlockId | None) -> BlockId | None:
        """Takes a checkpoint during a reply, and drops the one `before`. Only the latest is needed."""
        taken = self.take(slot, protected=False)
        known = self._store.index.get(before) if taken is not None and before is not None else None
        if known is not None and not (known.protected or known.canonical):  # else another prompt may need it
            self._store.memory_budget.discard(known.id)
        return taken or before

    def take(
        self, slot: Slot, landmarks: Landmarks = NOWHERE, *, protected: bool = True, spare: Sequence[Entry] = ()
    ) -> BlockId | None:
        """Takes the checkpoint of `slot` at its present length. Returns its id; None if there is none to take (see `at`).

        Args:
            landmarks: of the prompt. With `protected`, they determine the worth of the checkpoint (`prefix_cache/checkpoints`).
        """
        entry = self.at(slot, landmarks, protected=protected)
        if entry is None:
            return None
        canonical = slot.canonical == len(slot)
        known = [self._store.index.get(key) for key in slot.ids]
        with holding([*spare, *(block for block in known if block is not None)]):
            if not self._store.memory_budget.claim(len(slot)):
                return None
            now = self._store.clock()
            cell = self._store.memory_budget.take(entry, now, needed=False, request_traits=slot.request_traits)
            if cell is None:
                self._store.memory_budget.skip("budget", 1)
                self._store.retention.refuse(entry, now, slot.request_traits)
                return None
            try:
                size = self._engine.export_checkpoint(slot.number, self._store.memory.cell(cell))
            except BaseException as error:
                self._store.memory.release(cell)
                if not isinstance(error, EngineError):
                    raise
                self._store.memory_budget.fault("export", error)
                return None
            self._store.publish(entry, cell, now, canonical=canonical, size=size)
            return entry.id

    def thin(self, slot: Slot, kept: Collection[int]) -> None:
        """Drops the surplus checkpoints of the slot's chain. `kept`: lengths at which they stay in any case.

        As long as not all chains on disk are known, one of them may branch off at any checkpoint, and none is dropped.
        """
        if not (self._mode.traits.stateful and self._store.disk.listed):
            return
        held = {entry.stop: entry for key in slot.ids if (entry := self._store.index.get(checkpoint_id(key))) is not None}
        stay = {length // self._block_size * self._block_size for length in kept}
        branch = self._store.index.is_branch_point
        stay |= {length for length, entry in held.items() if entry.holds or entry.pinned or branch(entry.parent)}
        for length in LATTICE.surplus(sorted(held), max(held, default=0), stay):
            self._store.memory_budget.discard(held[length].id)
        # Of the earlier ends of the chain, only the last one stays, because the client may continue from there.
        blocks = (
            (slot.parent_of(number), slot.tokens[number * self._block_size :][: self._block_size])
            for number in range(len(slot.ids) + 1)
        )
        ends = [tail for parent, tokens in blocks for tail in self._store.index.covered(parent, tokens)]
        for tail in sorted(ends, key=lambda tail: tail.stop)[:-1]:
            self._store.memory_budget.discard(checkpoint_id(tail.id))
            self._store.memory_budget.discard(tail.id)
