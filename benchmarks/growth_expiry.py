"""What expiry, deletions and lists cost, by the number of entries stored: `python -m benchmarks.growth --only expiry`.

A real runtime on the fake engine holds all entries in memory, without a disk. Half are conversations of one block, half are
chains of ten. Reported is the CPU time of the engine thread in each of its steps, as long as something is left to do: running
replies wait for that. A tenth of the entries is due.

On disk each call is one piece, on the disk's thread. Removing the traces (`VACUUM`) is a row of its own. It runs in SQLite,
without the interpreter.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.growth_disk import filled
from benchmarks.growth_rows import Row, row_of, taken
from headstart.config import Settings
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.expiry import Terms
from headstart.serving.runtime import Runtime
from headstart.serving.stored import copied, unpacked
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.disk import Disk, schema

DUE, LONG, BLOCK = 0.1, 2000, 8
"""Share of the entries that is due; blocks of a chain that is deleted; tokens of a block."""
TERM = 1e6
Step = Callable[[], bool]
"""A step of the engine thread. Returns whether something is left to do."""


class Stored:
    """A runtime with so many entries."""

    def __init__(self, runtime: Runtime, entries: int) -> None:
        self._runtime = runtime
        self._number = 0
        self._root = root_id(runtime.engine.fingerprint, "")
        self._begun = time.time()
        index = runtime.cache.index
        while len(index) < entries:
            age = TERM if self._number % round(1 / DUE) == 0 else 0.0
            self.add(10 if len(index) * 2 < entries else 1, age)
        self.step()
        while self.step():
            pass

    def add(self, blocks: int, age: float = 0.0) -> list[bytes]:
        """A conversation that was written `age` seconds ago. Returns its ids."""
        self._number += 1
        tokens = as_tokens([self._number, *range(blocks * BLOCK - 1)])
        chain, store = Chain(self._root, BLOCK, tokens), self._runtime.cache.store
        for at, key in enumerate(chain.ids):
            entry = Entry(key, chain.parent_of(at), chain.block(at), at * BLOCK, written=self._begun - age)
            cell = store.memory_budget.take(entry, store.clock(), needed=True)
            assert cell is not None
            store.publish(entry, cell, store.clock(), canonical=True)
        return list(chain.ids)

    def step(self) -> bool:
        """What one step of the scheduler does for expiry, deletions and lists."""
        self._runtime.scheduler.expiry.step()
        return self._runtime.scheduler.portions.step()

    def steps(self) -> list[float]:
        """CPU seconds of each step until nothing is left to do."""
        found, left = list[float](), [True]

        def call() -> None:
            left[0] = self.step()

        while left[0]:
            found.append(taken(call))
        return found


def runtime_for(entries: int) -> Runtime:
    """A runtime whose memory can hold so many entries."""
    settings = Settings(memory_budget=(entries + 20 * LONG) * 2 * BLOCK * 16, cache_dir=None, settle="off")
    return Runtime(lambda: FakeEngine(slots=2, ctx=64, block_size=BLOCK, kv_bytes_per_token=16), settings)


def steps(entries: int) -> dict[str, list[float]]:
    """CPU seconds of the engine thread's steps, by what there is to do."""
    with runtime_for(entries) as runtime:

        def measure() -> dict[str, list[float]]:
            stored, scheduler, store = Stored(runtime, entries), runtime.scheduler, runtime.cache.store
            gc.freeze()
            found = dict[str, list[float]]()
            listed = scheduler.portions.add(copied(runtime.cache.index))
            found["a list of all entries"] = stored.steps()
            deque(unpacked(listed.result()), 0)  # as its readers do
            keys = {*stored.add(LONG)}
            store.barred.add(keys)
            scheduler.portions.add(scheduler.expiry.delete(keys))
            found[f"deleting a chain of {LONG:,} blocks"] = stored.steps()
            store.barred.lift(keys)
            before = len(store.index)
            store.terms.cap(TERM)
            found["a look, where a tenth is due"] = stored.steps()
            assert before * (1 - 2 * DUE) < len(store.index) < before
            scheduler.expiry._looked = 0.0
            found["a look, where nothing is due"] = stored.steps()
            store.offload.before = time.time()
            found["a user deletes everything"] = stored.steps()
            assert not len(store.index)
            gc.unfreeze()
            return found

        return runtime.scheduler.call(measure).result()


@contextmanager
def due(entries: int) -> Iterator[tuple[Disk, Terms]]:
    """A folder with so many rows, and terms by which a tenth has expired."""
    folder = Path(tempfile.mkdtemp(prefix="headstart-growth-"))
    try:
        shutil.copytree(filled(entries), folder, dirs_exist_ok=True)
        with closing(Disk(folder, 1 << 62, check=False)) as disk:
            written = [at for (at,) in disk.catalog._db.execute("SELECT written FROM objects ORDER BY written")]
            disk._budget = 1 << 62  # whatever the free space of this machine is: nothing is evicted
            age = time.time() - written[round(DUE * len(written))]
            yield disk, Terms(age / (1 - 0.1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pieces(entries: int) -> tuple[list[float], list[float]]:
    """CPU seconds of each piece in which the disk deletes what has expired, and of removing the traces."""
    with due(entries) as (disk, terms):
        scrub, scrubbed, found, gone = schema.scrub, list[float](), list[float](), 0

        def timed(*given: object) -> None:
            scrubbed.append(taken(lambda: scrub(*given)))  # type: ignore[arg-type]

        work = disk.expire(terms)
        schema.scrub = timed  # type: ignore[assignment]
        try:
            piece: list[tuple[list[bytes], list[bytes]] | None] = [([], [])]

            def call() -> None:
                piece[0] = next(work, None)

            while piece[0] is not None:
                before = sum(scrubbed)
                found.append(taken(call) - (sum(scrubbed) - before))
                gone += len(piece[0][0]) if piece[0] is not None else 0
        finally:
            schema.scrub = scrub
        assert gone > DUE * entries / 2, "too little has expired"
        return found, scrubbed


def measured(entries: int) -> Iterator[Row]:
    for name, seconds in steps(entries).items():
        yield row_of(f"memory: {name}, a step", seconds)
    if entries <= 10**5:
        found, scrubbed = pieces(entries)
        yield row_of("disk: deleting what has expired, a piece", found)
        yield row_of("disk: removing its traces (SQLite alone)", scrubbed)
