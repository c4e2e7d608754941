"""Memory budget: evicts entries from memory to make room for new ones.

Used from the engine thread only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headstart.interfaces.tier import KV, STATE, EntryKind
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import checkpoint_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST, RequestTraits
from headstart.serving.offload import Offload
from headstart.serving.pins import Pins
from headstart.serving.shared_offer import SharedOffer
from headstart.tiers.memory import Cell, Memory

log = logging.getLogger("headstart.cache")

_STEPS = 32
MIN_CELLS = 8
"""Number of cells that must fit in memory beside the engine's transfer buffer."""


@contextmanager
def holding(entries: Sequence[Entry]) -> Iterator[None]:
    """Keeps entries from being evicted."""
    for entry in entries:
        entry.holds += 1
    try:
        yield
    finally:
        for entry in entries:
            entry.holds -= 1


class MemoryBudget:
    """Evicts entries before it allocates, so that the budget is never exceeded.

    Args:
        ctx: tokens that a slot holds.
        kv_bytes_per_token: bytes of KV of one token.
        transfer_bytes: bytes of the engine's transfer buffer for a full slot with its state.
        release: makes the engine free that buffer.
        keeps_on: name of the tier below memory.

    Attributes:
        pins: entries that their owners have pinned.
        claimed: bytes of the budget that are reserved for the transfer buffer.
    """

    def __init__(
        self,
        index: Index,
        memory: Memory,
        retention: Retention,
        offload: Offload,
        shared_offer: SharedOffer,
        counters: Counter[str],
        pins: Pins,
        *,
        ctx: int,
        kv_bytes_per_token: int,
        transfer_bytes: int,
        release: Callable[[], None],
        keeps_on: str,
    ) -> None:
        self.index = index
        self.memory = memory
        self.retention = retention
        self.offload = offload
        self._shared_offer = shared_offer
        self.counters = counters
        self._below = keeps_on
        self._ctx = ctx
        self._kv_bytes_per_token = kv_bytes_per_token
        self._transfer_bytes = transfer_bytes
        self._release = release
        self.claimed = 0
        self.pins = pins

    def take(self, entry: Entry, now: float, *, needed: bool, request_traits: RequestTraits = UNKNOWN_REQUEST) -> Cell | None:
        """A cell for `entry`, or None. Unless it is `needed`, it never evicts an entry that is worth more and is not on disk.

        An entry whose owner exceeds its quota only evicts entries of owners that exceed theirs.
        """
        kind: EntryKind = STATE if entry.state else KV
        while not self.memory.fits(kind):
            over = self.memory.quota.over(entry.owner, self.memory.size(kind))
            victim = self.retention.victim(over)
            if victim is None or (entry.owner in over and victim.owner not in over):
                return None
            due = victim.owner in over and entry.owner not in over
            # A refused entry is lost; an evicted one that is also on disk is not.
            if not (
                needed or due or self._below in victim.copies or self.retention.outranks(entry, victim, now, request_traits)
            ):
                return None
            self.evict(victim)
        return self.memory.allocate(kind, entry.owner)

    def claim(self, tokens: int, beside: int = 0) -> bool:
        """Reserves the engine's transfer buffer for `tokens` tokens, and evicts as needed. False if it does not fit.

        Args:
            beside: bytes of cells that are needed at the same time. If they do not fit, a larger buffer is freed first.
        """
        need = self.transfer(tokens)
        if need <= self.claimed:
            if self.claimed + beside > self.memory.budget:
                self._release()
                self.claimed = need
                self.memory.claim(need)
            return True
        if need > self.most_transfer:
            self.skip("transfer", 1)
            return False
        self.memory.claim(need)
        while self.memory.over:
            victim = self.retention.victim(self.memory.quota.over())
            if victim is None:
                self.memory.claim(self.claimed)
                self.skip("transfer", 1)
                return False
            self.evict(victim)
        self.claimed = need
        return True

    def movable(self, entries: Sequence[Entry], state: Entry | None) -> int:
        """How many leading entries can be loaded at once, with `state`: their cells and the transfer buffer must both fit."""
        free, cell = self.memory.budget - self.size([] if state is None else [state]), self.memory.cell_bytes
        return sum(self.transfer(entry.stop) + number * cell <= free for number, entry in enumerate(entries, 1))

    def size(self, entries: Sequence[Entry]) -> int:
        """Bytes of the cells of entries."""
        return sum(self.memory.size(STATE if entry.state else KV) for entry in entries)

    def transfer(self, tokens: int) -> int:
        """Bytes of the transfer buffer for `tokens` tokens: the largest state, and the KV.

        The KV is rounded up to steps, so that a growing conversation seldom claims more.
        """
        kv = min(self._ctx * self._kv_bytes_per_token, self._transfer_bytes)
        return self._transfer_bytes - kv + -(-_STEPS * tokens // self._ctx) * (-(-kv // _STEPS))

    @property
    def most_transfer(self) -> int:
        least = MIN_CELLS * self.memory.cell_bytes + self.memory.state_bytes
        return max(self.claimed, self.memory.budget - least)

    def evict(self, entry: Entry) -> None:
        """Evicts an entry. With the last checkpoint of a chain goes the KV that only this checkpoint made useful."""
        self.counters["evicted"] += 1
        self.counters["evicted_tokens"] += 0 if entry.state else entry.length
        if self.offload.lacking(entry):
            self.skip("disk", 1)
        self.drop(entry)
        if entry.state and self.index.get(entry.id) is None:
            before = self.index.get(entry.parent)
            while before is not None and self._idle(before):
                after, before = before, self.index.get(before.parent)
                self.evict(after)

    def _idle(self, entry: Entry) -> bool:
        free = self.memory.name in entry.copies and not (entry.holds or entry.pinned)
        return free and self.retention.is_leaf(entry.id)

    def drop(self, entry: Entry) -> None:
        """Removes an entry from memory, and the checkpoint at its end."""
        name = self.memory.name
        state = None if entry.state else self.index.get(checkpoint_id(entry.id))
        if state is not None and name in state.copies and not state.holds:
            self.drop(state)
        self.memory.delete(entry.id)
        self.pins.left(entry)
        self.retention.forget(entry)
        self.offload.forget(entry)
        if name in entry.copies:
            self.index.remove(entry.id, name)

    def lent(self, entry: Entry) -> bool:
        """Whether a lower tier may be reading the entry's cell."""
        return entry.id in self.offload.writing or entry.id in self._shared_offer.reading

    def discard(self, key: BlockId) -> None:
        """Removes an entry from all tiers, unless it is in use or pinned."""
        entry = self.index.get(key)
        if entry is not None and not (entry.holds or entry.pinned):
            if self.memory.name in entry.copies:
                self.drop(entry)
            if entry.length == self.index.block_size:
                self.offload.discard(key)
            self.counters["thinned"] += 1

    def skip(self, reason: str, entries: int) -> None:
        """Counts entries that were not kept, by reason."""
        self.counters[f"skipped_{reason}"] += entries
        log.info("not saved: %s (%s)", reason, _count(entries))

    def fault(self, reason: str, error: Exception, entries: int = 1) -> None:
        """Counts bad entries, by reason."""
        self.counters[f"fault_{reason}"] += entries
        log.warning("cache fault, treated as a miss: %s (%s; %s)", reason, error, _count(entries))


def _count(entries: int) -> str:
    return "1 entry" if entries == 1 else f"{entries:,} entries"
