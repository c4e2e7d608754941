"""The thread between engine and disk: what is discarded, read and answered, in whatever order it comes."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.stores import behind
from headstart.stores.base import Bytes
from headstart.stores.behind import Appeared, Gone, NoDisk, Notice, Refused, Stored, WriteBehind
from headstart.stores.disk import Disk, FormatError, Label
from headstart.stores.disk.format import checksum

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
def opened(folder: Path) -> Iterator[WriteBehind]:
    tier = WriteBehind(lambda: Disk(folder, BIG), FINGERPRINT, BIG)
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


def stored(folder: Path) -> set[bytes]:
    disk = Disk(folder, BIG)
    keys = disk.catalog.keys()
    disk.close()
    return keys


def test_what_is_discarded_while_it_waits_is_never_written(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "BATCH", 1)
    written: list[bytes] = []
    real = Disk.write

    def write(self: Disk, batch: Any, *rest: Any) -> Any:
        written.extend(one.key for one, _ in batch)
        return real(self, batch, *rest)

    monkeypatch.setattr(Disk, "write", write)
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        assert all(tier.offer(label(number), rows(number)) for number in range(4))
        assert gate.reached.wait(30), "the first is being written"
        tier.discard([label(0).key, label(2).key])
        gate.open.set()
        waited(tier, found, lambda found: len([one for one in found if isinstance(one, Gone | Stored | Refused)]) == 5)
        assert tier.counters["skipped_discarded"] == tier.counters["discarded"] == 1
    assert stored(tmp_path) == {label(1).key, label(3).key}
    assert written == [label(0).key, label(1).key, label(3).key]
    assert Refused(label(2), "discarded") in found
    assert found.index(Stored(label(0))) < found.index(Gone(label(0).key))


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
        waited(tier, found, lambda found: len([one for one in found if isinstance(one, Stored | Refused)]) == 6)
    assert stored(tmp_path) == {label(0).key, state(0).key}
    assert [one for one in found if isinstance(one, Stored | Gone)][-1] in (Stored(label(0)), Stored(state(0)))


def test_a_pinned_object_is_not_discarded(tmp_path: Path) -> None:
    disk = Disk(tmp_path, BIG)
    disk.write([(label(0), rows(0)), (state(0), rows(1)), (label(2), rows(2))])
    disk.catalog.pin([state(0).key], True)
    disk.close()
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        tier.discard([state(0).key, label(2).key, b"x" * 32])
        waited(tier, found, lambda found: Gone(label(2).key) in found)
    assert [one for one in found if not isinstance(one, Appeared)] == [Gone(label(2).key)]
    assert stored(tmp_path) == {label(0).key, state(0).key}


def test_what_a_failing_disk_could_not_delete_it_deletes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "PATIENCE", 0.05)
    disk = Disk(tmp_path, BIG)
    disk.write([(label(number), rows(number)) for number in range(2)])
    disk.close()
    found: list[Notice] = []
    with opened(tmp_path) as tier:
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(Disk, "remove", fail)
            tier.discard([label(0).key])
            end = time.monotonic() + 30
            while tier.counters["faults"] < 2:
                assert time.monotonic() < end
                time.sleep(0.005)
        waited(tier, found, lambda _: tier.counters["discarded"] == 1)
    assert stored(tmp_path) == {label(1).key}


def test_a_last_wish_is_granted(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.offer(label(0), rows(0))
        tier.offer(label(1), rows(1))
        tier.discard([label(0).key])
    assert stored(tmp_path) == {label(1).key}


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


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_wishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Each offer gets one answer; what was wanted last of each is what is there in the end, and what the notices say."""
    monkeypatch.setattr(behind, "BATCH", 3 * SIZE)
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
    assert len([one for one in found if isinstance(one, Stored | Refused)]) == offers
    there: dict[bytes, bool] = {}
    for notice in found:
        if isinstance(notice, Stored):
            there[notice.label.key] = True
        elif isinstance(notice, Gone):
            there[notice.key] = False
    expected = {key for key, wish in wanted.items() if wish}
    assert stored(tmp_path) == expected
    assert {key for key, is_there in there.items() if is_there} == expected
