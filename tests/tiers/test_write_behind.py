"""The thread between engine and disk: what is discarded, read and answered, in whatever order it comes."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.reuse_model import ReuseModel
from headstart.tiers import disk_reads, parallel_read, upkeep, write_behind, write_queue
from headstart.tiers.catalog_watch import CatalogWatch
from headstart.tiers.disk import Disk, FormatError, Label, catalog_file
from headstart.tiers.disk import reader as disk_reader
from headstart.tiers.disk.ages import Ages
from headstart.tiers.disk.catalog import Catalog, Row
from headstart.tiers.disk.format import ALIGN, VERSION, checksum
from headstart.tiers.disk.store import RESERVE
from headstart.tiers.no_disk import NoDisk
from headstart.tiers.notices import Notice, ObjectErased, ObjectFound, ObjectGone, ObjectRefused, ObjectStored, PinsFound
from headstart.tiers.parallel_read import Hung
from headstart.tiers.upkeep import Upkeep
from headstart.tiers.write_behind import WriteBehind
from live import wait_until

BIG = 1 << 40
SIZE = 5_000
FINGERPRINT = b"f" * 32


def label(number: int) -> Label:
    return Label(bytes([number] * 32), b"r" * 32, FINGERPRINT, 0, (number,) * 8, True, 1.0)


def state(number: int) -> Label:
    """The checkpoint at the end of block `number`."""
    return replace(label(number), key=bytes([number + 100] * 32), parent=label(number).key, kind="state")


def rows(number: int, size: int = SIZE) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


@contextmanager
def opened(folder: Path, budget: int = BIG) -> Iterator[WriteBehind]:
    tier = WriteBehind(lambda: Disk(folder, budget), FINGERPRINT, BIG)
    try:
        yield tier
    finally:
        assert tier.close(30)


def waited(tier: WriteBehind, found: list[Notice], until: Callable[[list[Notice]], bool]) -> None:
    """Collects notices until there are enough."""
    end = time.monotonic() + 30
    while not until(found):
        assert time.monotonic() < end, found
        found += tier.notices()
        time.sleep(0.005)


class Gate:
    """Holds the thread's writes back, once they have come so far, until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        real = os.fsync

        def fsync(file: int) -> None:
            if threading.current_thread().name == "headstart-disk":
                self.reached.set()
                assert self.open.wait(30)
            real(file)

        patch.setattr(os, "fsync", fsync)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys of what is written, one object at a time."""
    found, real = list[bytes](), Disk.write

    def write(self: Disk, batch: Any, *rest: Any) -> Any:
        found.extend(one.key for one, _ in batch)
        return real(self, batch, *rest)

    monkeypatch.setattr(Disk, "write", write)
    monkeypatch.setattr(write_queue, "BATCH", 1)
    return found


def stored(folder: Path) -> set[bytes]:
    disk = Disk(folder, BIG)
    keys = disk.catalog.keys()
    disk.close()
    return keys


def test_what_is_discarded_while_it_waits_is_never_written(tmp_path: Path, gate: Gate, written: list[bytes]) -> None:
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        assert all(tier.offer(label(number), rows(number)) for number in range(4))
        assert gate.reached.wait(30), "the first is being written"
        tier.discard([label(0).key, label(2).key])
        gate.open.set()
        waited(
            tier,
            found,
            lambda found: len([one for one in found if isinstance(one, ObjectGone | ObjectStored | ObjectRefused)]) == 5,
        )
        assert tier.counters["skipped_discarded"] == tier.counters["discarded"] == 1
    assert stored(tmp_path) == {label(1).key, label(3).key}
    assert written == [label(0).key, label(1).key, label(3).key]
    assert ObjectRefused(label(2), "discarded") in found
    assert found.index(ObjectStored(label(0))) < found.index(ObjectGone(label(0).key))


def test_an_error_that_somebody_keeps_holds_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: a log that keeps its records keeps the error, its frames, and in them a statement that was not finished."""
    tier = WriteBehind(lambda: Disk(tmp_path, RESERVE + 4 * 8192), FINGERPRINT, BIG)
    for number in range(6):  # each evicts an older one, which leaves a ghost
        tier.offer(label(number), rows(number))
        waited(tier, [], lambda found: bool(found))
    assert tier.counters["evicted"]

    def value(*_: Any) -> Any:
        raise sqlite3.NotSupportedError("the disk fails, and nothing is damaged")

    monkeypatch.setattr(ReuseModel, "value", value)
    tier.offer(label(9), rows(9))
    waited(tier, [], lambda found: any(isinstance(one, ObjectRefused) for one in found))
    assert tier.close(30)
    assert any(isinstance(one, sqlite3.NotSupportedError) for record in caplog.records for one in record.args or ())
    assert not [file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(tmp_path)]


def test_what_is_evicted_is_told_before_what_takes_its_place(tmp_path: Path) -> None:
    """The next look at the catalogue would find it too, but later."""
    found: list[Notice] = []
    with opened(tmp_path, RESERVE + 4 * 8192) as tier:
        for number in range(6):
            tier.offer(label(number), rows(number))
            waited(tier, found, lambda found, number=number: ObjectStored(label(number)) in found)  # type: ignore[misc]
            before = found[: found.index(ObjectStored(label(number)))]
            gone = sum(isinstance(one, ObjectGone) for one in before)
            assert gone == tier.counters["evicted"]
    assert gone


def test_room_is_kept_for_what_a_crash_left_though_the_catalogue_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a large folder has failed half way, and the disk is used."""
    disk = Disk(tmp_path, BIG)
    disk.write([(label(number), rows(number)) for number in range(6)])
    disk.close()
    monkeypatch.setattr(upkeep, "AT_ONCE", 4)
    kept, agree = list[Disk](), Upkeep.agree

    def busy(self: Upkeep, disk: Disk) -> None:
        monkeypatch.setattr(Upkeep, "agree", agree)
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error

    monkeypatch.setattr(Upkeep, "agree", busy)
    monkeypatch.setattr(Disk, "keep_room", lambda disk: kept.append(disk))
    with opened(tmp_path) as tier:
        assert tier.counters["faults"] == 1
        assert kept == [tier._disk]


def test_what_is_offered_again_is_stored(tmp_path: Path, gate: Gate) -> None:
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        tier.offer(label(0), rows(0))
        assert gate.reached.wait(30)
        tier.offer(state(0), rows(1))
        for _ in range(2):
            tier.discard([state(0).key, label(0).key])
            tier.offer(state(0), rows(1))
            tier.offer(label(0), rows(0))
        gate.open.set()
        waited(tier, found, lambda found: len([one for one in found if isinstance(one, ObjectStored | ObjectRefused)]) == 6)
    assert stored(tmp_path) == {label(0).key, state(0).key}
    assert [one for one in found if isinstance(one, ObjectStored | ObjectGone)][-1] in (
        ObjectStored(label(0)),
        ObjectStored(state(0)),
    )


def test_a_pinned_object_is_not_discarded(tmp_path: Path) -> None:
    disk = Disk(tmp_path, BIG)
    disk.write([(label(0), rows(0)), (state(0), rows(1)), (label(2), rows(2))])
    disk.catalog.pin([state(0).key])
    disk.close()
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        tier.discard([state(0).key, label(2).key, b"x" * 32])
        waited(tier, found, lambda found: ObjectGone(label(2).key) in found)
    pins = PinsFound(frozenset({state(0).key}))
    assert [one for one in found if not isinstance(one, ObjectFound)] == [pins, ObjectGone(label(2).key)]
    assert stored(tmp_path) == {label(0).key, state(0).key}


def test_what_a_failing_disk_could_not_delete_it_deletes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "PATIENCE", 0.05)
    disk = Disk(tmp_path, BIG)
    disk.write([(label(number), rows(number)) for number in range(2)])
    disk.close()
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(Disk, "_remove", fail)
            tier.discard([label(0).key])
            end = time.monotonic() + 30
            while tier.counters["faults"] < 2:
                assert time.monotonic() < end
                time.sleep(0.005)
        waited(tier, found, lambda _: tier.counters["discarded"] == 1)
    assert stored(tmp_path) == {label(1).key}


@pytest.mark.parametrize("reads", [False, True])
def test_an_internal_error_is_told_from_a_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reads: bool
) -> None:
    monkeypatch.setattr(write_behind, "PATIENCE", 0.05)

    def fails(*_: Any) -> None:
        raise KeyError("of a program")

    found: list[Notice] = []
    with opened(tmp_path) as tier:
        monkeypatch.setattr(Disk, "read_into" if reads else "write", fails)
        if reads:
            for _ in range(2):
                results = tier.read([(label(0), np.empty(SIZE, np.uint8))])
                assert isinstance(results[0], KeyError)
        else:
            tier.offer(label(0), rows(0))
            waited(tier, found, lambda notices: any(isinstance(one, ObjectRefused) for one in notices))
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage().startswith("an internal error")
    assert record.exc_info


def test_a_last_wish_is_granted(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.offer(label(0), rows(0))
        tier.offer(label(1), rows(1))
        tier.discard([label(0).key])
    assert stored(tmp_path) == {label(1).key}


def test_what_another_process_evicts_just_before_a_deletion_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deletion takes its ghost, from which the server would have heard of the eviction."""
    with closing(Disk(tmp_path, BIG)) as other:
        other.write([(label(0), rows(0))])
        real = Disk.erase

        def erase(self: Disk, keys: Any, *rest: Any, **options: Any) -> Any:
            other.remove(keys)
            return real(self, keys, *rest, **options)

        monkeypatch.setattr(Disk, "erase", erase)
        found = list[Notice]()
        with opened(tmp_path) as tier:
            waited(tier, found, lambda found: len(found) == 1)
            assert tier.erase([label(0).key], b"").result(30) == 0
            waited(tier, found, lambda found: ObjectErased(label(0).key) in found)


def test_a_deletion_ends_when_nothing_offered_before_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for while the thread is in the middle of a round, before that one handles deletions (a disk that is slow)."""
    reached, go_on, real = threading.Event(), threading.Event(), Upkeep.expire

    def expire(self: Upkeep, *rest: Any, **options: Any) -> None:
        reached.set()
        assert go_on.wait(30)
        real(self, *rest, **options)

    found: list[Notice] = []
    ended = threading.Event()

    def end(_: object) -> None:
        found.extend(tier.notices())
        ended.set()

    with opened(tmp_path) as tier:
        wait_until(lambda: tier.listed, 30)
        monkeypatch.setattr(Upkeep, "expire", expire)
        assert reached.wait(30)
        for number in range(3):
            tier.offer(label(number), rows(number))
        tier.discard([label(0).key, label(1).key])
        erased = tier.erase([label(0).key, label(1).key], b"")
        erased.add_done_callback(end)
        go_on.set()
        assert ended.wait(30)
        assert erased.result() == 0
        assert {one.label.key for one in found if isinstance(one, ObjectRefused)} == {label(0).key, label(1).key}
    assert stored(tmp_path) == {label(2).key}


def test_a_deletion_does_not_wait_for_the_writes_of_others(tmp_path: Path, gate: Gate, written: list[bytes]) -> None:
    before, ended = list[bytes](), threading.Event()

    def end(_: object) -> None:
        before.extend(written)
        ended.set()

    with opened(tmp_path) as tier:
        for number in range(9):
            tier.offer(label(number), rows(number))
        assert gate.reached.wait(30), "the first is being written"
        tier.discard([label(8).key])
        tier.offer(label(9), rows(9))
        erased = tier.erase([label(8).key], b"")
        erased.add_done_callback(end)
        gate.open.set()
        assert ended.wait(30)
        assert len(before) <= 2, "the one that was being written, and the next"
        assert erased.result() == 0
    assert label(8).key not in written
    assert stored(tmp_path) == {label(number).key for number in range(10) if number != 8}


def test_what_is_discarded_before_a_deletion_and_offered_again_is_stored(tmp_path: Path, gate: Gate) -> None:
    with opened(tmp_path) as tier:
        tier.offer(label(0), rows(0))
        assert gate.reached.wait(30)
        tier.offer(label(1), rows(1))
        tier.discard([label(1).key])
        tier.offer(label(1), rows(1))
        erased = tier.erase([label(2).key], b"")
        gate.open.set()
        assert erased.result(30) == 0
    assert stored(tmp_path) == {label(0).key, label(1).key}


def test_reading_tells_how_much(tmp_path: Path) -> None:
    disk = Disk(tmp_path, BIG)
    disk.write([(label(0), rows(0)), (state(0), rows(1, SIZE // 2)), (label(2), rows(2)), (label(3), rows(3, 0))])
    disk.path(label(2).key).write_bytes(b"garbage")
    disk.close()
    with opened(tmp_path) as tier:
        buffers = [np.zeros(size, np.uint8) for size in (SIZE, SIZE, SIZE, 0, SIZE)]
        wanted = list(zip((label(0), state(0), label(2), label(3), label(4)), buffers, strict=True))
        first, second, third, fourth, fifth = tier.read(wanted)
        assert (first, second, fourth) == (SIZE, SIZE // 2, 0)
        assert isinstance(third, FormatError)
        assert isinstance(fifth, FileNotFoundError)
        assert checksum(buffers[1][:second]) == checksum(rows(1, SIZE // 2))
    assert all(isinstance(result, FileNotFoundError) for result in NoDisk().read(wanted))


def stuck(monkeypatch: pytest.MonkeyPatch, *keys: bytes) -> threading.Event:
    """From now on reading these objects takes until the event."""
    answers, real = threading.Event(), Disk.read_into
    monkeypatch.setattr(parallel_read, "STUCK", 0.5)

    def read_into(self: Disk, label: Label, out: Bytes, *count: Any) -> int:
        assert label.key not in keys or answers.wait(30)
        return real(self, label, out, *count)

    monkeypatch.setattr(Disk, "read_into", read_into)
    return answers


def test_a_disk_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk may still write into is told apart; while it hangs nothing is read; then all is told anew."""
    disk = Disk(tmp_path, BIG)
    disk.write([(label(number), rows(number)) for number in range(3)])
    disk.close()
    answers = stuck(monkeypatch, label(1).key)
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        waited(tier, found, lambda found: len(found) == 3)
        buffers = [np.zeros(SIZE, np.uint8) for _ in range(3)]
        wanted = list(zip(map(label, range(3)), buffers, strict=True))
        first, hung, third = tier.read(wanted)
        assert (first, third) == (SIZE, SIZE)
        assert isinstance(hung, Hung)
        assert not hung.over.is_set()
        assert [type(one) for one in tier.read(wanted)] == [TimeoutError] * 3
        time.sleep(3 * write_behind.POLL)
        assert not tier.notices()
        assert tier.hides
        answers.set()
        assert hung.over.wait(30)
        waited(tier, found, lambda found: len(found) == 6)
        waited(tier, found, lambda _: tier.listed)
        assert not tier.hides
        assert tier.read(wanted) == [SIZE] * 3


def test_what_was_not_read_because_a_search_hung_is_told_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(0), rows(0))])
    found, answers = list[Notice](), threading.Event()
    with opened(tmp_path) as tier:
        waited(tier, found, lambda found: len(found) == 1)
        monkeypatch.setattr(disk_reads, "look_up", lambda path, keys: [None] * (not answers.wait(30)))
        monkeypatch.setattr(disk_reads, "FIND", 0.01)
        tier.find([label(1).key])
        assert [type(one) for one in tier.read([(label(0), np.zeros(SIZE, np.uint8))])] == [TimeoutError]
        assert tier.hides
        answers.set()
        waited(tier, found, lambda found: found[1:] == [ObjectFound(label(0))])
        waited(tier, found, lambda _: tier.listed and not tier.hides)


def test_a_fault_of_the_look_that_tells_anew_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(0), rows(0))])
    found, real, failed = list[Notice](), CatalogWatch.look, list[bool]()
    monkeypatch.setattr(write_behind, "PATIENCE", 0.01)

    def look(self: CatalogWatch, catalog: Catalog, *, again: bool, **options: bool) -> list[Notice]:
        if again and not failed:
            failed.append(True)
            refused()
        return real(self, catalog, again=again, **options)

    with opened(tmp_path) as tier:
        waited(tier, found, lambda found: len(found) == 1)
        monkeypatch.setattr(CatalogWatch, "look", look)
        tier._reads.again = True  # as after reads that were given up
        waited(tier, found, lambda found: found[1:] == [ObjectFound(label(0))])
        assert failed


def test_what_is_asked_for_is_told_again(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """After what was offered and discarded before, and when the catalogue answers. Until then it may be hidden."""
    gate.open.set()
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(0), rows(0))])
    found = list[Notice]()
    monkeypatch.setattr(write_behind, "PATIENCE", 0.01)
    with opened(tmp_path) as tier:
        waited(tier, found, lambda found: found == [ObjectFound(label(0))])
        gate.open.clear()
        gate.reached.clear()
        tier.offer(label(1), rows(1))
        assert gate.reached.wait(30)
        tier.offer(label(2), rows(2))
        tier.discard([label(2).key])
        told = tier.report([label(number).key for number in range(4)])
        assert not told.done()
        gate.open.set()
        waited(tier, found, lambda found: all(found.count(ObjectFound(label(number))) == 2 for number in range(2)))
        assert ObjectFound(label(2)) not in found
        assert told.result(30) is None
        with monkeypatch.context() as patch:
            patch.setattr(CatalogWatch, "told_again", refused)
            tier.report([label(0).key])
            wait_until(lambda: tier.counters["faults"] > 2)
        waited(tier, found, lambda found: found.count(ObjectFound(label(0))) == 3)
    assert NoDisk().report([label(0).key]).done()


def test_a_disk_that_is_closed_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told when it is opened. Meanwhile nobody waits for that: deletions go on."""
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(0), rows(0))])
    found, there = list[Notice](), threading.Event()
    there.set()

    def opens() -> Disk:
        if not there.is_set():
            raise OSError(errno.EIO, "no disk")
        return Disk(tmp_path, BIG)

    def look(*_: object, **__: object) -> list[Notice]:
        raise OSError(errno.EIO, "no disk")

    monkeypatch.setattr(write_behind, "PATIENCE", 0.01)
    tier = WriteBehind(opens, FINGERPRINT, BIG)
    try:
        waited(tier, found, lambda found: found == [ObjectFound(label(0))])
        there.clear()
        with monkeypatch.context() as patch:
            patch.setattr(CatalogWatch, "look", look)
            tier._reads.again = True
            told = tier.report([label(0).key])
            waited(tier, found, lambda found: ObjectGone(label(0).key) in found)
        assert told.result(30) is None
        assert tier.report([label(0).key]).result(30) is None
        assert not tier.hides
        assert tier._pause() == write_behind.POLL  # else it is opened again and again without a pause
        there.set()
        waited(tier, found, lambda found: found.count(ObjectFound(label(0))) >= 2)
        wait_until(lambda: not tier.hides)
    finally:
        assert tier.close(30)


def refused(*_: object) -> None:
    """Stands for a call of a disk that must not be written to just now. Such a disk stays open: opening it would tell all."""
    raise OSError(errno.EACCES, "not now")


def test_what_somebody_has_deleted_loses_its_row_when_it_is_read(tmp_path: Path) -> None:
    """Its row would stay when the rest of its chain is deleted: the engine knows it no more."""
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(0), rows(0)), (label(1), rows(1))])
    found = list[Notice]()
    with opened(tmp_path) as tier:
        waited(tier, found, lambda found: len(found) == 2)
        disk.path(label(0).key).unlink()
        missing, read = tier.read([(label(number), np.zeros(SIZE, np.uint8)) for number in range(2)])
        assert isinstance(missing, FileNotFoundError)
        assert read == SIZE
        waited(tier, found, lambda _: not tier.hides)
    assert stored(tmp_path) == {label(1).key}


def test_a_search_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody searches or reads while the first search is without an answer."""
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(0), rows(0))])
    answers, searches = threading.Event(), list[Path]()
    real = disk_reads.look_up

    def look_up(path: Path, keys: Sequence[bytes]) -> list[Row]:
        searches.append(path)
        assert answers.wait(30)
        return real(path, keys)

    monkeypatch.setattr(disk_reads, "look_up", look_up)
    monkeypatch.setattr(disk_reads, "FIND", 0.01)
    with opened(tmp_path) as tier:
        assert [tier.find([label(0).key]) for _ in range(3)] == [[]] * 3
        assert len(searches) == 1
        assert [type(one) for one in tier.read([(label(0), np.zeros(SIZE, np.uint8))])] == [TimeoutError]
        answers.set()
        monkeypatch.setattr(disk_reads, "FIND", 30)
        end = time.monotonic() + 30
        while not tier.find([label(0).key]):
            assert time.monotonic() < end
        assert tier.read([(label(0), np.zeros(SIZE, np.uint8))]) == [SIZE]


def test_reading_gives_up_however_many_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More objects than readers: those that nobody has begun are no longer begun."""
    disk = Disk(tmp_path, BIG)
    disk.write([(label(number), rows(number)) for number in range(20)])
    disk.close()
    answers = stuck(monkeypatch, *(label(number).key for number in range(20)))
    with opened(tmp_path) as tier:
        results = tier.read([(label(number), np.zeros(SIZE, np.uint8)) for number in range(20)])
        assert [type(one) for one in results] == [Hung] * parallel_read.READERS + [TimeoutError] * (20 - parallel_read.READERS)
        answers.set()
        assert all(one.over.wait(30) for one in results if isinstance(one, Hung))


def test_stopping_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, BIG)
    disk.write([(label(0), rows(0))])
    disk.close()
    answers = stuck(monkeypatch, label(0).key)
    tier = WriteBehind(lambda: Disk(tmp_path, BIG), FINGERPRINT, BIG)
    (hung,) = tier.read([(label(0), np.zeros(SIZE, np.uint8))])
    assert not tier.close(30), "buffers must not be freed yet"
    answers.set()
    assert isinstance(hung, Hung)
    assert hung.over.wait(30)


def test_a_process_ends_although_its_disk_hangs(tmp_path: Path) -> None:
    disk = Disk(tmp_path, BIG)
    disk.write([(label(0), rows(0))])
    disk.close()
    code = f"""
import threading
from pathlib import Path
import numpy as np
from headstart.prefix_cache.reuse_model import ReuseModel
from headstart.tiers import parallel_read
from headstart.tiers.write_behind import WriteBehind
from headstart.tiers.disk import Disk
parallel_read.STUCK = 0.1
Disk.read_into = lambda *_: threading.Event().wait()
tier = WriteBehind(lambda: Disk(Path({str(tmp_path)!r}), 1 << 40), b"f" * 32, 1 << 40)
(row,) = Disk(Path({str(tmp_path)!r}), 1 << 40).catalog.rows()
(hung,) = tier.read([(row.label, np.zeros({SIZE}, np.uint8))])
assert not tier.close(5)
print(type(hung).__name__)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "Hung\n"


def test_slow_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large object takes longer than that: as long as bytes come, it is waited for."""
    disk = Disk(tmp_path, BIG)
    disk.write([(label(0), rows(0))])
    disk.close()
    monkeypatch.setattr(disk_reader, "_STEP", SIZE // 8)
    monkeypatch.setattr(parallel_read, "STUCK", 0.8)
    monkeypatch.setattr(parallel_read, "SLOWEST", SIZE // 2)
    real = os.preadv

    def preadv(*args: Any) -> int:
        time.sleep(0.2)
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    with opened(tmp_path) as tier:
        assert tier.read([(label(0), np.zeros(SIZE, np.uint8))]) == [SIZE]
        assert tier.read([]) == []


def test_a_new_server_knows_what_a_block_hangs_on_before_it(tmp_path: Path) -> None:
    """Also where canonical rows have taken derived ones' place since, which makes them news: else nobody knew whose it is."""
    chain = [
        replace(label(number), parent=label(number - 1).key if number else b"r" * 32, start=8 * number) for number in range(4)
    ]
    disk = Disk(tmp_path, BIG)
    disk.write([(replace(one, canonical=False), rows(0)) for one in chain])
    disk.write([(one, rows(1)) for one in chain[:2]])
    disk.close()
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        waited(tier, found, lambda found: len(found) == 4)
    assert [one.label.key for one in found if isinstance(one, ObjectFound)] == [one.key for one in chain]


def test_what_a_request_waits_for_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    disk = Disk(tmp_path, BIG)
    disk.write([(label(number), rows(number)) for number in range(4)])
    disk.close()
    found: list[Notice] = []
    tier = WriteBehind(lambda: Disk(tmp_path, RESERVE + 4 * cell), FINGERPRINT, BIG)

    def store(number: int) -> set[bytes]:
        tier.offer(label(number), rows(number))
        waited(tier, found, lambda found: ObjectStored(label(number)) in found)
        return {one.key for one in found if isinstance(one, ObjectGone)}

    tier.keep([label(0).key, label(1).key])
    assert store(10) | store(11) <= {label(2).key, label(3).key}, "the last ones"
    monkeypatch.setattr(disk_reads, "KEEP", 0.0)
    tier.keep([label(0).key, label(1).key])
    assert store(12) & {label(0).key, label(1).key}, "not for ever"
    assert tier.close(30)


def test_what_was_refused_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, gate: Gate) -> None:
    caplog.set_level("INFO", "headstart")
    tier = WriteBehind(lambda: Disk(tmp_path, BIG), FINGERPRINT, 2 * SIZE)
    assert tier.offer(label(0), rows(0))
    assert gate.reached.wait(30)
    assert [tier.offer(label(number), rows(number)) for number in range(1, 4)] == [True, False, False]
    gate.open.set()
    assert tier.close(30)
    assert "2 objects wait until the disk has time, 0 objects not stored" in caplog.text
    tier = WriteBehind(lambda: Disk(tmp_path, RESERVE), FINGERPRINT, BIG)
    assert tier.offer(label(4), rows(4))
    assert tier.close(30)
    assert "nothing fits" in caplog.text
    assert "0 objects wait until the disk has time, 1 object not stored" in caplog.text


def test_what_a_crash_of_another_process_leaves_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object without a row is not counted until it is found; one of a later version does not make it look again."""
    monkeypatch.setattr(upkeep, "TIDY", 0.1)
    with opened(tmp_path) as tier:
        time.sleep(2 * write_behind.POLL)
        other = Disk(tmp_path, BIG)
        other.write([(label(0), rows(0)), (label(1), rows(1))])
        other.catalog.remove([label(0).key])
        found: list[Notice] = []
        # It may see the object before it has lost its row.
        waited(tier, found, lambda found: ObjectFound(label(0)) in found and label(0).key in other)
        path = other.path(label(1).key)
        data = bytearray(path.read_bytes())
        data[8:12] = (VERSION + 1).to_bytes(4, "little")
        path.write_bytes(bytes(data))
        other.catalog.remove([label(1).key])
        (other.objects / "notes.txt").write_text("not an object")
        taken_in, _ = other.reconcile()
        assert not taken_in, "an object of a later version was taken in"
        assert path.exists()
        other.close()


@pytest.mark.parametrize("frequent", [False, True])
def test_a_deletion_takes_what_has_just_expired(tmp_path: Path, frequent: bool) -> None:
    """The server had forgotten a block that had expired, and the disk had not looked for it yet. So the block before it seemed
    to be the last one. It was deleted, but the row of the other one still named it (seed 8554177 of the simulation).

    `frequent`: another owner's term makes searches frequent, so the block may stay a little longer than when it was forgotten.
    """
    terms, begun = Terms(1000.0), 1.8e9
    now = begun + 1000.0 - 2.5 * terms.look
    tier = WriteBehind(lambda: Disk(tmp_path, BIG, clock=lambda: now), FINGERPRINT, BIG, terms, lambda: now)
    block = replace(label(5), written=now, owner=b"alice123")
    old = replace(label(6), parent=block.key, start=8, written=begun, owner=b"alice123")
    found: list[Notice] = []
    for number, one in enumerate((block, old)):
        assert tier.offer(one, rows(number))
    waited(tier, found, lambda found: ObjectStored(old) in found)
    wait_until(lambda: tier._upkeep.looked == now)
    now += 0.6 * terms.look
    assert old.written <= terms.cut(old.owner, now)
    if frequent:
        terms.give(b"bob", 100.0, now)
        assert old.written > terms.cut(old.owner, now)
    assert tier.erase([block.key], block.owner).result(30)
    assert not any(block.key in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    waited(tier, found, lambda found: ObjectErased(old.key) in found)
    assert tier.close(30)


def test_an_object_is_found_before_the_catalogue_has_been_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large folder is read by and by. What a request asks for is looked up, unless it has expired or is another model's."""
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(number), rows(number)) for number in range(6)])
        disk.write([(replace(label(7), fingerprint=b"g" * 32), rows(7))])
        disk.catalog._db.execute("UPDATE objects SET written = written - 9e6 WHERE key = ?", (label(3).key,))
    monkeypatch.setattr(upkeep, "AT_ONCE", -1)
    monkeypatch.setattr(write_behind, "BACKLOG", 0)  # the engine has no time for the rest
    terms = Terms(8e6)
    tier = WriteBehind(lambda: Disk(tmp_path, BIG), FINGERPRINT, BIG, terms)
    try:
        assert not tier.listed
        found = tier.find([label(number).key for number in (2, 3, 7, 9, 4)])
        assert {one.key for one in found} <= {label(2).key, label(4).key}
        assert tier.read([(one, np.zeros(SIZE, np.uint8)) for one in found]) == [SIZE, SIZE]
        assert not any(isinstance(one, ObjectFound) for one in tier.notices())
        assert tier.offer(label(8), rows(8))
        waited(tier, [], lambda found: any(isinstance(one, ObjectStored) for one in found))
        monkeypatch.setattr(write_behind, "BACKLOG", 10)
        notices: list[Notice] = []
        waited(tier, notices, lambda found: sum(isinstance(one, ObjectFound) for one in found) == 6)
        assert tier.listed
    finally:
        assert tier.close(30)


def test_nothing_is_listed_before_the_objects_of_a_lost_catalogue_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion would take a block for the last of its chain, and leave what follows it."""
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(number), rows(number)) for number in range(3)])
    disk.index.unlink()
    begins, real = threading.Event(), Disk.tidy

    def tidy(self: Disk, **how: Any) -> Iterator[Any]:
        assert begins.wait(30)
        yield from real(self, **how)

    monkeypatch.setattr(Disk, "tidy", tidy)
    with opened(tmp_path) as tier:
        assert not tier.listed
        begins.set()
        found: list[Notice] = []
        waited(tier, found, lambda _: tier.listed)
        found += tier.notices()
        assert {one.label.key for one in found if isinstance(one, ObjectFound)} == {label(number).key for number in range(3)}


def test_a_large_folder_is_not_counted_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked through for what a crash has left, from time to time. Only a small one is counted then."""
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(number), rows(number)) for number in range(3)])
    calls = Counter[str]()

    def count_calls(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def counted(self: Any, *rest: Any) -> Any:
            calls[name] += 1
            return real(self, *rest)

        monkeypatch.setattr(kind, name, counted)

    count_calls(Disk, "_scrub")  # the last step of a look
    count_calls(Catalog, "recount")
    monkeypatch.setattr(upkeep, "TIDY", 0.01)
    for large in (True, False):
        monkeypatch.setattr(upkeep, "AT_ONCE", -1 if large else 1000)
        calls.clear()
        with opened(tmp_path):
            end = time.monotonic() + 30
            while calls["_scrub"] < 4:
                assert time.monotonic() < end
                time.sleep(0.005)
        assert (calls["recount"] == 0) == large


def test_what_goes_before_it_was_reported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has looked objects up. Another process evicts one and erases one before the catalogue was read so far."""
    with closing(Disk(tmp_path, BIG)) as other:
        other.write([(label(number), rows(number)) for number in range(4)])
        monkeypatch.setattr(upkeep, "AT_ONCE", -1)
        monkeypatch.setattr(write_behind, "BACKLOG", 0)  # the engine has no time for the rest
        with opened(tmp_path) as tier:
            assert len(tier.find([label(number).key for number in range(4)])) == 4
            other.remove([label(1).key])
            other.erase([label(2).key])
            found: list[Notice] = []
            waited(tier, found, lambda found: {ObjectGone(label(1).key), ObjectErased(label(2).key)} <= {*found})
            other.erase([label(3).key])
            waited(tier, found, lambda found: ObjectErased(label(3).key) in found)
            assert not any(isinstance(one, ObjectFound) for one in found)


def test_damage_in_a_large_catalogue_is_found_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read when it is opened. It is made anew from the objects all the same, once it is read."""
    count = 200
    monkeypatch.setattr(catalog_file, "CHECKED", 0)
    monkeypatch.setattr(upkeep, "AT_ONCE", -1)
    monkeypatch.setattr(write_behind, "PATIENCE", 0.1)
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(replace(label(number), tokens=tuple(range(500))), rows(number, 100)) for number in range(count)])
        disk.catalog._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = disk.catalog._db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'objects'").fetchone()
    with open(tmp_path / "index.sqlite", "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for at in range(size // 2, size - 8192, 4096):
            file.seek(at // 4096 * 4096)
            if at // 4096 + 1 != root:
                file.write(b"\xff" * 4096)
    found: list[Notice] = []
    tier = WriteBehind(lambda: Disk(tmp_path, BIG, check=False), FINGERPRINT, BIG)
    try:
        waited(
            tier, found, lambda found: {one.label.key[0] for one in found if isinstance(one, ObjectFound)} == {*range(count)}
        )
        assert tier.counters["faults"] >= 1
    finally:
        assert tier.close(30)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_wishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Each offer gets one answer; what was wanted last of each is what is there in the end, and what the notices say."""
    monkeypatch.setattr(write_queue, "BATCH", 3 * SIZE)
    dice, wanted, offers = random.Random(seed), dict[bytes, bool](), 0
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        for _ in range(400):
            number = dice.randrange(12)
            one = label(number) if number % 2 else state(number)
            if dice.random() < 0.6:
                offers += tier.offer(one, rows(one.key[0]))
                wanted[one.key] = True
            else:
                tier.discard([one.key])
                wanted[one.key] = False
            if dice.random() < 0.05:
                time.sleep(0.01)
                found += tier.notices()
    found += tier.notices()
    assert len([one for one in found if isinstance(one, ObjectStored | ObjectRefused)]) == offers
    there: dict[bytes, bool] = {}
    for notice in found:
        if isinstance(notice, ObjectStored):
            there[notice.label.key] = True
        elif isinstance(notice, ObjectGone):
            there[notice.key] = False
    expected = {key for key, wish in wanted.items() if wish}
    assert stored(tmp_path) == expected
    assert {key for key, is_there in there.items() if is_there} == expected


def test_a_disk_that_is_opened_while_the_catalogue_is_locked_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was used, but what the server had lost sight of was never reported again."""
    monkeypatch.setattr(write_behind, "PATIENCE", 0.05)
    disk = Disk(tmp_path, BIG)
    disk.write([(label(number), rows(number)) for number in range(3)])
    disk.close()
    faults, real, found = list[Exception](), Ages.agree, list[Notice]()

    def agree(self: Ages, *terms: Any) -> Any:
        if faults:
            raise faults.pop(0)
        return real(self, *terms)

    monkeypatch.setattr(Ages, "agree", agree)
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
    with opened(tmp_path) as tier:
        waited(tier, found, lambda found: len(found) == 3)
        tier._terms.give(b"owner", 100.0, 0.0)  # news, so that the thread agrees with the catalogue
        faults += [OSError(errno.EIO, "bad"), locked]
        waited(tier, found, lambda found: len([one for one in found if isinstance(one, ObjectFound)]) == 6)
        assert not faults
