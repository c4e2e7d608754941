"""Objects on disk: whatever happens to them, what is read is what was written, or a fault."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sqlite3
import stat
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.interfaces.tier import EntryKind
from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.tiers.disk import Disk, FormatError, Label, catalog_file, schema
from headstart.tiers.disk import files as disk_files
from headstart.tiers.disk import lock as disk_lock
from headstart.tiers.disk import store as disk_store
from headstart.tiers.disk.catalog import Catalog
from headstart.tiers.disk.catalog_file import CatalogFile
from headstart.tiers.disk.format import ALIGN, VERSION, decode, encode, header_size
from headstart.tiers.disk.quarantine import KEPT

SIZE = 10_000
BIG = 1 << 40


def label(number: int, parent: int | None = None, *, seconds: float = 1.0, canonical: bool = True) -> Label:
    above = bytes(32) if parent is None else bytes([parent] * 32)
    start = 0 if parent is None else (parent + 1) * 8
    return Label(bytes([number] * 32), above, b"f" * 32, start, tuple(range(number, number + 8)), canonical, seconds)


def state(block: Label) -> Label:
    """The checkpoint at a block's end."""
    return replace(block, key=bytes([block.key[0] ^ 0x80] * 32), parent=block.key, kind="state")


def rows(number: int, size: int = SIZE) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def filled(folder: Path, count: int = 4, **options: Any) -> Disk:
    disk = Disk(folder, BIG)
    disk.write([(label(number, number - 1 if number else None, **options), rows(number)) for number in range(count)])
    return disk


def refuses(error: Exception) -> Any:
    """A function that fails."""

    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def read(disk: Disk, wanted: Label, size: int = SIZE) -> Bytes:
    out = np.empty(size, np.uint8)
    return out[: disk.read_into(wanted, out)]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    disk = filled(tmp_path)
    block = label(3, 2)
    sizes = {state(label(0)): 3 * SIZE, state(block): 1, label(9, 3): 0}  # rows of a model that has state only
    disk.write([(one, rows(one.key[0], size)) for one, size in sizes.items()])
    disk.close()
    disk = Disk(tmp_path, BIG)
    assert len(disk) == 7
    for row in disk.catalog.rows():
        number = row.label.key[0]
        assert row.label in sizes or row.label == label(number, number - 1 if number else None)
        size = sizes.get(row.label, SIZE)
        assert (read(disk, row.label, size) == rows(number, size)).all()
    for path in [tmp_path, *tmp_path.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, f"{path} is open to others"


@given(
    key=st.binary(min_size=32, max_size=32),
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=600),
    start=st.integers(0, 2**40),
    canonical=st.booleans(),
    kind=st.sampled_from(["rows", "state"]),
)
@examples(100)
def test_a_header_survives(key: bytes, tokens: list[int], start: int, canonical: bool, kind: EntryKind) -> None:
    written = Label(key, key[::-1], key, start, tuple(tokens), canonical, 0.125, kind)
    payload = rows(1, 100)
    head = encode(written, payload)
    assert header_size(head[:32]) == len(head)
    assert len(head) % ALIGN == 0
    found = decode(head, len(head) + 100)
    assert (found.label, found.at, found.size) == (written, len(head), 100)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["rows", "state"])
def test_no_damage_goes_unseen(tmp_path: Path, count: int, kind: EntryKind) -> None:
    """Fault: no checksum. Random bits, cuts and swaps: each is seen, none is served."""
    disk, dice = filled(tmp_path, 3), random.Random(0)
    block = label(1, 0)
    disk.write([(state(block), rows(1))])
    wanted, neighbour = (block, label(0)) if kind == "rows" else (state(block), block)
    path, whole = disk.path(wanted.key), disk.path(wanted.key).read_bytes()
    other = disk.path(neighbour.key).read_bytes()
    described = whole.index(b"}", 32) + 1
    parts = ((0, 32), (32, described), (described, ALIGN), (ALIGN, len(whole)))
    for _ in range(count):
        data = bytearray(whole)
        match dice.choice(("bit", "cut", "grow", "swap", "splice", "zero")):
            case "bit":
                data[dice.randrange(*dice.choice(parts))] ^= 1 << dice.randrange(8)
            case "cut":
                del data[dice.randrange(len(data)) :]
            case "grow":
                data += bytes(dice.randint(1, 5000))
            case "swap":
                data = bytearray(other)
            case "splice":  # a page of the neighbour: its rows are those of the checkpoint, which may stand there
                at = dice.randrange(0, len(data), ALIGN) if kind == "rows" else 0
                data[at : at + ALIGN] = other[at : at + ALIGN]
            case "zero":  # a page that never reached the disk
                at = dice.randrange(0, len(data), ALIGN)
                data[at : at + ALIGN] = bytes(len(data[at : at + ALIGN]))
        path.write_bytes(data)
        with pytest.raises(FormatError):
            read(disk, wanted)
    path.write_bytes(whole)
    assert (read(disk, wanted) == rows(1)).all()


def test_first_blocks_of_others_are_known(tmp_path: Path) -> None:
    disk = filled(tmp_path, 2)
    disk.write([(state(label(0)), rows(9))])
    assert disk.catalog.foreign(b"g" * 32) == {b"f" * 32: {label(0).key}}
    assert disk.catalog.foreign(b"f" * 32) == {}


def as_version_1(path: Path) -> None:
    """Makes an object what an earlier headstart has written: its description says no kind."""
    data = path.read_bytes()
    header = decode(data[: header_size(data[:32])], len(data))
    said = json.loads(data[32 : 32 + int.from_bytes(data[12:16], "little")])
    for later in ("kind", "written", "owner"):
        del said[later]
    description = json.dumps(said, separators=(",", ":")).encode()
    head = struct.pack("<8sII16s", b"headstrt", 1, len(description), xxhash.xxh3_128_digest(description)) + description
    path.write_bytes(head.ljust(-(-len(head) // ALIGN) * ALIGN, b"\0") + data[header.at :])


def test_objects_of_version_1_are_rows(tmp_path: Path) -> None:
    disk = filled(tmp_path, 3)
    for path in disk.objects.iterdir():
        as_version_1(path)
    wanted = label(1, 0)
    assert (read(disk, wanted) == rows(1)).all()
    with pytest.raises(FormatError, match="another object"):
        read(disk, replace(wanted, kind="state"))
    disk.catalog.remove([wanted.key])
    assert disk.reconcile() == ([wanted], [])
    assert {row.label.kind for row in disk.catalog.rows()} == {"rows"}


def test_an_object_of_a_later_version_is_left_where_it_is(tmp_path: Path) -> None:
    disk, wanted = filled(tmp_path, 2), label(1, 0)
    data = bytearray(disk.path(wanted.key).read_bytes())
    data[8:12] = (VERSION + 1).to_bytes(4, "little")
    disk.path(wanted.key).write_bytes(data)
    with pytest.raises(FormatError, match=f"newer: version {VERSION + 1}, and this headstart reads up to version {VERSION}"):
        read(disk, wanted)
    assert disk.quarantine(wanted.key) is None
    assert disk.reconcile() == ([], [])
    assert wanted.key not in disk
    assert disk.path(wanted.key).read_bytes() == data


@pytest.mark.parametrize("unreadable", [False, True])
def test_an_object_that_gets_no_row_and_stays_counts_in_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: bool
) -> None:
    """The catalogue was full, and then the folder did not let go of the file (seed 8900038 of the simulation), or the catalogue
    could not be read (seed 22057337).
    """
    disk = filled(tmp_path, 2)
    before = disk._stored

    def fails(objects: object) -> NoReturn:
        if unreadable:
            patch.setattr(disk.catalog, "get", refuses(sqlite3.DatabaseError("malformed")))
        raise sqlite3.OperationalError("full")

    with monkeypatch.context() as patch:
        patch.setattr(disk.catalog, "add", fails)
        if not unreadable:
            patch.setattr(Path, "unlink", refuses(OSError(errno.EPERM, "not permitted")))
        with pytest.raises(sqlite3.OperationalError, match="full"):
            disk.write([(label(5), rows(5))])
    assert len(disk) == 2
    assert disk._stored > before
    counted = disk._stored
    disk.remove([label(0).key])  # the other ones count as before
    disk.write([(label(0), rows(0))])
    assert disk._stored == counted
    disk.reconcile()
    assert (len(disk), disk._stored) == (3, counted), "it is good, so it has a row then"


@pytest.mark.parametrize("aside", [False, True])
def test_an_object_that_cannot_be_deleted_and_gets_no_row_again_counts_in_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    """It was evicted (seed 13052474 of the simulation) or is bad. The folder did not let go of it, the catalogue was full."""
    disk, key = filled(tmp_path, 2), label(1).key
    if aside:
        data = bytearray(disk.path(key).read_bytes())
        data[-1] ^= 1
        disk.path(key).write_bytes(data)
    before = disk._stored
    with monkeypatch.context() as patch:
        patch.setattr(disk.catalog, "add", refuses(sqlite3.OperationalError("full")))
        patch.setattr(Path, "unlink", refuses(OSError(errno.EPERM, "not permitted")))
        patch.setattr(os, "replace", refuses(OSError(errno.ENOSPC, "no space")))
        goes = partial(disk.quarantine, key) if aside else partial(disk.remove, [key])
        with pytest.raises((sqlite3.OperationalError, OSError)):
            goes()
    assert (len(disk), disk._stored) == (2 if aside else 1, before), "what is put aside keeps its row until it is there"
    disk.reconcile()
    assert (len(disk), disk._stored) == (2, before)


def test_a_bad_object_that_cannot_be_moved_counts_in_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had lost its row, and the quarantine did not have it (seed 8800766 of the simulation)."""
    disk = filled(tmp_path, 2)
    data = bytearray(disk.path(label(1).key).read_bytes())
    data[-1] ^= 1
    disk.path(label(1).key).write_bytes(data)
    before = disk._stored
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "full")

        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="full"):
            disk.quarantine(label(1).key)
    assert (len(disk), disk._stored) == (2, before)
    disk.quarantine(label(1).key)
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert (len(disk), disk._stored) == (1, before)


def test_an_object_whose_row_could_not_be_read_counts_once_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a row: that of a derived object in whose place it was written. So it counts twice at first."""
    disk = Disk(tmp_path, BIG)
    disk.write([(label(0, canonical=False), rows(0))])
    once = disk._stored

    def fails(objects: object) -> NoReturn:
        patch.setattr(disk.catalog, "get", refuses(sqlite3.DatabaseError("malformed")))
        raise sqlite3.OperationalError("full")

    with monkeypatch.context() as patch:
        patch.setattr(disk.catalog, "add", fails)
        with pytest.raises(sqlite3.OperationalError, match="full"):
            disk.write([(label(0), rows(0))])
    assert (len(disk), disk._stored) == (1, 2 * once)
    disk.remove([label(0).key])
    assert (len(disk), disk._stored) == (0, 0)


@pytest.mark.parametrize("folder", [False, True])
def test_what_cannot_be_put_aside_stays_pinned(folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder could not be read for a moment, so a good object seemed bad: it lost its pin, and was evicted later."""
    disk = filled(tmp_path, 2)
    disk.pin([label(0).key, label(1).key])
    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_into", refuses(OSError(errno.EACCES, "not permitted")))
        if folder:
            patch.setattr(os, "replace", refuses(OSError(errno.EACCES, "not permitted")))
            with pytest.raises(OSError, match="not permitted"):
                disk.quarantine(label(1).key)
        else:
            disk.quarantine(label(1).key)
    row = disk.catalog.get(label(1).key)
    assert (row is not None and row.pinned) == folder


def test_a_catalogue_that_another_process_replaces_while_it_is_opened_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process had opened it and hung. SQLite finds the log by its name, so it found that of the new one (seed 15003464)."""
    Disk(tmp_path, BIG).close()
    known, others = schema.known_version, list[Disk]()

    def hangs(database: sqlite3.Connection) -> int:
        monkeypatch.undo()
        schema.drop(tmp_path / "index.sqlite")
        others.append(filled(tmp_path, 2))
        return known(database)

    monkeypatch.setattr(schema, "known_version", hangs)
    with closing(Disk(tmp_path, BIG)) as disk:
        (other,) = others
        other.write([(label(5), rows(5))])
        assert len(disk) == len(other) == 3
    other.close()
    with closing(Disk(tmp_path, BIG)) as disk:
        assert len(disk) == 3


def test_a_catalogue_has_its_name_when_it_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite deletes the log of an empty database: a process that had opened one would delete that of a new one.

    What earlier versions, or a crash, have left is replaced: an empty file, and the log of another one.
    """
    (tmp_path / "index.sqlite").touch()
    for suffix in ("-wal", "-journal"):
        (tmp_path / f"index.sqlite{suffix}").write_bytes(b"a log")
    (tmp_path / "index.sqlite.new").write_bytes(b"half of one")
    sizes, replace_file = list[int](), os.replace

    def replaces(old: Any, new: Any) -> None:
        if str(new).endswith("index.sqlite"):
            sizes.append(Path(old).stat().st_size)
            assert not any(Path(f"{new}{suffix}").exists() for suffix in ("-wal", "-shm", "-journal"))
        replace_file(old, new)

    monkeypatch.setattr(os, "replace", replaces)
    with closing(filled(tmp_path, 2)) as disk:
        assert len(disk) == 2
    assert len(sizes) == 1
    assert sizes[0] > 4096
    assert not (tmp_path / "index.sqlite.new").exists()
    assert stat.S_IMODE((tmp_path / "index.sqlite").stat().st_mode) == 0o600


def test_a_catalogue_that_cannot_be_written_whole_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite hides it when the log of a closed database could not be written back, as on a full disk."""

    def full(path: Path) -> None:
        Catalog(path, creates=False).close()
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(catalog_file, "create", full)
        with pytest.raises(sqlite3.OperationalError, match="full"):
            Disk(tmp_path, BIG)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("index.sqlite")]
    Disk(tmp_path, BIG).close()


def test_an_object_of_a_later_version_counts_in_the_budget(tmp_path: Path) -> None:
    """It had no row, so the folder could become larger than its budget (seed 8511178 of the simulation)."""
    disk, wanted = filled(tmp_path, 2), label(1, 0)
    data = bytearray(disk.path(wanted.key).read_bytes())
    data[8:12] = (VERSION + 1).to_bytes(4, "little")
    disk.path(wanted.key).write_bytes(data)
    before = disk._stored
    for call in (lambda: disk.quarantine(wanted.key), disk.reconcile):  # it is not moved, but it has no row any more
        call()
        assert (len(disk), disk._stored) == (1, before)
    disk.write([(wanted, rows(1))])
    assert (len(disk), disk._stored) == (2, before), "one that this process writes there counts once"
    disk.path(wanted.key).write_bytes(data)
    disk.quarantine(wanted.key)
    disk.close()
    disk = Disk(tmp_path, disk_store.RESERVE + 4 * 16384)
    disk.reconcile()
    for number in range(10, 16):
        disk.write([(label(number), rows(number))])
        assert occupied(tmp_path) <= 4 * 16384
    disk.erase((), time.time() + 60.0)
    assert len(disk) == occupied(tmp_path) == 0
    assert disk._left == disk.budget - disk.used - disk.reserved, "what has gone counts no longer"


def test_only_what_was_asked_for_is_read(tmp_path: Path) -> None:
    disk, wanted = filled(tmp_path), label(1, 0)
    disk.write([(state(wanted), rows(7))])
    changes: dict[str, Any] = {"tokens": (1,), "fingerprint": b"g" * 32, "parent": b"p" * 32, "start": 16, "key": b"k" * 32}
    assert {*changes, "kind", "canonical", "seconds", "written", "owner"} == {field.name for field in fields(Label)}
    for one, other in ((wanted, "state"), (state(wanted), "rows")):
        disk.path(changes["key"]).write_bytes(disk.path(one.key).read_bytes())
        for change in [*changes.items(), ("kind", other)]:
            with pytest.raises(FormatError, match="another object"):
                read(disk, replace(one, **dict([change])))
        with pytest.raises(FormatError, match="expected"):
            read(disk, one, SIZE - 1)
    with pytest.raises(FormatError, match="expected"):
        read(disk, wanted, SIZE + 1)
    assert (read(disk, state(wanted), SIZE + 1) == rows(7)).all(), "a checkpoint may be smaller than the room for it"
    disk.write([(label(7, canonical=False), rows(7))])
    with pytest.raises(FormatError, match="another object"):
        read(disk, label(7))


# ── budget ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_budget_is_hard_and_what_others_hang_on_stays(tmp_path: Path) -> None:
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    disk = Disk(tmp_path, disk_store.RESERVE + 5 * cell)
    disk.write([(label(0), rows(0)), (label(1, 0), rows(1)), (label(2, 1), rows(2))])
    disk.catalog.use([(label(2, 1).key, 4e9)])  # the inner ones are used less, and yet they stay
    for number in range(10, 30):
        stored, _ = disk.write([(label(number), rows(number))])
        assert stored
        assert sum(path.stat().st_blocks * 512 for path in disk.objects.iterdir()) <= 5 * cell
        assert disk.used + disk.reserved <= disk.budget
        for kept in (label(0), label(1, 0), label(2, 1)):
            assert kept.key in disk
    assert label(29).key in disk, "the newest is not the first victim"


def test_an_eviction_makes_room_for_the_next_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    monkeypatch.setattr(disk_store, "AHEAD", 3 * cell)
    monkeypatch.setattr(disk_store, "AHEAD_PART", 2)
    disk = Disk(tmp_path, disk_store.RESERVE + 9 * cell)
    evicted = [len(disk.write([(label(number), rows(number))])[1]) for number in range(18)]
    assert evicted == [*[0] * 9, *[3, 0, 0] * 3]
    disk.close()
    with closing(Disk(tmp_path, disk_store.RESERVE + 4 * cell)) as small:  # half of what fits is less than three
        small.reconcile()
        assert [len(small.write([(label(number), rows(number))])[1]) for number in (20, 21, 22)] == [2, 0, 2]


def test_no_owner_within_a_quota_loses_objects_to_writes_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    monkeypatch.setattr(disk_store, "AHEAD_PART", 2)
    with closing(Disk(tmp_path, disk_store.RESERVE + 8 * cell, portion=0.5)) as disk:
        idle = [replace(label(number), owner=b"idle") for number in range(4)]
        disk.write([(one, rows(0)) for one in idle])
        for number in range(10, 30):
            assert disk.write([(replace(label(number), owner=b"busy"), rows(number))])[0]
        assert all(one.key in disk for one in idle)


def test_pinned_and_needed_objects_stay(tmp_path: Path) -> None:
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    disk = Disk(tmp_path, disk_store.RESERVE + 3 * cell)
    disk.write([(label(number), rows(number)) for number in range(3)])
    disk.catalog.pin([label(0).key])
    stored, gone = disk.write([(label(9), rows(9))], spared=lambda: [label(1).key])
    assert [one.key for one in stored] == [label(9).key]
    assert gone == [label(2).key]
    stored, gone = disk.write([(label(10), rows(10)), (label(11), rows(11))], spared=lambda: [label(1).key])
    assert len(stored) == 1
    assert gone == [label(9).key]


def test_what_is_spared_is_asked_when_nobody_else_writes(tmp_path: Path) -> None:
    """Another process may write for seconds; meanwhile a request has begun to wait for an object."""
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    disk, other = (Disk(tmp_path, disk_store.RESERVE + 2 * cell) for _ in range(2))
    disk.write([(label(number), rows(number)) for number in range(2)])
    needed: set[bytes] = set()
    with ThreadPoolExecutor(1) as pool:
        with other.writing():
            written = pool.submit(disk.write, [(label(9), rows(9))], lambda: needed)
            time.sleep(0.05)
            needed.add(label(0).key)
        assert written.result()[1] == [label(1).key]


def test_half_of_what_is_free_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when others fill the disk while it is open, and when they leave it again."""
    free = 1 << 30
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    disk = Disk(tmp_path, BIG)
    assert disk.budget == free // 2
    disk.write([(label(number), rows(number, 1 << 20)) for number in range(40)])
    assert len(disk) == 40
    free = 2 * disk_store.RESERVE - disk.catalog.used() + (20 << 20)
    disk.write([(label(50), rows(50))])
    assert disk.used + disk.reserved <= disk.budget == disk_store.RESERVE + (10 << 20)
    assert label(50).key in disk
    assert 5 < len(disk) < 15
    free = 1 << 30
    disk.write([(label(number), rows(number, 1 << 20)) for number in range(51, 80)])
    assert all(label(number).key in disk for number in range(50, 80))
    assert Disk(tmp_path, 1 << 20).budget == 1 << 20, "nor more than was given"


def test_a_new_catalogue_costs_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ours already counts as room when the catalogue is made anew from it, as it does otherwise."""
    disk = Disk(tmp_path, BIG)
    disk.write([(label(number), rows(number, 1 << 20)) for number in range(60)])
    free = disk.catalog.used() + 2 * disk_store.RESERVE
    disk.close()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    again = Disk(tmp_path, BIG)
    found, gone = again.reconcile()
    assert (len(found), gone, len(again)) == (60, [], 60)


def test_canonical_rows_in_place_of_derived_ones_are_news_to_others(tmp_path: Path) -> None:
    disk, other = Disk(tmp_path, BIG), Disk(tmp_path, BIG)
    disk.write([(label(number, canonical=False), rows(number)) for number in range(3)])
    seen = max(row.number for row in other.catalog.rows())
    disk.catalog.pin([label(1).key])
    disk.catalog.add([(label(2, canonical=False), 4096)])
    assert not list(other.catalog.rows(after=seen)), "nothing is better than before"
    disk.write([(label(1), rows(9))])
    (row,) = other.catalog.rows(after=seen)
    assert (row.label, row.pinned) == (label(1), True)
    disk.remove([label(1).key])
    disk.write([(label(4), rows(4))])
    assert [one.number > row.number for one in other.catalog.rows(after=seen)] == [True], "no number is used twice"


def test_derived_rows_in_place_of_a_missing_object_are_news_to_others(tmp_path: Path) -> None:
    """Others would go on believing that it is canonical, until they read it."""
    disk, other = filled(tmp_path, 2), Disk(tmp_path, BIG)
    seen = max(row.number for row in other.catalog.rows())
    disk.catalog.pin([label(1, 0).key])
    disk.path(label(1, 0).key).unlink()
    disk.write([(label(1, 0, canonical=False), rows(7))])
    (row,) = other.catalog.rows(after=seen)
    assert (row.label.canonical, row.pinned) == (False, True)


def test_what_cannot_fit_displaces_nothing(tmp_path: Path) -> None:
    """Fault: one oversized entry drains the cache. What it comes with is stored, but for what hangs on it."""
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    disk = Disk(tmp_path, disk_store.RESERVE + 4 * cell)
    disk.write([(label(number), rows(number)) for number in range(3)])
    disk.catalog.pin([label(number).key for number in range(2)])
    giant = label(9, 8)
    batch = [(label(8), rows(8)), (giant, rows(9, 3 * cell)), (state(giant), rows(1, 1)), (state(label(8)), rows(1, 1))]
    assert disk.write([batch[1]]) == ([], [])
    stored, gone = disk.write(batch)
    assert stored == [label(8), state(label(8))]
    assert gone == [label(2).key]
    assert disk.catalog.keys() == {label(0).key, label(1).key, label(8).key, state(label(8)).key}


def test_what_is_discarded_goes_unless_it_is_pinned(tmp_path: Path) -> None:
    disk = filled(tmp_path, 3)
    one, other = state(label(1, 0)), state(label(2, 1))
    disk.write([(one, rows(5)), (other, rows(6, 2 * SIZE))])
    disk.catalog.pin([other.key])
    assert disk.discard([one.key, other.key, b"x" * 32]) == [one.key]
    assert not disk.path(one.key).exists()
    assert other.key in disk
    assert disk.discard([other.key]) == []
    line = [label(0).key, label(1, 0).key, label(2, 1).key]
    assert disk.discard(line) == [], "a pinned checkpoint hangs on them"
    disk.catalog.unpin([other.key])
    assert disk.discard(line) == []
    assert set(disk.discard([*line[1:], other.key])) == {*line[1:], other.key}
    assert disk.catalog.keys() == {line[0]}


def test_a_checkpoint_goes_before_its_block(tmp_path: Path) -> None:
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    disk, block = Disk(tmp_path, disk_store.RESERVE + 4 * cell), label(0)
    disk.write([(block, rows(0)), (label(1), rows(1)), (state(block), rows(2, 2 * SIZE))])
    disk.catalog.use([(state(block).key, 4e9)])
    assert disk.write([(label(2), rows(2))])[1] == [label(1).key], "what is used most stays, and keeps its block"
    disk.catalog.use([(label(2).key, 5e9)])
    assert disk.write([(label(3), rows(3))])[1] == [state(block).key]
    assert block.key in disk


def test_a_failing_unlink_does_not_stop_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be deleted still counts, and something else goes."""
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    disk = Disk(tmp_path, disk_store.RESERVE + 3 * cell)
    disk.write([(label(number), rows(number)) for number in range(3)])
    stuck, real = {disk.path(label(0).key), disk.path(label(1).key)}, os.unlink

    def unlink(path: Any, **options: Any) -> None:
        if Path(path) in stuck:
            raise PermissionError("no")
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    stored, gone = disk.write([(label(9), rows(9))])
    assert [one.key for one in stored] == [label(9).key]
    assert gone == [label(2).key]
    stuck.add(disk.path(label(9).key))
    assert disk.write([(label(10), rows(10))]) == ([], [])
    assert disk.catalog.keys() == {label(number).key for number in (0, 1, 9)}
    assert occupied(tmp_path) <= 3 * cell
    stuck.clear()
    assert disk.write([(label(11), rows(11))])[0]
    assert occupied(tmp_path) <= 3 * cell


def occupied(folder: Path) -> int:
    """Bytes of everything but the catalogue."""
    files = [path for name in ("objects", "tmp", "quarantine") for path in (folder / name).iterdir()]
    return sum(path.stat().st_blocks * 512 for path in files)


@contextmanager
def watched(folder: Path, most: int) -> Iterator[None]:
    """Looks after every call that changes a file whether all is within the budget."""

    def watching(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            assert occupied(folder) <= most
            assert sum(path.lstat().st_blocks * 512 for path in folder.iterdir()) <= disk_store.RESERVE
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "write", "fsync", "replace", "unlink"):
            patch.setattr(os, name, watching(getattr(os, name)))
        yield


def test_nothing_ever_exceeds_the_budget(tmp_path: Path) -> None:
    """Not within a write, nor with what is put aside, what a killed process left, or what a smaller budget finds."""
    dice, room = random.Random(0), 60 * 4096
    disk = Disk(tmp_path, disk_store.RESERVE + room)
    (tmp_path / "tmp" / "1-1.rows").write_bytes(bytes(9_000))
    with watched(tmp_path, room):
        for number in range(60):
            first = dice.randrange(200)
            disk.write([(label(one), rows(one, dice.randint(1, 40_000))) for one in range(first, first + dice.randint(1, 6))])
            if number % 3 == 0:
                key = dice.choice(sorted(disk.catalog.keys()))
                disk.path(key).write_bytes(bytes(disk.path(key).stat().st_size))
                assert disk.quarantine(key) is None
                assert list((tmp_path / "quarantine").iterdir())
            assert disk.used + disk.reserved <= disk.budget
    assert room // 2 < occupied(tmp_path) == disk.used + disk.reserved - disk_store.RESERVE
    known = disk.catalog.keys()
    disk.catalog.remove([key for key in known if key[0] % 2])  # a crash came before these rows
    disk.close()
    disk = Disk(tmp_path, disk_store.RESERVE + room // 2)
    disk.reconcile()
    assert 0 < occupied(tmp_path) == disk.used + disk.reserved - disk_store.RESERVE <= room // 2


def test_a_file_system_that_takes_more_than_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is what a file occupies, not how long it is."""
    monkeypatch.setattr(disk_files, "unit", lambda _: 1)
    disk = Disk(tmp_path, disk_store.RESERVE + 3 * 8192)
    for number in range(3):
        disk.write([(label(one), rows(one, 1)) for one in range(4 * number, 4 * number + 4)])
        assert occupied(tmp_path) == disk.used + disk.reserved - disk_store.RESERVE <= 3 * 8192
    assert len(disk) == 3


def test_derived_rows_never_take_the_place_of_canonical_ones(tmp_path: Path) -> None:
    """Nor is what is there already written again: another process may have been faster."""
    disk = filled(tmp_path, 2)
    before = {path: path.stat().st_ino for path in disk.objects.iterdir()}
    batch = [(label(1, 0, canonical=False), rows(7)), (label(0), rows(0)), (label(2, 1, canonical=False), rows(7))]
    assert disk.write(batch) == ([one for one, _ in batch], [])
    assert before.items() <= {path: path.stat().st_ino for path in disk.objects.iterdir()}.items()
    assert (read(disk, label(1, 0)) == rows(1)).all()
    assert (read(disk, label(1, 0, canonical=False)) == rows(1)).all(), "canonical ones are as good"
    disk.write([(label(2, 1), rows(2))])
    assert (read(disk, label(2, 1)) == rows(2)).all()
    disk.path(label(0).key).unlink()
    disk.write([(label(0), rows(0))])
    assert (read(disk, label(0)) == rows(0)).all(), "a row without an object keeps nothing out"


def test_what_is_discarded_cannot_be_pinned_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process pinned an object between the look at its row and its removal: it had the answer, and no object."""
    disk, last = filled(tmp_path, 2), label(1, 0).key
    children, answers = disk.catalog.children, list[Future[set[bytes] | None]]()

    def pins() -> set[bytes] | None:
        with closing(Disk(tmp_path, BIG)) as other:
            return other.pin([last])

    with ThreadPoolExecutor(1) as thread:

        def meanwhile(key: bytes) -> set[bytes]:
            answers.append(thread.submit(pins))
            wait(answers, 0.5)
            return children(key)

        monkeypatch.setattr(disk.catalog, "children", meanwhile)
        assert disk.discard([last]) == [last]
    assert [answer.result() for answer in answers] == [None]


def test_only_a_bad_object_is_put_aside(tmp_path: Path) -> None:
    """Another process may have put it aside and written it anew since."""
    disk = filled(tmp_path, 2)
    found = disk.quarantine(label(1, 0).key)
    assert found is not None
    assert found.label == label(1, 0)
    assert label(1, 0).key in disk
    disk.path(label(1, 0).key).write_bytes(b"garbage")
    assert disk.quarantine(label(1, 0).key) is None
    assert label(1, 0).key not in disk
    assert [path.read_bytes() for path in (tmp_path / "quarantine").iterdir()] == [b"garbage"]


def test_what_is_put_aside_keeps_nothing_out(tmp_path: Path) -> None:
    """The latest few are kept, as long as they leave room."""
    cell = -(-SIZE // 4096) * 4096 + ALIGN
    disk = Disk(tmp_path, disk_store.RESERVE + KEPT * cell)
    for number in range(KEPT + 2):
        assert disk.write([(label(number), rows(number))])[0]
        disk.path(label(number).key).write_bytes(bytes(SIZE + ALIGN))
        disk.quarantine(label(number).key)
        assert 0 < len(list((tmp_path / "quarantine").iterdir())) <= KEPT
        assert occupied(tmp_path) <= KEPT * cell


@pytest.mark.parametrize("content", [None, b"", b"soon"])
def test_the_loss_of_the_catalogue_does_not_undo_a_deletion(content: bytes | None, tmp_path: Path) -> None:
    """A server that has not heard of it yet would write from memory what was deleted. Other content of the file is no harm."""
    disk = filled(tmp_path, 2)
    disk.erase([], 1e9)
    disk.close()
    disk.index.unlink()
    if content is not None:
        (tmp_path / "deleted").write_bytes(content)
    for _ in range(2):
        with closing(Disk(tmp_path, BIG)) as disk:
            assert disk.catalog.ages.wiped() == ((1e9, 1) if content is None else (0.0, 0))


@pytest.mark.parametrize("place", ["quarantine", "tmp"])
def test_a_deletion_fails_if_a_file_stays_that_may_be_a_part_of_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tidying finishes it, when the file can be deleted."""
    disk = filled(tmp_path, 2)
    (tmp_path / place / "part").write_bytes(b"a part of a chain")
    real = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self.name == "part":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        real(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(OSError, match="part"):
            disk.erase([label(0).key])
    disk.reconcile()
    assert not list((tmp_path / place).iterdir())
    assert disk.catalog.ages.clean


@pytest.mark.parametrize("moved", [False, True])
def test_what_is_put_aside_keeps_its_row_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """The process ended before or after the object was moved. It may be good, and pinned: so its row went last."""
    disk, keys = filled(tmp_path, 2), [label(0).key, label(1).key]
    disk.pin(keys)
    disk.path(keys[1]).write_bytes(b"garbage")

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    where, name = (disk.catalog, "remove") if moved else (os, "replace")
    with monkeypatch.context() as patch:
        patch.setattr(where, name, crash)
        with pytest.raises(KeyboardInterrupt):
            disk.quarantine(keys[1])
    after = Disk(tmp_path, BIG)
    assert after.catalog.pinned(label(0).fingerprint) == {*keys}
    assert (tmp_path / "quarantine" / disk.path(keys[1]).name).exists() is moved
    after.reconcile()
    assert after.catalog.pinned(label(0).fingerprint) == {keys[0]}
    assert {path.read_bytes() for path in (tmp_path / "quarantine").iterdir()} == {b"garbage"}


def test_a_lack_of_open_files_condemns_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = filled(tmp_path, 2)
    disk.catalog.remove([label(1, 0).key])

    def fail(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        patch.setattr(os, "pread", fail)
        with pytest.raises(OSError, match="open files"):
            disk.quarantine(label(0).key)
        with pytest.raises(OSError, match="open files"):
            disk.reconcile()
    assert [one.key for one in disk.reconcile()[0]] == [label(1, 0).key]
    assert len(disk) == 2


def test_strange_things_in_the_folder_stop_nothing(tmp_path: Path) -> None:
    disk = filled(tmp_path, 1)
    disk.path(label(5).key).mkdir()
    (disk.objects / "AB.rows").write_text("x")
    (disk.objects / "ab.rows").write_text("x")
    (disk.objects / ".hidden").write_text("x")
    (tmp_path / "tmp" / "folder").mkdir()
    disk.reconcile()
    disk.write([(label(5), rows(5))])
    assert (read(disk, label(5)) == rows(5)).all()
    assert len(disk) == 2


def test_a_folder_made_anew_is_not_written_to_by_those_who_knew_the_old_one(tmp_path: Path) -> None:
    old = filled(tmp_path / "cache", 1)
    shutil.rmtree(tmp_path / "cache")
    new = filled(tmp_path / "cache", 1)
    with pytest.raises(OSError, match="replaced"):
        old.write([(label(1), rows(1))])
    with pytest.raises(OSError, match="replaced"):
        old.abandon_catalog()
    new.write([(label(1), rows(1))])
    assert len(new) == 2


# ── faults and crashes ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_fault_while_writing_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    disk = filled(tmp_path, 2)
    real = getattr(os, call)
    for at in range(8):
        calls = 0

        def fail(*args: Any, at: int = at, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:
                raise OSError(code, os.strerror(code))
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            fault: OSError | None = None
            try:
                disk.write([(label(5), rows(5)), (label(6, 5), rows(6))])
            except OSError as error:
                fault = error
        assert (fault is not None) == (calls > at)
        if fault is None:
            break
        assert fault.errno == code
        assert label(5).key not in disk
        assert {path.stem for path in disk.objects.iterdir()} == {row.label.key.hex() for row in disk.catalog.rows()}
        assert not list((tmp_path / "tmp").iterdir()) or call == "open"
    disk.reconcile()
    for row in disk.catalog.rows():
        number = row.label.key[0]
        assert (read(disk, row.label) == rows(number)).all()
    assert {label(0).key, label(1, 0).key} <= disk.catalog.keys()


def test_what_a_crash_leaves_is_found(tmp_path: Path) -> None:
    disk = filled(tmp_path)
    lost = disk.path(label(3, 2).key)
    lost.unlink()  # a row without an object
    shutil.copy(disk.path(label(0).key), tmp_path / "tmp" / "1-1.rows")
    disk.catalog.remove([label(2, 1).key])  # an object without a row
    (disk.objects / ("ab" * 32 + ".rows")).write_bytes(b"garbage")
    found, gone = disk.reconcile()
    assert [one.key for one in found] == [label(2, 1).key]
    assert gone == [label(3, 2).key]
    assert not list((tmp_path / "tmp").iterdir())
    assert {row.label.key for row in disk.catalog.rows()} == {label(0).key, label(1, 0).key, label(2, 1).key}
    assert (read(disk, label(2, 1)) == rows(2)).all()


def test_a_dead_process_of_the_same_number_is_not_in_the_way(tmp_path: Path) -> None:
    """In a container the server is always process 1."""
    disk = Disk(tmp_path, BIG)
    for number in range(3):
        (tmp_path / "tmp" / f"{os.getpid()}-{number}.rows").write_bytes(bytes(3 * SIZE))
    disk.write([(label(0), rows(0))])
    assert (read(disk, label(0)) == rows(0)).all()


def test_a_catalogue_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(sqlite3.NotSupportedError, match="version 99"):
        Disk(tmp_path, BIG)
    assert (tmp_path / "index.sqlite").stat().st_size


_OLD = """
DROP TABLE ghosts;
DROP TABLE intervals;
ALTER TABLE objects RENAME TO whole;
CREATE TABLE objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, parent BLOB NOT NULL, fingerprint BLOB NOT NULL,
    start INTEGER NOT NULL, tokens BLOB NOT NULL, canonical INTEGER NOT NULL, seconds REAL NOT NULL,
    allocated INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL, heat REAL NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0, uses INTEGER NOT NULL DEFAULT 1, reply INTEGER NOT NULL DEFAULT -1{kind}
);
CREATE TABLE ghosts (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, used REAL NOT NULL, heat REAL NOT NULL,
    uses INTEGER NOT NULL, reply INTEGER NOT NULL
);
CREATE TABLE learned (one INTEGER PRIMARY KEY CHECK (one = 1), counts BLOB NOT NULL);
INSERT INTO learned VALUES (1, x'00');
INSERT INTO objects SELECT
    number, key, parent, fingerprint, start, tokens, canonical, seconds, allocated, written, used, 0, pinned, uses, 7{row}
FROM whole;
DROP TABLE whole;
PRAGMA user_version = {version};
"""
_VERSIONS = {1: ("", ""), 2: (", kind TEXT NOT NULL DEFAULT 'rows'", ", kind")}
"""What the table of objects had then, behind the rest."""


@pytest.mark.parametrize("version", _VERSIONS)
def test_a_catalogue_of_an_earlier_version_is_kept(tmp_path: Path, version: int) -> None:
    """With uses and pins, which the objects do not tell; whoever opens it first alters it."""
    disk = filled(tmp_path, 3)
    disk.catalog.pin([label(1, 0).key])
    disk.catalog.use([(label(2, 1).key, 4e9)])
    before = list(disk.catalog.rows())
    disk.close()
    kind, row = _VERSIONS[version]
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.executescript(_OLD.format(kind=kind, row=row, version=version))
    db.close()
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: Disk(tmp_path, BIG), range(8)))
    for disk in opened:
        assert list(disk.catalog.rows()) == before
        disk.close()
    disk = Disk(tmp_path, BIG)
    disk.write([(state(label(2, 1)), rows(9))])
    assert [row.label.kind for row in disk.catalog.rows()] == ["rows", "rows", "rows", "state"]
    disk.catalog.replied([(label(2, 1).key, RequestTraits.of(3, new=9000, siblings=1, reply=700, called=True))])
    leaf = disk.catalog.victims((), 1)[0]
    disk.catalog.remove([leaf.label.key])
    assert len(disk) == 3


def test_two_processes_do_not_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_lock, "WAIT", 0.1)
    one, two = Disk(tmp_path, BIG), Disk(tmp_path, BIG)
    with one.writing(), pytest.raises(BlockingIOError):
        two.write([(label(0), rows(0))])
    two.write([(label(0), rows(0))])
    one.write([(label(0), rows(0)), (label(1, 0), rows(1))])
    assert len(one) == len(two) == 2


# ── clean-up in pieces ───────────────────────────────────────────────────────────────────────────────────────────────


def test_others_write_while_a_large_folder_is_tidied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the end there is a row for each object, and an object for each row; what was written meanwhile is there."""
    monkeypatch.setattr(disk_store, "PIECE", 5)
    disk = filled(tmp_path, 60)
    disk.catalog.remove([label(number, number - 1).key for number in (57, 59)])  # crashes: objects without a row
    for number in (7, 31):
        disk.path(label(number, number - 1).key).unlink()  # rows without an object
    (tmp_path / "tmp" / "1-1.rows").write_bytes(bytes(9_000))
    other, dice = Disk(tmp_path, BIG), random.Random(0)
    found, gone = list[Label](), list[bytes]()
    new = iter(range(100, 120))
    pieces = 0
    for piece in disk.tidy(whole=False):
        pieces += 1
        found += piece.found
        gone += [*piece.dropped, *piece.evicted]
        if (number := next(new, None)) is not None:
            dice.choice((disk, other)).write([(label(number), rows(number))])
        assert disk._left == disk.budget - disk.used - disk.reserved - disk._unseen
    assert pieces > 20
    assert {one.key for one in found} == {label(number, number - 1).key for number in (57, 59)}
    assert set(gone) == {label(number, number - 1).key for number in (7, 31)}
    names = {path.stem for path in disk.objects.iterdir()}
    assert {row.label.key.hex() for row in disk.catalog.rows()} == names
    assert len(names) == 58 + 20
    assert not list((tmp_path / "tmp").iterdir())
    assert disk._unseen == 0


def test_room_is_kept_for_what_is_not_seen_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash left objects without a row. Until a large folder has been looked through, they might fill the budget."""
    monkeypatch.setattr(disk_store, "UNSEEN", 8 * 16384)
    disk = filled(tmp_path, 20)
    disk.catalog.remove([label(19, 18).key])
    disk.close()
    disk = Disk(tmp_path, disk_store.RESERVE + 20 * 16384)
    disk.keep_room()
    disk.write([(label(40), rows(40)), (label(41), rows(41))])
    assert occupied(tmp_path) <= 20 * 16384
    pieces = disk.tidy(whole=False)
    next(pieces)
    disk.write([(label(50), rows(50))])
    assert occupied(tmp_path) <= 20 * 16384
    for _ in pieces:
        pass
    assert label(19, 18).key in disk
    disk.write([(label(51), rows(51)), (label(52), rows(52))])
    assert occupied(tmp_path) == disk.catalog.used() <= 20 * 16384


def test_a_catalogue_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opened slowly went on with a catalogue that another one had deleted as damaged."""
    Disk(tmp_path, 1 << 30).close()
    connect = Catalog

    def slowly(*arguments: Any, **options: Any) -> Catalog:
        catalog = connect(*arguments, **options)
        monkeypatch.undo()
        Disk(tmp_path, 1 << 30).abandon_catalog()
        Disk(tmp_path, 1 << 30).close()
        return catalog

    monkeypatch.setattr(catalog_file, "Catalog", slowly)
    disk = Disk(tmp_path, 1 << 30)
    with pytest.raises(OSError, match="replaced") as error, disk.writing():
        pass
    assert error.value.errno == errno.ESTALE
    disk.close()


def test_a_catalogue_is_created_only_when_nobody_deletes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who deletes a catalogue deletes its log last, and may hang before: it would take the log of a new catalogue."""
    monkeypatch.setattr(disk_lock, "WAIT", 0.1)
    first = filled(tmp_path)
    with first.writing():
        first.catalog.close()
        schema.drop(first.index)
        with pytest.raises(BlockingIOError):
            Disk(tmp_path, BIG)
        assert not first.index.exists()
    first._lock.close()
    with closing(Disk(tmp_path, BIG)) as disk:
        assert len(disk.reconcile()[0]) == 4


def test_a_catalogue_that_vanishes_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite created a new one, which others could read, beside the old log, and while another process held the lock."""
    filled(tmp_path).close()
    connect = Catalog

    def slowly(path: Path, *arguments: Any, **options: Any) -> Catalog:
        monkeypatch.undo()
        schema.drop(path)
        return connect(path, *arguments, **options)

    monkeypatch.setattr(catalog_file, "Catalog", slowly)
    with closing(Disk(tmp_path, BIG)) as disk:
        assert disk.index.stat().st_mode & 0o077 == 0
        assert len(disk.reconcile()[0]) == 4
        disk.write([(label(9, 3), rows(9))])


def test_a_later_version_takes_the_folder_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process took the lock that shuts it out, and the tables that it does not know for damage: the pins were lost."""
    disk = filled(tmp_path)
    disk.catalog.pin([label(1).key])
    disk.close()
    opens = CatalogFile.open

    def slowly(file: CatalogFile) -> Catalog:
        catalog = opens(file)
        later = disk_lock.Lock(tmp_path / "lock")
        with later.renewed(lambda: True), closing(sqlite3.connect(file.path, isolation_level=None)) as database:
            database.execute("ALTER TABLE totals RENAME COLUMN hand TO pointer")
            database.execute("PRAGMA user_version=999")
        later.close()
        return catalog

    monkeypatch.setattr(CatalogFile, "open", slowly)
    with pytest.raises(sqlite3.NotSupportedError, match="version 999"):
        Disk(tmp_path, BIG)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as database:
        assert database.execute("SELECT COUNT(*) FROM objects WHERE pinned").fetchone() == (1,)


def test_a_catalogue_that_another_process_has_replaced_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers find the same damage. The slower one deleted what the faster one had created, with its pins."""
    filled(tmp_path).close()
    damages = catalog_file.damages
    (tmp_path / "index.sqlite").write_bytes(b"damage" * 1000)

    def slowly(error: Exception) -> bool:
        monkeypatch.undo()
        with closing(Disk(tmp_path, BIG)) as faster:
            faster.reconcile()
            faster.catalog.pin([label(0).key])
        return damages(error)

    monkeypatch.setattr(catalog_file, "damages", slowly)
    with closing(Disk(tmp_path, BIG)) as disk:
        assert disk.catalog.pinned(label(0).fingerprint) == {label(0).key}
