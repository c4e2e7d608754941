"""The calls that `benchmarks.growth --against DIR` compares. A process for each version: `python -m benchmarks.growth_calls`.

It reads lines from its input. For each line it makes a portion of calls and prints their CPU microseconds, by operation, as a
line of JSON. So two processes can take turns. It uses only what both versions have, so it knows the names of older ones.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.growth_rows import taken
from headstart.interfaces.tokens import Tokens, as_tokens
from headstart.prefix_cache.blocks import Chain, block_id, root_id
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.planner import Costs, Mode, SlotView, plan
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.tiers.disk import Disk, Label, files, store


def _of(name: str, *modules: str) -> Any:
    """What the first of these modules that this version has defines."""
    return getattr(import_module(next(one for one in modules if find_spec(one))), name)


if TYPE_CHECKING:
    from headstart.interfaces.traits import Traits
    from headstart.prefix_cache.entry import Entry
else:
    Traits = _of("Traits", "headstart.interfaces.traits", "headstart.interfaces.engine")
    Entry = _of("Entry", "headstart.prefix_cache.entry", "headstart.prefix_cache.index")

BLOCK, TAIL, LONG, TIER, TICK = 64, 20, 100, "memory", 0.01
ROOT = root_id(b"benchmark", "")
CALLS = 40
"""Calls of an operation in a portion."""
OBJECT, TURNS, OWNERS, WRITTEN = 64 * 23040, 20, 50, 3
"""Bytes of an object on disk; objects of a conversation; owners; objects of a write, about 4 MiB."""
FINGERPRINT = sha256(b"growth").digest()

Samples = dict[str, list[float]]
"""CPU microseconds of each call, by operation."""


class InMemory:
    """Index and retention beside `size` entries: conversations of a block and an open tail, all behind the root."""

    def __init__(self, size: int) -> None:
        self._dice, self._now, self._index = random.Random(0), 0.0, Index(BLOCK)
        more = {"by_owner": False} if "by_owner" in inspect.signature(Retention).parameters else {}
        self._retention = Retention(TIER, self._index, lambda _: 1.0, **more)
        self._stored: dict[bytes, Tokens] = {}  # texts, by the id of their open tail
        while len(self._index) < size:
            self._add(self._text())
        self._slots = [SlotView(number, ROOT, self._text(), BLOCK, True, float(number)) for number in range(4)]
        self._mode = Mode(exact=False, traits=Traits(BLOCK))
        self._long = [self._entries(self._text(LONG * BLOCK)) for _ in range(10)]
        for entries in self._long:
            self._admit(entries)

    def portion(self) -> Samples:
        found: Samples = {}
        new = [self._text() for _ in range(CALLS)]
        self._stored = {tail: text for tail, text in self._stored.items() if self._index.get(tail) is not None}
        some = self._dice.sample(list(self._stored.values()), CALLS)
        continued = [as_tokens(np.concatenate([text, self._text(BLOCK)])) for text in some]
        for name, texts in (("a new", new), ("a continued", continued)):
            chains = [Chain(ROOT, BLOCK, text) for text in texts]
            for chain in chains:
                _ = chain.ids  # computed once, which is not what is measured
            match = partial(self._index.match, canonical_only=False, partial=True)
            found[f"match {name} prompt"] = [taken(partial(match, chain, len(chain) - 1)) for chain in chains]
            plans = (partial(plan, chain, self._index, self._slots, Costs(), self._mode) for chain in chains)
            found[f"plan {name} prompt"] = [taken(call) for call in plans]
        admit = found["admit a block and a tail: what they make redundant, index, retention"] = []
        evict = found["choose and evict two entries"] = []
        for text in new:
            admit.append(self._add(text))
            evict.append(taken(self._evict_two))
        hit = found[f"hit of {LONG} blocks"] = []
        for number in range(CALLS):
            self._now += TICK
            hit.append(taken(partial(self._use, self._long[number % len(self._long)])))
        return found

    def _add(self, text: Tokens) -> float:
        """Seconds to admit a text."""
        entries = self._entries(text)
        self._stored[entries[-1].id] = text
        return taken(partial(self._admit, entries))

    def _text(self, length: int = BLOCK + TAIL) -> Tokens:
        tokens = np.frombuffer(self._dice.randbytes(4 * length), np.int32) & 0x7FFF
        tokens[0] = 1
        return as_tokens(tokens)

    def _entries(self, tokens: Tokens) -> list[Entry]:
        chain = Chain(ROOT, BLOCK, tokens)
        found = [Entry(key, chain.parent_of(place), chain.block(place), place * BLOCK) for place, key in enumerate(chain.ids)]
        if len(rest := tokens[len(found) * BLOCK :]):
            parent = chain.parent_of(len(found))
            found.append(Entry(block_id(parent, rest), parent, rest, len(found) * BLOCK))
        return found

    def _admit(self, entries: list[Entry]) -> None:
        self._now += TICK
        for entry in entries:
            self._index.covered(entry.parent, entry.tokens)
            self._index.add(entry, TIER, canonical=True)
            self._retention.use(entry, self._now)
        self._replied(entries)

    def _use(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._retention.use(entry, self._now)
        self._replied(entries)

    def _replied(self, entries: list[Entry]) -> None:
        self._retention.replied([entry.id for entry in entries], _traits(int(self._now / TICK), len(entries)))

    def _evict_two(self) -> None:
        for _ in range(2):
            victim = self._retention.victim()
            assert victim is not None
            self._retention.forget(victim)
            self._index.remove(victim.id, TIER)


class OnDisk:
    """A catalogue with `size` objects: conversations of `TURNS` blocks."""

    def __init__(self, size: int, folder: Path) -> None:
        self._size, self._new, self._dice = size, itertools.count(10**9), np.random.default_rng(0)
        self._hits = itertools.count()
        self.disk, now = Disk(folder, 1 << 62), time.time()
        for first in range(0, size, 1000):
            some = [(_label(number), OBJECT) for number in range(first, min(size, first + 1000))]
            self.disk.catalog.add(some, now - (size - first) * 2.0)
        if hasattr(self.disk.catalog, "ranks"):
            self.disk.catalog.ranks.learn(now)  # as a server does before its first request

    def hits(self) -> Samples:
        name = f"on disk: hit of {TURNS} blocks"
        found: Samples = {name: []}
        for _ in range(CALLS):
            first = int(self._dice.integers(0, self._size // TURNS)) * TURNS
            keys = [_key(number) for number in range(first, first + TURNS)]
            found[name].append(taken(partial(self._hit, keys, _traits(next(self._hits), TURNS))))
        return found

    def evictions(self) -> Samples:
        found: Samples = {}
        evict = found["on disk: choose victims for 4 MiB, remove their rows"] = []
        for _ in range(CALLS // 2):
            evict.append(taken(self._evict))
            self.disk.catalog.add([(_label(next(self._new)), OBJECT) for _ in range(WRITTEN)])
        write = found["on disk: write of 4 MiB with eviction, without the files' bytes"] = []
        real, spent = files.write, list[float]()
        files.write = lambda *given: spent.append(taken(lambda: real(*given)))
        store.AHEAD = 0  # so each write evicts
        full = self.disk.used + self.disk.reserved
        self.disk.measure = partial(setattr, self.disk, "_budget", full)  # type: ignore[method-assign]
        for _ in range(CALLS // 4):
            batch = [(_label(next(self._new)), np.full(OBJECT, 7, np.uint8)) for _ in range(WRITTEN)]
            spent.clear()
            write.append(taken(lambda: self.disk.write(batch)) - sum(spent))  # noqa: B023  (called at once)
        files.write = real
        return found

    def _hit(self, keys: list[bytes], traits: RequestTraits) -> None:
        now = time.time()
        self.disk.catalog.use([(key, now) for key in keys])
        self.disk.catalog.replied([(key, traits) for key in keys])

    def _evict(self) -> None:
        catalog = self.disk.catalog
        catalog.remove([row.label.key for row in catalog.victims((), WRITTEN * OBJECT)])


def _traits(number: int, entries: int) -> RequestTraits:
    """Those of a reply: each has others than the one before."""
    return RequestTraits.of(entries, new=number % 9000, siblings=number % 5 - 1, reply=number % 600)


def _key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def _label(number: int) -> Label:
    place, owner = number % TURNS, b"own%05d" % (number // TURNS % OWNERS)
    parent = owner + bytes(24) if place == 0 else _key(number - 1)
    return Label(_key(number), parent, FINGERPRINT, 64 * place, tuple(range(64)), True, 0.4, owner=owner)


Portion = Callable[[], Samples]


@contextmanager
def in_memory(size: int) -> Iterator[Portion]:
    yield InMemory(size).portion


@contextmanager
def hits_on_disk(size: int) -> Iterator[Portion]:
    with _on_disk(size) as stored:
        yield stored.hits


@contextmanager
def evictions_on_disk(size: int) -> Iterator[Portion]:
    with _on_disk(size) as stored:
        yield stored.evictions


@contextmanager
def _on_disk(size: int) -> Iterator[OnDisk]:
    with tempfile.TemporaryDirectory(prefix="headstart-growth-") as folder:
        stored = OnDisk(size, Path(folder))
        with closing(stored.disk):
            yield stored


CALLED: dict[str, Callable[[int], AbstractContextManager[Portion]]] = {
    "memory": in_memory,
    "hits on disk": hits_on_disk,
    "evictions on disk": evictions_on_disk,
}
"""What a process can call. What evicts has a process of its own: other versions keep other objects."""


def main() -> None:
    name, size = sys.argv[1:]
    with CALLED[name](int(size)) as portion:
        for _ in sys.stdin:
            found = {name: [1e6 * seconds for seconds in calls] for name, calls in portion().items()}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
