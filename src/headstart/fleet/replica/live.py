"""Live blocks: what is in the slots, as changes since the last look.

A chain has an equal id at a position only if all before it is equal. So the point up to which a slot is as it was is found by
halving, and only the blocks behind it are handled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headstart.fleet.replica.held import HeldKeys
from headstart.fleet.router.chains import block_key, checkpoint_key, common_blocks
from headstart.fleet.router.reports import BlockKey, Tier
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.planner import Mode
from headstart.serving.slots import Slot


class LiveBlocks:
    """The usable full blocks of all slots, kept as `Tier.LIVE` of some held keys.

    If a sequence can only grow, its last block also has a checkpoint: there or later a prompt that goes on with it continues.
    In exact mode only canonical blocks are usable, and a sequence that can only grow is usable only if all of it is canonical.
    """

    def __init__(self, held: HeldKeys, mode: Mode) -> None:
        self._held = held
        self._mode = mode
        self._canonical_only = mode.exact and not mode.any_cut
        self._seen: dict[int, list[BlockId]] = {}
        self._ends: dict[int, BlockKey] = {}  # checkpoints
        self._count: Counter[BlockKey] = Counter()

    def look(self, slots: Iterable[Slot]) -> None:
        """Takes in what has changed in the slots."""
        for slot in slots:
            self._look(slot)

    def _look(self, slot: Slot) -> None:
        ids, seen = slot.ids, self._seen.setdefault(slot.number, [])
        count = min(len(ids), slot.canonical // self._mode.traits.block_size) if self._canonical_only else len(ids)
        if count != len(seen) or (count and seen[-1] != ids[count - 1]):
            same = min(common_blocks(seen, ids), count)
            for key in map(block_key, seen[same:]):
                self._leave(key)
            new = ids[same:count]
            for key in map(block_key, new):
                self._come(key)
            seen[same:] = new
        if not self._mode.traits.sliceable:
            self._look_at_end(slot, count)

    def _look_at_end(self, slot: Slot, count: int) -> None:
        usable = count and not (self._canonical_only and slot.canonical < len(slot))
        end = checkpoint_key(block_key(slot.ids[count - 1])) if usable else None
        known = self._ends.get(slot.number)
        if end == known:
            return
        if known is not None:
            del self._ends[slot.number]
            self._leave(known)
        if end is not None:
            self._ends[slot.number] = end
            self._come(end)

    def _come(self, key: BlockKey) -> None:
        self._count[key] += 1
        if self._count[key] == 1:
            self._held.add(key, Tier.LIVE)

    def _leave(self, key: BlockKey) -> None:
        self._count[key] -= 1
        if not self._count[key]:
            del self._count[key]
            self._held.remove(key, Tier.LIVE)
