"""For how long a call keeps other threads from the interpreter: `python -m benchmarks.growth --only holds`.

A second thread asks for the interpreter all the time. Reported is the CPU time that the first thread has used until the second
one got it, less the time for which the second one waited for a processor: the longest of a call, and the 99.9th percentile of
all of a call (a virtual machine that takes a processor away for a moment makes the longest longer). Python gives the
interpreter away between two steps of a program when another thread asks, here after `SWITCH`. A call into C keeps it, unless it
releases it, as those of SQLite and of files do.
"""

from __future__ import annotations

import gc
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import growth_disk
from benchmarks.growth_disk import TURNS, filled, label, limit, reply
from benchmarks.growth_expiry import Stored, due, runtime_for
from benchmarks.growth_rows import Row, row_of
from headstart.api.garbage import Garbage
from headstart.events.mirror import Mirror
from headstart.events.source import RuntimeSource
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.expiry import Terms
from headstart.prompt.text_memo import TextMemo, TokenisedSegment
from headstart.serving.portions import paced
from headstart.tiers.disk import Disk

SWITCH = 0.0005
"""Seconds after which a thread that runs Python gives the interpreter away. The default is ten times as long."""
FELT = 0.00005
"""Seconds from which a wait is counted. While a call gives the interpreter away, the other thread gets it at once, often."""
CHAIN = 2000
"""Blocks of a chain that is deleted."""
TEXTS, OWNERS = 100_000, 100_000
"""Texts in the memo, which has a bound; owners with a term."""
REQUESTS = 20_000
"""Requests in which the collector's passes are counted."""

_TO_VERSION_5 = """
    DROP TRIGGER object_came; DROP TRIGGER object_went; DROP TRIGGER object_changed;
    DROP INDEX by_rank; DROP INDEX by_owners_rank; DROP INDEX by_bytes;
    DROP TABLE totals; DROP TABLE owned; DROP TABLE made; DROP TABLE given; DROP TABLE soiled;
    ALTER TABLE objects DROP COLUMN rank; ALTER TABLE objects DROP COLUMN children;
    PRAGMA user_version = 5;
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """For how long a call kept the interpreter, in CPU microseconds, of all times at which another thread waited for it."""

    longest: float
    high: float  # the 99.9th percentile

    def rows(self, name: str) -> Iterator[Row]:
        yield Row(f"kept: {name}", "µs", self.longest)
        yield Row(f"kept: {name}, 99.9 %", "µs", self.high)


def kept(call: Callable[[], object]) -> Kept:
    """Makes a call. Another thread asks for the interpreter meanwhile."""
    over, held = threading.Event(), [0.0]

    def ask(clock: int) -> None:
        waits = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while not over.is_set():
            delayed, before = _delayed(waits), time.clock_gettime(clock)
            time.sleep(0)  # gives the interpreter away, and waits for it
            used = time.clock_gettime(clock) - before
            if used > FELT:
                held.append(max(0.0, used - (_delayed(waits) - delayed)))

    usual = sys.getswitchinterval()
    asking = threading.Thread(target=ask, args=(time.pthread_getcpuclockid(threading.get_ident()),))
    sys.setswitchinterval(SWITCH)
    asking.start()
    try:
        call()
    finally:
        over.set()
        asking.join()
        sys.setswitchinterval(usual)
    found = np.array(held) * 1e6
    return Kept(float(found.max()), float(np.percentile(found, 99.9)))


def _delayed(waits: Path) -> float:
    """Seconds for which a thread has waited for a processor so far."""
    return int(waits.read_text().split()[1]) / 1e9


@contextmanager
def copied(entries: int) -> Iterator[Path]:
    """A folder of its own with so many rows."""
    folder = Path(tempfile.mkdtemp(prefix="headstart-growth-"))
    try:
        shutil.copytree(filled(entries), folder, dirs_exist_ok=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def catalogue(entries: int) -> Iterator[tuple[str, Kept]]:
    with copied(entries) as folder, closing(Disk(folder, 1 << 62, check=False)) as disk:
        limit(disk, 1 << 62)
        ages = disk.catalog.ages
        ages.erase([label(0).key])
        yield "removing deleted text from a catalogue (VACUUM)", kept(ages.scrub)
        chain = [label(number).key for number in range(TURNS, min(entries, TURNS + CHAIN))]
        yield f"deleting {len(chain):,} blocks on disk", kept(lambda: disk.erase(chain))
        terms = {b"own%05d" % number: 1e6 + number % 10 for number in range(OWNERS)}
        ages.keep(terms, time.time())
        mine = Terms()
        yield f"reading the terms of {OWNERS:,} owners", kept(lambda: mine.learn(ages.terms()))
        yield "a term of one more owner", kept(lambda: mine.give(b"another owner", 1e6, time.time()))
        yield "forgetting terms", kept(lambda: ages.forget_terms(time.time() + 1e9))


def disk_thread(entries: int) -> Iterator[tuple[str, Kept]]:
    """What the disk's thread does all the time, hundreds of times each, with the opening of the catalogue."""
    filled(entries)
    works: dict[str, Callable[[int], object]] = {
        "choosing victims for 4 MiB on disk": growth_disk.evict,
        "writing 4 MiB with eviction": growth_disk.write_with_eviction,
        "adding rows of 4 MiB, with eviction for several": growth_disk.evict_ahead,
        "hits of 20 blocks on disk": growth_disk.hits,
        "looking for news of other processes": growth_disk.look,
        "reading the catalogue after a start": growth_disk.read,
    }
    for name, work in works.items():
        yield name, kept(partial(work, entries))
    filled(entries, sparse=True)
    yield "a clean-up after a start", kept(partial(growth_disk.tidy, entries))


def expired(entries: int) -> list[float]:
    """Of each piece in which the disk deletes what has expired: `store.AT_ONCE` objects, and at the end the traces of all."""
    with due(entries) as (disk, terms):
        work, found, more = disk.expire(terms), list[float](), [True]

        def piece() -> None:
            more[0] = next(work, None) is not None

        while more[0]:
            found.append(kept(piece).longest)
        return found


def converted(entries: int) -> Kept:
    """Of opening a catalogue of version 5."""
    with copied(entries) as folder:
        with closing(sqlite3.connect(folder / "index.sqlite")) as database:
            database.executescript(_TO_VERSION_5)
        opened: list[Disk] = []
        found = kept(lambda: opened.append(Disk(folder, 1 << 62, check=False)))
        with closing(opened[0]) as disk:
            assert len(disk) == entries
        return found


def memo() -> Kept:
    memo = TextMemo(1 << 30)
    for number in range(TEXTS):
        text = f"{number} and so on"
        memo.put(("", text), TokenisedSegment.of("", text, as_tokens([number])))
    return kept(memo.clear)


def lists(entries: int) -> Iterator[tuple[str, Kept]]:
    with runtime_for(entries) as runtime:
        runtime.scheduler.call(lambda: Stored(runtime, entries)).result()
        yield "a list of the latest 100 chains", kept(lambda: runtime.stored.survey(None, 100))
        source = RuntimeSource(runtime)
        mirror = Mirror(source)
        yield "all entries, for the first reader of events", kept(lambda: mirror.begin(paced(source.open())))
        assert len(mirror) == entries
        yield "forgetting them, when the last one leaves", kept(lambda: mirror.begin(()))


def passes(entries: int, garbage: Garbage) -> Iterator[Row]:
    """Full passes of Python's collector in `REQUESTS` requests: CPU time of each, and after how many all was frozen."""
    found, begun = list[float](), [0.0]

    def passed(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            if phase == "start":
                begun[0] = time.thread_time()
            else:
                found.append(time.thread_time() - begun[0])

    with runtime_for(entries) as runtime:
        runtime.scheduler.call(lambda: Stored(runtime, entries)).result()
        froze = garbage.freezes
        gc.callbacks.insert(0, passed)
        try:
            for number in range(REQUESTS):
                deque(reply(runtime, f"{number} and so on", 8), 0)
        finally:
            gc.callbacks.remove(passed)
        yield row_of("a full pass of the collector", found or [0.0])
        yield Row(f"full passes in {REQUESTS:,} requests", "passes", len(found))
        yield Row("after so many of them all was frozen", "passes", garbage.freezes - froze)


def measured(entries: int) -> Iterator[Row]:
    with closing(Garbage(lambda: False)) as garbage:  # as in a server
        yield from passes(entries, garbage)
        yield from _measured(entries)


def _measured(entries: int) -> Iterator[Row]:
    for name, found in lists(entries):
        yield from found.rows(name)
    for name, found in catalogue(entries):
        yield from found.rows(name)
    yield from converted(entries).rows("converting a catalogue of version 5")
    yield row_of("kept: deleting what has expired, a piece", [held / 1e6 for held in expired(entries)])
    for name, found in disk_thread(entries):  # last: it changes what is stored
        yield from found.rows(name)
    yield from memo().rows(f"forgetting {TEXTS:,} tokenised texts")
