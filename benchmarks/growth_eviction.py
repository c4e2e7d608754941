"""What eviction from memory costs, by the number of entries stored: `python -m benchmarks.growth --only eviction`.

The cache is the index and retention without bytes, as in `headstart.replay`. Half of the entries are conversations of one
block behind the root, half are chains of ten blocks. The virtual clock goes on by 10 ms with each call, so rounds and learning
are in the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, count

from benchmarks.growth_rows import Row, held, row_of, taken
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.reuse_model import RequestTraits

CALLS = 3000
_TIER, _BLOCK, _CHAIN, _MANY, _LONG, _TICK = "memory", 64, 10, 30, 100, 0.01
_ROOT = root_id(b"growth", "")


class Tier:
    """A full tier. `entries` stays about the same while it is used."""

    def __init__(self, entries: int) -> None:
        self.now = 0.0
        self._index = Index(_BLOCK)
        self.retention = Retention(_TIER, self._index, lambda _: 1.0, by_owner=False)
        self._numbers = count()
        while len(self._index) < entries:
            self.admit(self.chain(_CHAIN if len(self._index) * 2 < entries else 1))

    def chain(self, blocks: int) -> list[Entry]:
        """The blocks of a new conversation."""
        self.now += _TICK
        ids = Chain(_ROOT, 1, as_tokens([next(self._numbers), *range(blocks - 1)]))
        return [Entry(ids.ids[number], ids.parent_of(number), ids.block(number), number) for number in range(blocks)]

    def admit(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._index.add(entry, _TIER, canonical=True)
            self.retention.use(entry, self.now)
        self.replied(entries)

    def use(self, entries: list[Entry]) -> None:
        """Counts a hit."""
        for entry in entries:
            self.retention.use(entry, self.now)
        self.replied(entries)

    def replied(self, entries: list[Entry]) -> None:
        number = int(self.now / _TICK)
        traits = RequestTraits.of(len(entries), new=number % 9000, siblings=number % 5 - 1, reply=number % 600)
        self.retention.replied([entry.id for entry in entries], traits)

    def evict(self, count: int = 1) -> None:
        for _ in range(count):
            victim = self.retention.victim()
            assert victim is not None
            self.retention.forget(victim)
            self._index.remove(victim.id, _TIER)


def evict(entries: int) -> list[float]:
    """CPU seconds of each look for a victim that is then evicted; a new conversation comes for each."""
    tier, found = Tier(entries), []
    for _ in range(CALLS):
        tier.admit(tier.chain(1))
        found.append(taken(tier.evict))
    return found


def long_prompt(entries: int) -> tuple[list[float], list[float]]:
    """CPU seconds to evict as many entries as a long prompt has blocks, at once; and to admit these and to evict as many."""
    tier, evicting, both = Tier(entries), list[float](), list[float]()
    for _ in range(CALLS // _MANY):
        tier.now += 1  # a prompt takes some seconds
        admitting = taken(partial(tier.admit, tier.chain(_MANY)))
        evicting.append(taken(partial(tier.evict, _MANY)))
        both.append(admitting + evicting[-1])
    return evicting, both


def admit(entries: int) -> list[float]:
    """CPU seconds of each new entry, in index and retention; one is evicted for each."""
    tier, found = Tier(entries), []
    for _ in range(CALLS):
        new = tier.chain(1)
        found.append(taken(partial(tier.admit, new)))
        tier.evict()
    return found


def hit(entries: int) -> list[float]:
    """CPU seconds to count each hit of a chain of a hundred blocks, and its reply."""
    tier, found = Tier(entries), []
    chains = [tier.chain(_LONG) for _ in range(10)]
    for one in chains:
        tier.admit(one)
    for number in range(CALLS // 3):
        tier.now += _TICK
        found.append(taken(partial(tier.use, chains[number % 10])))
    return found


def memory(entries: int, blocks: int) -> float:
    """Bytes of retention for each entry, where all conversations have so many blocks. Index and ids are not counted."""
    tier = Tier(0)
    chains = [tier.chain(blocks) for _ in range(max(1, entries // blocks))]
    for entry in chain.from_iterable(chains):
        tier._index.add(entry, _TIER, canonical=True)

    def use() -> None:
        for one in chains:
            tier.now += _TICK
            tier.use(one)

    return held(use) / (len(chains) * blocks)


def measured(entries: int) -> Iterator[Row]:
    evicting, both = long_prompt(entries)
    for name, seconds in (
        ("look for a victim, evict it", evict(entries)),
        ("look for 30 victims, evict them", evicting),
        ("admit", admit(entries)),
        ("admit 30 of a prompt, evict 30", both),
        ("hit of a hundred blocks", hit(entries)),
    ):
        yield row_of(f"retention: {name}", seconds)
    for blocks in (1, _CHAIN, _LONG):
        yield Row(f"retention: conversations of {blocks} blocks", "B", memory(entries, blocks))
