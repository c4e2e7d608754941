"""Several processes on one folder: they write, evict, read, hang and die. The budget holds whenever somebody looks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import Disk, Label
from headstart.tiers.disk import lock as disk_lock
from headstart.tiers.disk import store as disk_store

OBJECTS = 1 << 20
"""Bytes for objects: some forty of them."""
BUDGET = disk_store.RESERVE + OBJECTS
KEYS = 250


def label(number: int) -> Label:
    """Chains of four blocks, each with a checkpoint at its end."""
    state = number % 5 == 4
    block = number - state
    parent = bytes(32) if number % 5 == 0 else bytes([number - 1] * 32)
    tokens = tuple(range(block, block + 8))
    return Label(bytes([number] * 32), parent, b"f" * 32, block % 5 * 8, tokens, True, 1.0, "state" if state else "rows")


def rows(number: int) -> Bytes:
    dice = np.random.default_rng(number)
    return dice.integers(0, 256, dice.integers(1, 40_000), np.uint8)


# ── the other process ────────────────────────────────────────────────────────────────────────────────────────────────


def work(folder: Path, seed: int, seconds: float) -> None:
    """Writes, evicts, reads in several threads, deletes and tidies; prints what it has done."""
    done: Counter[str] = Counter()
    dice, until = random.Random(seed), time.monotonic() + seconds
    disk = Disk(folder, BUDGET)
    disk.reconcile()

    def read(wanted: Label) -> None:
        expected = rows(wanted.key[0])
        out = np.empty(len(expected), np.uint8)
        try:
            disk.read_into(wanted, out)
        except FileNotFoundError:
            done["missing"] += 1
        else:
            assert (out == expected).all(), f"{wanted.key[0]} is not what was written"
            done["read"] += 1

    with ThreadPoolExecutor(3) as pool:
        while time.monotonic() < until:
            first = dice.randrange(0, KEYS, 5)
            stored, gone = disk.write([(label(number), rows(number)) for number in range(first, first + dice.randint(1, 5))])
            done["stored"] += len(stored)
            done["gone"] += len(gone)
            known = [row.label for row in disk.catalog.rows()]
            reading = pool.map(read, dice.sample(known, min(8, len(known))))
            disk.catalog.use([(one.key, time.time()) for one in dice.sample(known, min(3, len(known)))])
            if dice.random() < 0.1:
                disk.remove([dice.choice(known).key])
            if dice.random() < 0.05:
                disk.reconcile()
            list(reading)
    disk.close()
    print(json.dumps(done))


def stop_within(folder: Path, number: int) -> None:
    """Writes, and gets no further than the sync of its second object until it is told to go on."""
    disk, syncs = Disk(folder, BUDGET), iter(range(100))
    real = os.fsync

    def fsync(file: int) -> None:
        if next(syncs) == 1:
            print("stopped", flush=True)
            sys.stdin.readline()
        real(file)

    with patch.object(os, "fsync", fsync):
        disk.write([(label(one), rows(one)) for one in range(number, number + 3)])
    disk.close()


@contextmanager
def other(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


# ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Sampler:
    """Looks every 10 ms at what a folder occupies.

    Each time it looks twice and counts what was there both times: that much was there at one and the same moment.
    """

    def __init__(self, folder: Path) -> None:
        self.count = 0
        self.most: Counter[str] = Counter()
        self._folder = folder
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._end.wait(0.01):
            first, second = self._look(), self._look()
            sums: Counter[str] = Counter()
            for file in first.keys() & second.keys():
                folder, size = min(first[file], second[file], key=lambda found: found[1])
                sums["catalogue" if folder == self._folder else "objects"] += size
            for name, size in sums.items():
                self.most[name] = max(self.most[name], size)
            self.count += 1

    def _look(self) -> dict[int, tuple[Path, int]]:
        found: dict[int, tuple[Path, int]] = {}
        for folder in (self._folder, *(self._folder / name for name in ("objects", "tmp", "quarantine"))):
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    found[stat.st_ino] = folder, stat.st_blocks * 512
        return found


@pytest.mark.parametrize("seconds", [1.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_two_processes_at_work(tmp_path: Path, seconds: float) -> None:
    """No error, nothing corrupt, never over the budget; in the end the catalogue says what there is."""
    Disk(tmp_path, BUDGET).close()
    with Sampler(tmp_path) as sampler, other("work", tmp_path, 1, seconds) as one, other("work", tmp_path, 2, seconds) as two:
        done = [json.loads(process.communicate(timeout=seconds + 60)[0]) for process in (one, two)]
        assert one.returncode == two.returncode == 0
    for counts in done:
        assert counts["stored"] > 10
        assert counts["read"] > 10
    assert done[0]["gone"] + done[1]["gone"] > 10
    assert sampler.count > 10
    assert OBJECTS // 2 < sampler.most["objects"] <= OBJECTS, "the samples show nothing, or too much"
    assert 0 < sampler.most["catalogue"] <= disk_store.RESERVE
    with closing(Disk(tmp_path, BUDGET)) as disk:
        found, gone = disk.reconcile()
        assert (found, gone) == ([], [])
        for row in disk.catalog.rows():
            out = np.empty(len(rows(row.label.key[0])), np.uint8)
            disk.read_into(row.label, out)
            assert (out == rows(row.label.key[0])).all()
            assert row.allocated == disk.path(row.label.key).stat().st_blocks * 512
        assert disk.catalog.keys() == {bytes.fromhex(path.stem) for path in disk.objects.iterdir()}
        assert disk.used + disk.reserved <= BUDGET


# ── one that stops within a write ────────────────────────────────────────────────────────────────────────────────────


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_lock, "WAIT", 0.05)
    with closing(Disk(tmp_path, BUDGET)) as disk, other("stop", tmp_path, 0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        under_way = sorted((tmp_path / "tmp").iterdir())
        assert len(under_way) == 2
        for act in (disk.reconcile, lambda: disk.write([(label(9), rows(9))]), lambda: disk.remove([label(0).key])):
            with pytest.raises(BlockingIOError):
                act()
        assert sorted((tmp_path / "tmp").iterdir()) == under_way
        process.communicate("go on\n", timeout=60)
        assert process.returncode == 0
        assert disk.reconcile() == ([], [])
        assert disk.catalog.keys() == {label(number).key for number in range(3)}


def test_what_a_killed_process_was_writing_is_cleaned(tmp_path: Path) -> None:
    """And as long as it lies there it counts."""
    with closing(Disk(tmp_path, BUDGET)) as disk:
        before = disk.used
        with other("stop", tmp_path, 0) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "stopped\n"
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        left = sum(path.stat().st_blocks * 512 for path in (tmp_path / "tmp").iterdir())
        assert left
        assert disk.used == before + left
        disk.write([(label(5), rows(5))])
        assert disk.reconcile() == ([], [])
        assert not list((tmp_path / "tmp").iterdir())
        assert disk.catalog.keys() == {label(5).key}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work", folder, seed, seconds]:
            work(Path(folder), int(seed), float(seconds))
        case ["stop", folder, number]:
            stop_within(Path(folder), int(number))
