"""Two servers on one folder: what an owner deletes at one of them is nowhere at the other one, though only memory has it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import Pending, ask, check, request_of, user
from headstart.config import Settings
from headstart.errors import Conflict
from headstart.interfaces.sampling import GREEDY
from headstart.prefix_cache.entry import Entry
from headstart.serving import scheduler, settle
from headstart.serving.runtime import Runtime
from headstart.serving.stored import CachedChain
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers import write_behind
from headstart.tiers.disk import Disk, ages
from live import wait_until
from remains import kept, mark, marked, stored

BIG = 1 << 40
KINDS: dict[str, dict[str, Any]] = {"rows": {}, "state": {"sliceable": False}}


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "POLL", 0.02)
    monkeypatch.setattr(scheduler, "IDLE_POLL", 0.05)
    monkeypatch.setattr(scheduler, "IDLE_SAVE", 0.01)
    monkeypatch.setattr(settle, "AFTER", 0.01)


@contextmanager
def started(folder: Path, engine: dict[str, Any] | None = None, **more: Any) -> Iterator[Runtime]:
    settings = Settings(memory_budget=1 << 20, cache_dir=folder, **more)
    with Runtime(lambda: FakeEngine(**{"slots": 2, "ctx": 1024, **(engine or {})}), settings) as runtime:
        yield runtime
        check(runtime)


def quiet(runtime: Runtime) -> None:
    """Waits until all is saved, on disk too, and all is heard that the disk says."""
    offload, disk = runtime.cache.store.offload, runtime.cache.disk
    assert isinstance(disk, write_behind.WriteBehind)
    runtime.scheduler.wake()
    wait_until(lambda: runtime.scheduler.idle and not any(slot.dirty for slot in runtime.scheduler.slots))
    wait_until(lambda: not (offload.writing or offload._queued or disk._notices or disk._watch.more))
    wait_until(lambda: not runtime.scheduler.expiry.busy)


def say(runtime: Runtime, number: int, *, more: str = "", salt: str = "") -> CachedChain:
    """Sends a mark, and returns the chain of this text."""
    ask(runtime, [user(f"{marked(number)}{more}")], salt=salt, max_tokens=1)
    quiet(runtime)
    return runtime.stored.all(runtime.owner(salt))[0]


def evict_all(folder: Path, *runtimes: Runtime) -> None:
    """The disk needs the room for others. The servers have all that they had there in memory."""
    with closing(Disk(folder, BIG)) as disk:
        disk.remove(disk.catalog.keys())
    for runtime in runtimes:
        wait_until(lambda runtime=runtime: not any("disk" in entry.copies for entry in runtime.cache.index))  # type: ignore[misc]


def hear_all(folder: Path, runtime: Runtime) -> None:
    """Waits until a server has obeyed all deletions on its disk. Each of them costs the owner what only memory has by then."""
    with closing(Disk(folder, BIG)) as opened:
        last = opened.catalog.ages.last_tombstone()
    disk = runtime.cache.disk
    assert isinstance(disk, write_behind.WriteBehind)
    wait_until(lambda: disk._tombstone == last)
    quiet(runtime)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_disk_has_evicted_is_forgotten_too(tmp_path: Path, kind: str) -> None:
    """The other server kept it in memory, and wrote it to disk again."""
    with started(tmp_path, KINDS[kind]) as one, started(tmp_path, KINDS[kind]) as other:
        for runtime in (one, other):
            say(runtime, 0)
            say(runtime, 1, salt="bob")
        evict_all(tmp_path, one, other)
        while chains := one.stored.all(one.owner("")):  # settling may have made two of one
            one.stored.delete(chains[0].id, None)
        hear_all(tmp_path, other)
        assert kept(other, [mark(0), mark(1)]) == {mark(1)}, "another owner has deleted nothing"
        say(other, 2)
        assert kept(other, [mark(2)]), "the owner goes on"
    assert stored(tmp_path, [mark(number) for number in range(3)]) == {mark(1), mark(2)}, "what was left was written at the end"


def test_what_was_offered_before_is_not_written_afterwards(tmp_path: Path) -> None:
    """The other server's object waits for the disk while the owner deletes it."""
    with started(tmp_path) as other, closing(Disk(tmp_path, BIG)) as disk:
        with disk.writing():
            ask(other, [user(marked(0))], max_tokens=1)
            ask(other, [user(marked(1))], salt="bob", max_tokens=1)
            wait_until(lambda: len({entry.owner for entry in other.cache.store.offload.writing.values()}) == 2)
            disk.catalog.ages.wipe([], -math.inf, time.time(), [other.owner("")])
        quiet(other)
        wait_until(lambda: not kept(other, [mark(0)]))
        assert kept(other, [mark(1)]) == stored(tmp_path, [mark(1)]) == {mark(1)}
        assert other.cache.disk.counters["skipped_outdated"]
    assert not stored(tmp_path, [mark(0)])


def test_a_server_that_cannot_know_what_was_deleted_forgets_all_that_only_memory_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tombstone is gone when it looks."""
    monkeypatch.setattr(ages, "TOMBSTONES", 0)
    with started(tmp_path) as other, closing(Disk(tmp_path, BIG)) as disk:
        say(other, 0, salt="alice")
        evict_all(tmp_path, other)
        say(other, 1, salt="bob")
        disk.catalog.ages.wipe([], -math.inf, time.time(), [b"somebody"])
        wait_until(lambda: kept(other, [mark(0), mark(1)]) <= {mark(1)})
        quiet(other)
        assert stored(tmp_path, [mark(1)])
    assert not stored(tmp_path, [mark(0)])


def test_what_is_pinned_stays(tmp_path: Path) -> None:
    """Another server could not have deleted it. Its open tail is in this memory only."""
    with started(tmp_path, settle="off") as one, started(tmp_path, settle="off") as other:
        gone = say(one, 0)
        chain = other.stored.pin(say(other, 1, more="abc").id, None)
        assert "disk" not in chain.entries[-1].copies
        wait_until(lambda: len(one.cache.store.pins) > 0)  # else it takes their common beginning for its own
        one.stored.delete(gone.id, None)
        wait_until(lambda: other.scheduler.expiry.deletion_count == 1 and not other.scheduler.expiry.busy)
        assert other.stored.get(chain.id, None).pinned
        assert other.stored.get(chain.id, None).tokens == chain.tokens


def test_what_another_server_has_just_pinned_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has not heard of the pin yet."""
    with started(tmp_path, settle="off") as one, started(tmp_path, settle="off") as other:
        chain = say(one, 0)
        monkeypatch.setattr(one.cache.disk, "_look", lambda disk: None)
        last = [entry for entry in chain.entries if entry.length == one.engine.traits.block_size][-1]
        wait_until(lambda: other.cache.index.get(last.id) is not None)
        other.stored.pin(last.id, None)
        with pytest.raises(Conflict, match="pinned"):
            one.stored.delete(chain.id, None)
        assert other.stored.get(last.id, None).pinned
        assert stored(tmp_path, [mark(0)])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_again_while_it_is_deleted_is_saved_afterwards(tmp_path: Path, kind: str) -> None:
    """Its later blocks were saved at once, and the disk then deleted the first ones: the rest named a block that was gone."""
    one_chain = started(tmp_path, KINDS[kind], settle="off")
    with one_chain as runtime, closing(Disk(tmp_path, BIG)) as disk, ThreadPoolExecutor(1) as pool:
        chain, cache = say(runtime, 0), runtime.cache

        def in_memory() -> list[Entry]:
            return [entry for entry in cache.index if cache.memory.name in entry.copies]

        with disk.writing():  # the deletion waits for the disk
            deletion = pool.submit(runtime.stored.delete, chain.id, None)
            wait_until(lambda: not in_memory())
            ask(runtime, [user(f"{marked(0)}{'more' * 20}")], max_tokens=1)
            runtime.scheduler.call(lambda: [cache.kv_save.save(slot) for slot in runtime.scheduler.slots]).result()
            assert not in_memory()
            assert not deletion.done()
        assert deletion.result().entries
        quiet(runtime)
        rows = {row.label.key: row.label for key in [*disk.catalog.keys()] if (row := disk.catalog.get(key))}
        assert all(label.parent in rows or not label.start for label in rows.values())
        assert kept(runtime, [mark(0)]) == stored(tmp_path, [mark(0)]) == {mark(0)}, "it was asked again"


@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_open_tail_is_in_no_slot(tmp_path: Path, kind: str) -> None:
    """Fault: a text was found by the ids of its full blocks only. The tail of a chain that had no block of its own stayed."""
    with started(tmp_path, KINDS[kind], settle="off") as runtime:
        chains = dict[int, CachedChain]()
        for number in range(2):
            Pending(runtime, request_of(runtime.text_prompt("beginning" * 8 + mark(number)), GREEDY, max_tokens=1)).answer()
            quiet(runtime)
            chains[number] = runtime.stored.all(runtime.owner(""))[0]
        assert runtime.stored.delete(chains[0].id, None).entries == 1
        assert kept(runtime, [mark(0), mark(1)]) == {mark(1)}


def test_settling_waits_for_a_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: it could not save a slot that it would overwrite, and gave the turn up."""
    monkeypatch.setattr(settle, "AFTER", 0.0)
    with started(tmp_path, {"slots": 1}) as runtime:
        barred, scheduler = runtime.cache.store.barred, runtime.scheduler
        keys, counters = [entry.id for entry in say(runtime, 0).entries], scheduler.settle.counters
        settled = counters["turns"]
        scheduler.call(lambda: barred.add(keys)).result()
        for number in range(2):
            ask(runtime, [user(f"{marked(number)}{'more' * 20}")], max_tokens=1)
            scheduler.call(lambda: scheduler._idle(0.0)).result()
        assert scheduler.settle.pending
        scheduler.call(lambda: barred.lift(keys)).result()
        wait_until(lambda: not scheduler.settle.pending)
        assert counters["turns"] == settled + 2
        assert not counters["given_up"]
