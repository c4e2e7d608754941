"""The virtual disk loses in a power failure what a real one may lose, and nothing else."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headstart.testing.simulation.database import restore, snapshot, tear
from headstart.testing.simulation.disk import VirtualDisk
from headstart.testing.simulation.faults import Faults
from headstart.testing.simulation.filesystem import ROOT, FileSystem
from headstart.testing.simulation.kernel import World, enter, leave


def test_a_durable_rename_makes_the_earlier_names_of_its_file_durable() -> None:
    """Otherwise the old name could come back, with a file that was deleted long ago."""
    for seed in range(20):
        disk = VirtualDisk(1 << 30)
        for folder in ("/objects", "/tmp"):
            disk.make(folder)
        disk.create("/tmp/new", 0.0)
        disk.rename("/tmp/new", "/objects/whole", 0.0)
        disk.sync_folder("/objects")
        disk.unlink("/objects/whole")
        disk.sync_folder("/objects")
        disk.lose_power(random.Random(seed))
        assert disk.names == {"/": {}, "/objects": {}, "/tmp": {}}


def test_a_name_that_was_not_made_durable_may_be_lost() -> None:
    found = set()
    for seed in range(20):
        disk = VirtualDisk(1 << 30)
        disk.make("/objects")
        disk.create("/objects/new", 0.0)
        disk.lose_power(random.Random(seed))
        found.add(bool(disk.names["/objects"]))
    assert found == {True, False}


def test_what_somebody_else_deletes_is_gone_for_good_and_nothing_else() -> None:
    for seed in range(20):
        disk = VirtualDisk(1 << 30)
        for folder in ("/objects", "/tmp"):
            disk.make(folder)
        for name in ("lost", "other"):
            disk.create(f"/tmp/{name}", 0.0)
            disk.rename(f"/tmp/{name}", f"/objects/{name}", 0.0)
        assert disk.lose("/objects/lost")
        assert not disk.lose("/objects/lost")
        disk.lose_power(random.Random(seed))
        assert not {"lost"} & (disk.names["/objects"].keys() | disk.names["/tmp"].keys())


def test_a_power_failure_leaves_other_names_to_chance_when_somebody_deletes_a_file() -> None:
    found = set()
    for seed in range(20):
        disk = VirtualDisk(1 << 30)
        disk.make("/objects")
        for name in ("lost", "new"):
            disk.create(f"/objects/{name}", 0.0)
        disk.lose("/objects/lost")
        disk.lose_power(random.Random(seed))
        found.add(bool(disk.names["/objects"]))
    assert found == {True, False}


@pytest.mark.parametrize("synchronous", ["FULL", "NORMAL"])
@pytest.mark.parametrize("earlier", [0, 3, 40])
def test_a_commit_that_is_torn_is_there_or_not(tmp_path: Path, earlier: int, synchronous: str) -> None:
    """SQLite reads each log that `tear` leaves, also one that has begun again."""
    live, found = tmp_path / "live", set[int]()
    live.mkdir()
    with closing(sqlite3.connect(live / "index.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(f"PRAGMA synchronous={synchronous}")
        database.execute("PRAGMA wal_autocheckpoint=16")
        database.execute("CREATE TABLE objects (number INTEGER PRIMARY KEY, content BLOB)")
        for number in range(earlier):
            database.execute("INSERT INTO objects VALUES (?, ?)", (number, bytes([number]) * 3000))
        before = snapshot(live)
        database.execute("BEGIN")
        database.executemany("INSERT INTO objects VALUES (?, ?)", [(1000 + number, b"new" * 1000) for number in range(6)])
        database.execute("COMMIT")
        disk = VirtualDisk(1 << 30)
        disk.make(ROOT)
        files = FileSystem(disk, Faults(), live)
        for seed in range(150):
            tear(files, before, random.Random(seed))
            assert files.after_crash is not None
            restore(tmp_path / f"{seed}", files.after_crash)
            with closing(sqlite3.connect(tmp_path / f"{seed}" / "index.sqlite")) as after:
                assert after.execute("PRAGMA integrity_check").fetchone() == ("ok",)
                rows = after.execute("SELECT number, content FROM objects ORDER BY number").fetchall()
            assert rows[:earlier] == [(number, bytes([number]) * 3000) for number in range(earlier)]
            assert len(rows) in (earlier, earlier + 6)
            found.add(len(rows))
    assert found == {earlier, earlier + 6}
    assert min(disk.lost[what] for what in ("torn commit", "lost commit", "commit without answer")) > 30


def test_only_the_folder_of_the_cache_is_on_the_disk_that_fails(tmp_path: Path) -> None:
    """A server also looks at the file of its model, for example."""
    disk, faults = VirtualDisk(1 << 30), Faults()
    disk.make(ROOT)
    files, here = FileSystem(disk, faults, tmp_path), World(0)
    found = list[str]()

    def look() -> None:
        for path in ("/models/weights.gguf", f"{ROOT}x", f"{ROOT}/lock"):
            try:
                files.stat(path)
            except OSError as error:
                found.append(f"{path} {error.strerror}")

    faults.arm("eio")
    enter(here)
    try:
        task = here.spawn(look, "look", here.process("program"))
        here.run(lambda: task.ended, 1.0)
    finally:
        leave()
    assert found == [
        "/models/weights.gguf simulated: no such file",
        f"{ROOT}x simulated: no such file",
        f"{ROOT}/lock simulated: eio",
    ]
    assert faults.counts == {"eio": 1}
