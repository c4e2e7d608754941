"""What the disk tier's calls cost beside many stored objects: `python -m benchmarks.growth --only disk`.

`python -m benchmarks.growth_disk --start --decode [--entries 1000 100000]` measures starts, and decoding beside eviction.
The objects are rows of the catalogue, with the sizes of blocks of the bundled model; where files matter they are sparse.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import math
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache, partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from benchmarks.growth_rows import Row, row_of, taken
from benchmarks.servers import demo_model
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY
from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.serving.request import Delta, Event, Failed, Finished, Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.catalog_watch import CatalogWatch
from headstart.tiers.disk import Disk, Label, files, store
from headstart.tiers.notices import Notice

_NEW = itertools.count(10**9)
BLOCK = 64 * 23040
"""Bytes of a block of the bundled model."""
TURNS = 20
"""Blocks of a conversation."""
OWNERS = 50
FINGERPRINT = sha256(b"growth").digest()
WRITTEN = 3
"""Blocks of a write: about 4 MiB."""
ROUNDS = 200
PARTS, PART = 12, 50
"""Parts of a reply whose time is measured, and tokens of each."""

Array = npt.NDArray[np.floating]
Samples = list[float]
"""Seconds, one a call."""


def label(number: int) -> Label:
    """A block of conversation `number // TURNS`."""
    place = number % TURNS
    owner = b"own%05d" % (number // TURNS % OWNERS)
    parent = owner + bytes(24) if place == 0 else _key(number - 1)
    return Label(_key(number), parent, FINGERPRINT, 64 * place, tuple(range(64)), True, 0.4, owner=owner)


def _key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


@cache
def payload(number: int) -> Bytes:
    """The content of block `number` of a write."""
    return np.full(BLOCK, number, np.uint8)


@cache
def filled(entries: int, *, sparse: bool = False, size: int | None = None) -> Path:
    """A folder with so many objects, which is deleted at the end: rows only, or rows and `sparse` files.

    `size`: the bytes of an object that its row tells; by default those of a block, and none of a sparse file.
    """
    told = (0 if sparse else BLOCK) if size is None else size
    folder = Path(tempfile.mkdtemp(prefix="headstart-growth-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    now = time.time()
    with closing(Disk(folder, 1 << 62)) as disk:
        disk.catalog._db.execute("PRAGMA synchronous=OFF")
        for first in range(0, entries, 1000):
            some = [label(number) for number in range(first, min(entries, first + 1000))]
            disk.catalog.add([(one, told) for one in some], now - (entries - first) * 2.0)
            for one in some if sparse else ():
                file = os.open(disk.path(one.key), os.O_CREAT | os.O_WRONLY, 0o600)
                os.truncate(file, BLOCK)
                os.close(file)
        disk.catalog._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder


@contextmanager
def opened(entries: int) -> Iterator[Disk]:
    with closing(Disk(filled(entries), 1 << 62, check=False)) as disk:
        disk.catalog.ranks.learn(time.time())  # as a server does before its first request
        yield disk


def limit(disk: Disk, budget: int | None = None) -> None:
    """Gives a disk this budget, in bytes, whatever the free space of this machine is: the rows say more than the files have.

    `budget`: by default the disk is full.
    """
    given = disk.used + disk.reserved if budget is None else budget

    def measure() -> None:
        disk._budget = given

    disk.measure = measure  # type: ignore[method-assign]
    measure()


def write_with_eviction(entries: int) -> Samples:
    """CPU seconds of a write of 4 MiB that evicts as much, without the system calls that write the files' bytes."""
    with opened(entries) as disk, patch.object(store, "AHEAD", 0):  # so each write evicts
        return _writes(disk, 1)


def write_ahead(entries: int) -> Samples:
    """The same where an eviction makes room for the next writes too, as in a server: each is the mean of seven writes."""
    with opened(entries) as disk:
        return _writes(disk, 7)


def _writes(disk: Disk, together: int) -> Samples:
    """CPU seconds of a write of 4 MiB to a full disk, without those system calls: the means of so many writes `together`."""
    limit(disk)
    found, gone = Samples(), list[bytes]()
    for _ in range(ROUNDS // together):
        spent = 0.0
        for _ in range(together):
            batch = [(label(next(_NEW)), payload(number)) for number in range(WRITTEN)]
            with _without(files, "write") as bytes_only:
                spent += taken(partial(_evicting, disk, batch, gone))
            spent -= sum(bytes_only)
        found.append(spent / together)
    assert gone, "nothing was evicted"
    return found


@contextmanager
def _without(module: ModuleType, name: str) -> Iterator[Samples]:
    """Collects the CPU seconds of a function's calls."""
    real, spent = getattr(module, name), Samples()
    setattr(module, name, lambda *given: spent.append(taken(lambda: real(*given))))
    try:
        yield spent
    finally:
        setattr(module, name, real)


def _evicting(disk: Disk, batch: Sequence[tuple[Label, Bytes]], gone: list[bytes]) -> None:
    gone += disk.write(batch)[1]


def evict(entries: int) -> Samples:
    """CPU seconds of choosing and removing rows for 4 MiB."""
    with opened(entries) as disk:

        def call() -> None:
            disk.catalog.remove([row.label.key for row in disk.catalog.victims((), WRITTEN * BLOCK)])

        found = Samples()
        for _ in range(5 * ROUNDS):
            found.append(taken(call))
            disk.catalog.add([(label(next(_NEW)), BLOCK) for _ in range(WRITTEN)])
        return found


def hits(entries: int) -> Samples:
    """CPU seconds of accounting for a request that used a conversation of 20 blocks: its uses, and its traits."""
    with opened(entries) as disk:
        dice, found = np.random.default_rng(0), Samples()
        traits = RequestTraits.of(TURNS, new=100, siblings=0, reply=100)
        for _ in range(5 * ROUNDS):
            first = int(dice.integers(0, entries // TURNS)) * TURNS
            keys = [_key(number) for number in range(first, first + TURNS)]

            def call(keys: list[bytes] = keys) -> None:
                now = time.time()
                disk.catalog.use([(key, now) for key in keys])
                disk.catalog.replied([(key, traits) for key in keys])

            found.append(taken(call))
        return found


def look(entries: int) -> Samples:
    """CPU seconds of a look after another process has evicted a block and written one."""
    with opened(entries) as disk, opened(entries) as other:
        watch, found = CatalogWatch(FINGERPRINT), Samples()
        while watch.more:
            watch.look(disk.catalog)
        for _ in range(5 * ROUNDS):
            other.catalog.remove([row.label.key for row in other.catalog.victims((), 1)])
            other.catalog.add([(label(next(_NEW)), BLOCK)])
            news: list[Notice] = []
            found.append(taken(lambda: news.extend(watch.look(disk.catalog))))  # noqa: B023  (called at once)
            assert len(news) == 2, news
        _let_go(watch)
        return found


def read(entries: int) -> Samples:
    """CPU seconds of each piece in which a catalogue is read after the start."""
    with opened(entries) as disk:
        watch, found = CatalogWatch(FINGERPRINT), Samples()
        while watch.more:
            found.append(taken(lambda: watch.look(disk.catalog)))
        _let_go(watch)
        return found


def _let_go(watch: CatalogWatch) -> None:
    """Frees what it knows in pieces, as a server does whose disk has failed."""
    watch.lose_sight()
    while watch._unseen:
        watch._unseen.pop()


def tidy(entries: int) -> Samples:
    """CPU seconds of each piece of a clean-up after a start."""
    with closing(Disk(filled(entries, sparse=True), 1 << 62)) as disk:
        pieces, found, end = disk.tidy(whole=False), Samples(), False
        while not end:
            begun = time.thread_time()
            end = next(pieces, None) is None
            found.append(time.thread_time() - begun)
        return found


def start(entries: int) -> Samples:
    """Seconds from the start of a runtime (fake engine) to the end of its first reply, less those with an empty folder."""
    folder, found = filled(entries, sparse=True), Samples()
    for number in range(5):
        with tempfile.TemporaryDirectory() as empty:
            found.append(_first_reply(folder, number) - _first_reply(Path(empty), number))
    return found


def _first_reply(folder: Path, number: int) -> float:
    engine = FakeEngine(slots=2, ctx=4096, block_size=64, batch=512, seed=0)
    engine.fingerprint = FINGERPRINT
    begun = time.perf_counter()
    with Runtime(lambda: engine, Settings(memory_budget=1 << 26, cache_dir=folder, disk_budget=1 << 62)) as runtime:
        for _ in reply(runtime, f"{number} {time.time()} and so on", 8):
            pass
        return time.perf_counter() - begun


def reply(runtime: Runtime, text: str, tokens: int) -> Iterator[tuple[int, float]]:
    """For each event of a reply: its tokens so far, and the time in seconds."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    params = GenerationParams(GREEDY, max_tokens=tokens, ignore_eos=True)
    runtime.submit(Request(runtime.text_prompt(text), params), events.put)
    while not isinstance(event := events.get(timeout=600), Finished):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Delta):
            yield event.tokens, time.perf_counter()


def add_rows(disk: Disk) -> None:
    """Adds rows of 4 MiB, and evicts for them what a write would evict."""
    with disk.writing():
        disk._evict_until(WRITTEN * BLOCK, ())
        disk.catalog.add([(label(next(_NEW)), BLOCK) for _ in range(WRITTEN)])


def evict_ahead(entries: int) -> Samples:
    """CPU seconds of adding rows of 4 MiB to a full disk, where one eviction makes room for several."""
    with opened(entries) as disk:
        limit(disk)
        return [taken(partial(add_rows, disk)) for _ in range(2 * ROUNDS)]


def write(disk: Disk) -> None:
    """Writes objects of 4 MiB, with their files."""
    disk.write([(label(next(_NEW)), payload(number)) for number in range(WRITTEN)])


WORK: dict[str, tuple[Callable[[Disk], None], int | None]] = {
    "evict": (add_rows, None),
    "write": (write, 1 << 62),
    "both": (write, None),
}
"""What is done, and the budget of the disk in bytes (None: it is full)."""


class Eviction:
    """A thread that does some `work` (of `WORK`) on a disk whenever it has been on for `pause` seconds (infinity: never)."""

    def __init__(self, folder: Path, pause: float, work: str) -> None:
        self._folder, self._pause, (self._once, self._budget) = folder, pause, WORK[work]
        self._switched = threading.Condition()
        self._on = self._ended = False
        self._workers = ThreadPoolExecutor(1)

    def switch(self, on: bool) -> None:
        with self._switched:
            self._on = on
            self._switched.notify()

    def __enter__(self) -> Eviction:
        self._work = self._workers.submit(self._evict)
        return self

    def __exit__(self, *_: object) -> None:
        with self._switched:
            self._ended = True
            self._switched.notify()
        self._work.result()
        self._workers.shutdown()

    def _evict(self) -> None:
        with closing(Disk(self._folder, 1 << 62, check=False)) as disk:
            disk.catalog.ranks.learn(time.time())
            limit(disk, self._budget)
            self._once(disk)  # the first one takes longer
            left = self._pause
            while True:
                with self._switched:
                    if self._ended:
                        return
                    on, begun = self._on, time.monotonic()
                    switched = self._switched.wait(left if on and left < threading.TIMEOUT_MAX else None)
                left = max(0.0, left - (time.monotonic() - begun) * on)
                if not switched:
                    self._once(disk)
                    left = self._pause


def decode(entries: int, pauses: Sequence[float], works: Sequence[str], rounds: int) -> dict[tuple[str, float], list[float]]:
    """How fast the bundled model replies beside another thread that does some work (of `WORK`) every `pause` seconds, divided
    by how fast it replies without. Needs a quiet machine.

    A round is two replies. The work is done in every other part of the first, and in the others of the second: so it is on and
    off at the same depths, and in turn. A pause of infinity does nothing: its ratios are the noise. For 4 MiB of KV the
    bundled model computes 182 tokens.

    Returns:
        For each work and pause, a ratio a round.
    """
    ratios = {one: list[float]() for one in ((works[0], math.inf), *product(works, pauses))}
    tokens = (PARTS + 1) * PART
    settings = Settings(str(demo_model()), ctx=tokens + 100, slots=1, memory_budget=1 << 28, cache_dir=None)
    with Runtime(lambda: LlamaEngine.load(settings.engine_options()), settings) as runtime:
        for number in range(rounds):
            for (work, pause), found in ratios.items():
                took = np.zeros((2, PARTS))
                folder = filled(entries) if work == "evict" else filled(entries, sparse=True, size=BLOCK)
                with Eviction(folder, pause, work) as eviction:
                    for second in range(2):
                        borders = list[float]()
                        for done, now in reply(runtime, f"Tell me {number} things.", tokens + 20):
                            # The first part is not counted: the prompt is in it.
                            if len(borders) <= PARTS and done > (len(borders) + 1) * PART:
                                eviction.switch((len(borders) + second) % 2 == 1 and len(borders) < PARTS)
                                borders.append(now)
                        took[second] = np.diff(borders)
                found.append(_alternate(took, 0) / _alternate(took, 1))
            print(f"round {number + 1} of {rounds}:", *(f"{found[-1]:.3f}" for found in ratios.values()), file=sys.stderr)
    return ratios


def _alternate(took: Array, first: int) -> float:
    """The sum of every other part: from part `first` of the first reply on, and of the second what the first leaves out."""
    return float(took[0, first::2].sum() + took[1, 1 - first :: 2].sum())


def measured(entries: int) -> Iterator[Row]:
    for name, call in (
        ("accounting for a hit of 20 blocks", hits),
        ("write of 4 MiB, with eviction", write_with_eviction),
        ("write of 4 MiB, in the mean of those that evict ahead", write_ahead),
        ("choosing victims for 4 MiB", evict),
        ("look after another process wrote", look),
        ("reading the catalogue: a piece", read),
        ("clean-up: a piece", tidy),
    ):
        yield row_of(f"disk: {name}", call(entries))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth_disk", description=__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--start", action="store_true", help="the first reply after a start")
    parser.add_argument("--decode", action="store_true", help="decoding beside eviction; needs a quiet machine")
    parser.add_argument(
        "--pause", type=float, nargs="+", default=[0.7], metavar="S",
        help="seconds from one work of 4 MiB to the next (0.7: without AMX the bundled model computes as much KV in that time)",
    )  # fmt: skip
    parser.add_argument(
        "--work", nargs="+", choices=WORK, default=["evict"],
        help="evict: rows, in a full disk (default); write: files of 4 MiB, with room for them; both: files, in a full disk",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="pairs of replies (9)")
    chosen = parser.parse_args()
    for entries in chosen.entries:
        if chosen.start:
            more = start(entries)
            spread = f"{min(more):+.3f} to {max(more):+.3f}"
            print(f"start with {entries:,} objects: {np.median(more):+.3f} s ({spread}) against none")
        found = decode(entries, chosen.pause, chosen.work, chosen.rounds) if chosen.decode else {}
        for (work, pause), ratios in found.items():
            done = "nothing done" if pause == math.inf else f"{work} 4 MiB every {pause} s"
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            ratio = f"{middle:.3f} of without (quartiles {low:.3f} and {high:.3f}, {min(ratios):.3f} to {max(ratios):.3f})"
            print(f"decoding, {entries:,} objects, {done}: {ratio}")


if __name__ == "__main__":
    main()
