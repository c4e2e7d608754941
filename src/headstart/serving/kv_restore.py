"""KV restore: loads the entries of a plan into a slot, as many as memory has room for.

Used from the engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

from headstart.errors import EngineError
from headstart.interfaces.engine import Engine, KVSegment
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.planner import Mode, Plan
from headstart.serving.memory_budget import MemoryBudget, holding
from headstart.serving.prefetch import Prefetch
from headstart.serving.slots import Slot


@dataclass(frozen=True, slots=True)
class Restored:
    """The plan that was carried out, which is shorter if memory was short, and the restored tokens of each tier."""

    plan: Plan
    tiers: dict[str, int]


class KvRestore:
    """Loads entries from memory into slots. `prefetch` first reads entries from disk to memory.

    Args:
        below: name of the tier below memory.
        usable: whether an entry may be loaded. One that must be deleted may not, also if that takes time or fails.
    """

    def __init__(
        self,
        engine: Engine,
        mode: Mode,
        memory_budget: MemoryBudget,
        prefetch: Prefetch,
        below: str,
        usable: Callable[[Entry], bool],
    ) -> None:
        self._engine = engine
        self._mode = mode
        self._memory_budget = memory_budget
        self._index = memory_budget.index
        self._memory = memory_budget.memory
        self._prefetch = prefetch
        self._below = below
        self._usable = usable

    def prefetch(self, plan: Plan, seconds: float) -> bool:
        """Reads entries of a plan to memory, for about `seconds`. True if nothing is left to read, or memory is full."""
        return self._prefetch.read(self._movable(plan), seconds)

    def restore(self, slot: Slot, chain: Chain, plan: Plan) -> Restored | None:
        """Loads `plan` into `slot`, as far as memory allows. None if an entry is bad; the slot is then empty."""
        plan = self._movable(plan)
        with holding(plan.entries):
            if plan.entries and not self._memory_budget.claim(
                0 if plan.keep else plan.start, self._memory_budget.size(plan.entries)
            ):
                return Restored(_nothing(plan), {})
            if not self._prefetch.bring(plan.entries):
                return None
            here = len(list(takewhile(self._prefetch.at_hand, plan.restore)))
            if plan.state is not None and not self._prefetch.at_hand(plan.state):
                here = min(here, len(plan.restore) - 1)
            if here == len(plan.restore) and plan.entries and not self._import(slot, plan):
                return None
        if here < len(plan.restore):
            return self.restore(slot, chain, self._shortened(plan, max(0, here)))
        if plan.keep:
            slot.truncate(plan.keep)
            slot.canonical = min(slot.canonical, plan.canonical)
            return Restored(plan, {})
        slot.assign(chain, plan.start, plan.canonical, [(entry.stop, entry.written) for entry in plan.restore])
        fetched = sum(min(entry.stop, plan.start) - entry.start for entry in plan.restore if entry.id in self._prefetch.fetched)
        return Restored(plan, {self._memory.name: plan.start - fetched, self._below: fetched})

    def _movable(self, plan: Plan) -> Plan:
        """The part of the plan that may be used, and can be loaded at once."""
        usable = sum(1 for _ in takewhile(self._usable, plan.restore))
        if plan.state is not None and not self._usable(plan.state):
            usable = min(usable, len(plan.restore) - 1)
        if usable < len(plan.restore):
            plan = self._shortened(plan, max(0, usable))
        while (most := self._memory_budget.movable(plan.restore, plan.state)) < len(plan.restore):
            plan = self._shortened(plan, most)
        return plan

    def _shortened(self, plan: Plan, count: int) -> Plan:
        """The plan with its first `count` entries. If it needs a checkpoint, it ends at the last one among them."""
        restore, canonical = plan.restore[:count], plan.canonical
        state: Entry | None = None
        while restore and plan.state is not None and state is None:
            state = self._index.checkpoint(restore[-1].id, canonical_only=self._mode.exact)
            if state is None or not self._usable(state):
                restore, state = restore[:-1], None
            elif not state.canonical:
                canonical = min(canonical, state.start)
        if not restore:
            return _nothing(plan)
        start, take = restore[-1].stop, len(restore[-1].tokens)
        return replace(plan, restore=restore, take=take, start=start, canonical=min(canonical, start), state=state)

    def _import(self, slot: Slot, plan: Plan) -> bool:
        segments: list[KVSegment] = []
        for entry in plan.restore:
            data = self._memory.read(entry.id)
            assert data is not None  # it is in memory, and held
            segments.append(KVSegment(data, entry.length, entry.length))
        if segments:
            segments[-1] = replace(segments[-1], take=plan.take)
        state = None if plan.state is None else self._memory.read(plan.state.id)
        try:
            if state is None:
                self._engine.import_kv(slot.number, segments)
            elif plan.keep:
                self._engine.rewind(slot.number, plan.keep, state)
            else:
                self._engine.import_checkpoint(slot.number, segments, state)
        except EngineError as error:
            self._memory_budget.fault("import", error)
            slot.truncate(0)
            for entry in reversed(plan.entries):
                if not self._memory_budget.lent(entry):
                    self._memory_budget.drop(entry)
            return False
        return True


def _nothing(plan: Plan) -> Plan:
    """The plan that restores nothing."""
    return replace(plan, keep=0, restore=(), take=0, start=0, canonical=0, state=None)
