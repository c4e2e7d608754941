"""Room: the memory tier under its budget. What goes, when something else has to come in.

Used from the engine thread only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headstart.interfaces.tier import EntryKind
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import checkpoint_id
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Entry, Index
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST, RequestTraits
from headstart.serving.offload import Offload
from headstart.tiers.memory import Cell, Memory
from headstart.units import count

log = logging.getLogger("headstart.cache")

_STEPS = 32
MIN_CELLS = 8
"""Cells that the engine's transfer buffer leaves in memory."""


@contextmanager
def pinned(entries: Sequence[Entry]) -> Iterator[None]:
    """Keeps pieces from being evicted."""
    for entry in entries:
        entry.pins += 1
    try:
        yield
    finally:
        for entry in entries:
            entry.pins -= 1


class MemoryBudget:
    """Evicts before anything is allocated.

    Args:
        ctx: tokens that a slot holds.
        kv_bytes_per_token: of a token.
        transfer_bytes: what the engine itself takes to move as many as a slot holds, with their state.
        release: makes the engine give that back.

    Attributes:
        claimed: bytes that the engine's transfer buffer counts for.
    """

    def __init__(
        self,
        index: Index,
        memory: Memory,
        retention: Retention,
        offload: Offload,
        counters: Counter[str],
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
        self.counters = counters
        self._below = keeps_on
        self._ctx = ctx
        self._kv_bytes_per_token = kv_bytes_per_token
        self._transfer_bytes = transfer_bytes
        self._release = release
        self.claimed = 0

    def take(self, piece: Entry, now: float, *, needed: bool, request_traits: RequestTraits = UNKNOWN_REQUEST) -> Cell | None:
        """A cell for `piece`; unless it is needed, nothing goes for it that is worth more and nowhere else.

        Beyond the quota nothing goes for it but what is beyond the quota too.
        """
        kind: EntryKind = "state" if piece.state else "rows"
        while not self.memory.fits(kind):
            over = self.memory.quota.over(piece.owner, self.memory.size(kind))
            victim = self.retention.victim(over)
            if victim is None or (piece.owner in over and victim.owner not in over):
                return None
            due = victim.owner in over and piece.owner not in over
            # A newcomer that is refused is lost; what is on disk too is not.
            if not (
                needed or due or self._below in victim.copies or self.retention.outranks(piece, victim, now, request_traits)
            ):
                return None
            self.evict(victim)
        return self.memory.allocate(kind, piece.owner)

    def claim(self, tokens: int, beside: int = 0) -> bool:
        """Counts the engine's transfer buffer for `tokens` tokens against the budget; evicts first.

        `beside`: bytes of cells that have to be there at the same time: for them a buffer that is larger gives way.
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

    def movable(self, pieces: Sequence[Entry], state: Entry | None) -> int:
        """How many of the first pieces can go into a slot at once, with `state`: in cells, beside the engine's copy of them."""
        room, cell = self.memory.budget - self.size([] if state is None else [state]), self.memory.cell_bytes
        return sum(self.transfer(piece.stop) + number * cell <= room for number, piece in enumerate(pieces, 1))

    def size(self, pieces: Sequence[Entry]) -> int:
        """Bytes of the cells of pieces."""
        return sum(self.memory.size("state" if piece.state else "rows") for piece in pieces)

    def transfer(self, tokens: int) -> int:
        """Bytes of the transfer buffer: what state takes at most, and rows in steps, so that a growing conversation claims now
        and then only.
        """
        rows = min(self._ctx * self._kv_bytes_per_token, self._transfer_bytes)
        return self._transfer_bytes - rows + -(-_STEPS * tokens // self._ctx) * (-(-rows // _STEPS))

    @property
    def most_transfer(self) -> int:
        least = MIN_CELLS * self.memory.cell_bytes + self.memory.state_bytes
        return max(self.claimed, self.memory.budget - least)

    def evict(self, entry: Entry) -> None:
        """A piece has to go; with a line's last checkpoint goes what it alone made useful."""
        self.counters["evicted"] += 1
        self.counters["evicted_tokens"] += 0 if entry.state else len(entry.tokens)
        if self.offload.lacking(entry):
            self.skip("disk", 1)
        self.drop(entry)
        if entry.state and self.index.get(entry.id) is None:
            before = self.index.get(entry.parent)
            while before is not None and self._idle(before):
                after, before = before, self.index.get(before.parent)
                self.evict(after)

    def _idle(self, entry: Entry) -> bool:
        return self.memory.name in entry.copies and not entry.pins and self.retention.is_leaf(entry.id)

    def drop(self, entry: Entry) -> None:
        """Forgets what memory has of a piece, and of the checkpoint at its end."""
        name = self.memory.name
        state = None if entry.state else self.index.get(checkpoint_id(entry.id))
        if state is not None and name in state.copies and not state.pins:
            self.drop(state)
        self.memory.delete(entry.id)
        self.retention.forget(entry)
        self.offload.forget(entry)
        if name in entry.copies:
            self.index.remove(entry.id, name)

    def discard(self, piece: BlockId) -> None:
        """Forgets a piece everywhere, unless it is in use."""
        entry = self.index.get(piece)
        if entry is not None and not entry.pins:
            if self.memory.name in entry.copies:
                self.drop(entry)
            if len(entry.tokens) == self.index.block_size:
                self.offload.discard(piece)
            self.counters["thinned"] += 1

    def skip(self, reason: str, pieces: int) -> None:
        """Counts pieces that were not kept, by reason."""
        self.counters[f"skipped_{reason}"] += pieces
        log.info("not saved: %s (%s)", reason, count(pieces, "piece"))

    def fault(self, reason: str, error: Exception, pieces: int = 1) -> None:
        """Counts pieces that turned out bad, by reason."""
        self.counters[f"fault_{reason}"] += pieces
        log.warning("cache fault, treated as a miss: %s (%s; %s)", reason, error, count(pieces, "piece"))
