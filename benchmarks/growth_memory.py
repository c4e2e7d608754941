"""What an entry in memory costs beside its tokens: `python -m benchmarks.growth --only entries`.

Index, retention and the memory tier's table of cells together, in bytes as Python's allocator counts them (`tracemalloc`); and
the keys that the disk's thread knows, for what is on disk. The cells themselves have no bytes here. Each conversation has times
and traits of its own, as it has in a server.

The passes of Python's collector are measured while entries come: as it works by itself, and with `api/garbage`, which a server
has.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count

import numpy as np

from benchmarks.growth_rows import Row, held
from headstart.api.garbage import Garbage
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, block_id, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.entry_places import EntryPlaces
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.ghosts import Ghosts
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.reuse_model import RequestTraits, ReuseStats
from headstart.tiers.catalog_watch import KnownKeys
from headstart.tiers.memory import Memory

BLOCK = 64
_TIER, _DISK, _ROOT, _TICK = "memory", "disk", root_id(b"memory", ""), 0.01


class Held:
    """The entries of conversations of `blocks` blocks, and an open tail of `tail` tokens."""

    def __init__(self, entries: int, blocks: int, tail: int) -> None:
        self.index = Index(BLOCK)
        self.retention = Retention(_TIER, self.index, lambda entry: entry.length / BLOCK, by_owner=False)
        self._memory = Memory(0, 1)
        self._memory.keep_places(EntryPlaces(self.index))
        self._dice = np.random.default_rng(0)
        self._numbers = count()
        self._on_disk = KnownKeys()
        self._entries, self._shape = entries, (blocks, tail)

    def fill(self) -> None:
        while len(self.index) < self._entries:
            self._admit(next(self._numbers), *self._shape)

    def fill_both(self) -> None:
        """The same entries in memory and on disk."""
        self.fill()
        for entry in [*self.index]:
            self.index.add(entry, _DISK, canonical=True)
            self._on_disk.add([entry.id])

    def fill_disk(self) -> None:
        """Such entries on disk only."""
        while len(self.index) < self._entries:
            tokens = as_tokens(self._dice.integers(0, 1 << 15, self._shape[0] * BLOCK))
            chain = Chain(_ROOT, BLOCK, tokens)
            for place, key in enumerate(chain.ids):
                entry = Entry(
                    key, chain.parent_of(place), chain.block(place), place * BLOCK, written=1.7e9 + next(self._numbers)
                )
                self.index.add(entry, _DISK, canonical=True)
                self._on_disk.add([key])

    def _admit(self, number: int, blocks: int, tail: int) -> None:
        now, written = number * _TICK, 1.7e9 + number * _TICK
        tokens = as_tokens(self._dice.integers(0, 1 << 15, blocks * BLOCK + tail))
        chain = Chain(_ROOT, BLOCK, tokens)
        parts = [(key, chain.parent_of(place), chain.block(place)) for place, key in enumerate(chain.ids)]
        if tail:
            parent, rest = chain.parent_of(blocks), tokens[blocks * BLOCK :]
            parts.append((block_id(parent, rest), parent, rest))
        for place, (key, parent, part) in enumerate(parts):
            entry = Entry(key, parent, part, place * BLOCK, written=written)
            cell = self._memory.allocate()
            assert cell is not None
            self.index.add(entry, _TIER, canonical=True)
            self._memory.commit(key, cell)
            self.retention.use(entry, now)
        traits = RequestTraits.of(len(parts), new=number % 9000, siblings=number % 5 - 1, reply=number % 600)
        self.retention.replied([key for key, _, _ in parts], traits)


SHAPES: dict[str, Callable[[int], tuple[int, int]]] = {
    "conversations of 10 blocks and a tail": lambda entries: (10, 20),
    "conversations of a block and a tail": lambda entries: (1, 20),
    "conversations of a block": lambda entries: (1, 0),
    "one chain": lambda entries: (entries, 0),
}
"""Blocks and tokens of the tail, by the number of entries."""


ON_DISK: dict[str, tuple[int, int]] = {"conversations of 10 blocks": (10, 0), "conversations of a block": (1, 0)}
"""Those that the disk has too. Open tails are in memory only."""


def measured(entries: int) -> Iterator[Row]:
    def entry(where: str, name: str, kept: Held, fill: Callable[[], None]) -> Row:
        used = held(fill)  # without what an empty cache takes: 460 kB, mostly for the model of reuse
        tokens = sum(entry.length for entry in kept.index)
        return Row(f"an entry{where}: {name}", "B", (used - 4 * tokens) / len(kept.index))

    for name, shape in SHAPES.items():
        kept = Held(entries, *shape(entries))
        yield entry("", name, kept, kept.fill)
    for name, sizes in ON_DISK.items():
        kept = Held(entries, *sizes)
        yield entry(" in memory and on disk", name, kept, kept.fill_both)
        kept = Held(entries, *sizes)
        yield entry(" on disk only", name, kept, kept.fill_disk)
    yield Row("a ghost", "B", _ghosts(entries // 2) / (entries // 2))
    for name, watched in (("collector: longest pass while they come", False), ("the same, with api/garbage", True)):
        yield Row(name, "µs", _longest(entries, watched=watched))
    kept = Held(entries, 10, 20)
    kept.fill()
    begun = time.thread_time()
    gc.collect()
    yield Row("collector: a pass over everything", "µs", (time.thread_time() - begun) * 1e6)


def _ghosts(count: int) -> int:
    """Bytes of so many ghosts."""
    found, dice, traits = Ghosts(), random.Random(0), RequestTraits.of(11, new=100, siblings=0, reply=100)

    def fill() -> None:
        for number in range(count):
            found.put(dice.randbytes(32), ReuseStats(0.0, number * _TICK, 1, traits), count)

    return held(fill)


def _longest(entries: int, *, watched: bool) -> float:
    """Microseconds of the longest pass of the collector while so many entries come, after a start as a server's."""
    passes, begun = [0.0], 0.0

    def passed(phase: str, _: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.thread_time()
        else:
            passes.append((time.thread_time() - begun) * 1e6)

    kept = Held(entries, 10, 20)
    with ExitStack() as ending:
        if watched:
            ending.callback(Garbage(lambda: False).close)
        else:
            gc.collect()
            gc.freeze()
            ending.callback(gc.unfreeze)
        gc.callbacks.append(passed)
        ending.callback(gc.callbacks.remove, passed)
        kept.fill()
    return max(passes)
