"""What eviction from memory costs, by the number of entries stored: CPU time of the calling thread, for `benchmarks.growth`.

`python -m benchmarks.growth_eviction [entries ...]` prints a table by itself.

The cache is the index and retention without bytes, as in `headstart.replay`. Half of the entries are conversations of one
block behind the root, half are chains of ten blocks. The virtual clock goes on by 10 ms with each call, so rounds and learning
are in the figures.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import count

import numpy as np

from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Entry, Index
from headstart.prefix_cache.reuse_model import RequestTraits

SIZES = (10**3, 10**4, 10**5, 10**6)
CALLS = 3000
_TIER, _BLOCK, _CHAIN, _LONG, _TICK = "memory", 64, 10, 100, 0.01
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
        chain = Chain(_ROOT, 1, as_tokens([next(self._numbers), *range(blocks - 1)]))
        return [
            Entry(chain.ids[number], chain.parent_of(number), chain.tokens[number : number + 1], number)
            for number in range(blocks)
        ]

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

    def evict(self) -> None:
        victim = self.retention.victim()
        assert victim is not None
        self.retention.forget(victim)
        self._index.remove(victim.id, _TIER)


def _timed(call: Callable[[], None]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def evict(entries: int) -> list[float]:
    """CPU seconds of each look for a victim that is then evicted; a new conversation comes for each."""
    tier, found = Tier(entries), []
    for _ in range(CALLS):
        tier.admit(tier.chain(1))
        found.append(_timed(tier.evict))
    return found


def admit(entries: int) -> list[float]:
    """CPU seconds of each new entry, in index and retention; one is evicted for each."""
    tier, found = Tier(entries), []
    for _ in range(CALLS):
        new = tier.chain(1)
        found.append(_timed(lambda new=new: tier.admit(new)))  # type: ignore[misc]
        tier.evict()
    return found


def hit(entries: int) -> list[float]:
    """CPU seconds to count each hit of a chain of a hundred blocks, and its reply."""
    tier, found = Tier(entries), []
    chains = [tier.chain(_LONG) for _ in range(10)]
    for chain in chains:
        tier.admit(chain)
    for number in range(CALLS // 3):
        tier.now += _TICK
        found.append(_timed(lambda chain=chains[number % 10]: tier.use(chain)))  # type: ignore[misc]
    return found


MEASURES: dict[str, Callable[[int], list[float]]] = {"evict": evict, "admit": admit, "hit accounting": hit}


def memory(entries: int, blocks: int) -> float:
    """Bytes of retention for each entry, where all conversations have so many blocks. Index and ids are not counted."""
    tier = Tier(0)
    chains = [tier.chain(blocks) for _ in range(entries // blocks)]
    for chain in chains:
        for entry in chain:
            tier._index.add(entry, _TIER, canonical=True)
    gc.collect()
    tracemalloc.start()
    try:
        for chain in chains:
            tier.now = tier.now + _TICK
            tier.use(chain)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / entries
    finally:
        tracemalloc.stop()


def main() -> None:
    print("| entries | call | mean | median | p99.9 | most |\n|---:|---|---:|---:|---:|---:|")
    for entries in map(int, sys.argv[1:]) if len(sys.argv) > 1 else SIZES:
        for name, measure in MEASURES.items():
            found = np.array(measure(entries)) * 1e3
            middle, late = np.quantile(found, [0.5, 0.999])
            print(f"| {entries:,} | {name} | {found.mean():.3f} ms | {middle:.3f} ms | {late:.2f} ms | {found.max():.2f} ms |")
    for blocks in (1, _CHAIN, _LONG):
        print(f"memory at 100,000 entries in conversations of {blocks} blocks: {memory(10**5, blocks):.0f} bytes an entry")


if __name__ == "__main__":
    main()
