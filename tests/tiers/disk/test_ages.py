"""What is too old, or deleted, is gone from the folder: objects, notes, ghosts, what was put aside, and every trace of them."""

from __future__ import annotations

import math
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.expiry import LONGEST_REQUEST, LOOKS, Terms
from headstart.tiers import write_behind
from headstart.tiers.catalog_watch import KnownKeys
from headstart.tiers.disk import Disk, Label, Note, schema
from headstart.tiers.disk import store as disk_store
from headstart.tiers.notices import (
    EverythingErased,
    Notice,
    ObjectErased,
    ObjectFound,
    ObjectGone,
    ObjectRefused,
    ObjectStored,
    OwnersErased,
)
from headstart.tiers.upkeep import Upkeep
from headstart.tiers.write_behind import WriteBehind
from live import wait_until
from older_catalogues import WITHOUT_RANKS

BIG = 1 << 40
DAY = 86_400.0
START = 1.7e9
FINGERPRINT = b"f" * 32
OWNERS = b"alice123", b"bob45678", b"carol901"


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def label(number: int, owner: bytes = OWNERS[0], written: float = 0.0) -> Label:
    """A first block, whose parent says whose it is; its tokens are found nowhere else."""
    root = owner + bytes(24)
    tokens = tuple(1_000_000 + 1000 * number + at for at in range(8))
    return Label(sha256(b"block %d" % number).digest(), root, FINGERPRINT, 0, tokens, True, 1.0, written=written)


def rows(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, 5000, np.uint8)


def traces(folder: Path, number: int) -> set[str]:
    """The files in which anything of a block is found: its id, tokens or content."""
    one = label(number)
    forms = one.key, one.key.hex().encode(), np.array(one.tokens, "<i4").tobytes(), rows(number).tobytes()[:64]
    found: set[str] = set()
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        if any(form in data or form.decode("latin-1") in path.name for form in (*forms, note(number).value)):
            found.add(path.name)
    return found


def note(number: int) -> Note:
    return Note(b"key of %04d" % number, label(number).key, b"what is noted of %04d" % number)


def expire_all(
    disk: Disk, terms: Terms, spared: Callable[[], Collection[bytes]] = frozenset
) -> tuple[list[bytes], list[bytes]]:
    """What all pieces have deleted, and evicted."""
    pieces = [*disk.expire(terms, spared)]
    return [key for gone, _ in pieces for key in gone], [key for _, gone in pieces for key in gone]


# ── terms ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    most=st.none() | st.floats(1, 1e8),
    own=st.dictionaries(st.sampled_from(OWNERS), st.floats(1, 1e8)),
    owner=st.sampled_from((*OWNERS, b"")),
    age=st.floats(0, 2e8),
)
def test_nothing_outlives_its_term_though_looks_are_rare(
    most: float | None, own: dict[bytes, float], owner: bytes, age: float
) -> None:
    """At each look goes what would be due before the next one; what goes had used up nine tenths of its term."""
    terms = Terms(math.inf if most is None else most)
    for who, seconds in own.items():
        terms.give(who, seconds, START)
    known = [math.inf if most is None else most, *([own[owner]] if owner in own else own.values() if not owner else ())]
    assert terms.of(owner) == min(known)
    due = START - age <= terms.due(owner, START)
    if age + terms.look >= min(known) < math.inf:
        assert due
    if due:
        assert age >= min(known) - 2 * min(known) / LOOKS - 1e-3


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Known:
    owner: bytes
    written: float
    how: str = "stored"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_what_is_due_leaves_no_trace(tmp_path: Path, seed: int) -> None:
    """Blocks come, are used, noted, evicted, put aside, pinned; owners get terms. Of what is due, and no other, all goes."""
    clock, dice = Clock(), random.Random(seed)
    terms = Terms(20 * DAY if seed % 2 else math.inf)
    known: dict[int, Known] = {}
    seen: set[str] = set()
    disk = Disk(tmp_path, BIG, clock=clock)
    for number in range(80):
        owner = dice.choice(OWNERS)
        known[number] = Known(owner, clock.now)
        disk.write([(label(number, owner, dice.choice((0.0, clock.now))), rows(number))])
        disk.catalog.note(FINGERPRINT, [note(number), note(1000 + number)], clock.now)  # one beside a block that never came
        other = dice.choice(list(known))
        match dice.choice(("use", "evict", "damage", "pin", "lose", "reopen", "none")):
            case "use":
                disk.catalog.use([(label(other).key, clock.now)])
            case "evict":
                disk.remove([label(other).key])
                known[other].how = "evicted"
            case "damage" if label(other).key in disk:
                data = bytearray(disk.path(label(other).key).read_bytes())
                data[-1] ^= 1
                disk.path(label(other).key).write_bytes(data)
                os.utime(disk.path(label(other).key), (known[other].written,) * 2)
                assert disk.quarantine(label(other).key) is None
                known[other].how = "aside"
            case "pin":
                disk.catalog.pin([label(other).key])
            case "lose" if label(other).key in disk:  # a crash came before its row
                disk.catalog.remove([label(other).key])
                disk.reconcile()
            case "reopen":
                disk.close()
                disk = Disk(tmp_path, BIG, clock=clock)
        clock.now += dice.random() * DAY
        if dice.random() < 0.1:
            terms.give(dice.choice(OWNERS), dice.choice((None, 3 * DAY, 9 * DAY)), START)
        if dice.random() < 0.3:
            gone = set(expire_all(disk, terms)[0])
            for one, its in list(known.items()):
                due = its.written <= terms.due(its.owner, clock.now)
                if due:
                    seen.add(its.how)
                    assert not traces(tmp_path, one), f"{one}, {its}"
                    del known[one]
                if its.written <= terms.due(b"", clock.now):
                    assert not traces(tmp_path, 1000 + one)
                assert (label(one).key in gone) == (due and its.how == "stored")
            stored = {one for one, its in known.items() if its.how == "stored"}
            assert {row.label.key for row in disk.catalog.rows()} == {label(one).key for one in stored}
            assert all(traces(tmp_path, one) for one in stored)
    assert seen == {"stored", "evicted", "aside"} or (seed > 1 and seen >= {"stored", "evicted"})
    clock.now += 99 * DAY
    terms.cap(DAY)
    expire_all(disk, terms)
    assert not any(traces(tmp_path, one) for one in range(80))
    disk.close()


def test_anybody_can_see_how_old_an_object_is(tmp_path: Path) -> None:
    """By the time of its file, which is that of its text; it is kept where derived gives way to canonical."""
    clock = Clock()
    with closing(Disk(tmp_path, BIG, clock=clock)) as disk:
        disk.write([(replace(label(1), canonical=False), rows(1)), (label(2, written=START - 500), rows(2))])
        clock.now += 1000
        disk.write([(label(1), rows(1))])
        assert [disk.path(label(number).key).stat().st_mtime for number in (1, 2)] == [START, START - 500]
        assert {row.label.key: row.label.written for row in disk.catalog.rows()} == {
            label(1).key: START,
            label(2).key: START - 500,
        }
        disk.catalog.remove([label(1).key, label(2).key])
        disk.reconcile()
        found = {row.label.key: (row.label.written, row.label.owner) for row in disk.catalog.rows()}
        assert found == {label(1).key: (START, OWNERS[0]), label(2).key: (START - 500, OWNERS[0])}


def test_an_object_of_a_later_version_goes_by_the_time_of_its_file(tmp_path: Path) -> None:
    clock = Clock()
    with closing(Disk(tmp_path, BIG, clock=clock)) as disk:
        disk.write([(label(1), rows(1)), (label(2), rows(2))])
        for number in (1, 2):
            data = bytearray(disk.path(label(number).key).read_bytes())
            data[8] = 99
            disk.path(label(number).key).write_bytes(data)
            os.utime(disk.path(label(number).key), (START + 2 * number * DAY,) * 2)
        disk.catalog.remove([label(1).key, label(2).key])
        disk.reconcile()
        clock.now = START + 9 * DAY
        expire_all(disk, Terms(7 * DAY))
        assert [disk.path(label(number).key).exists() for number in (1, 2)] == [False, True]


def test_what_was_stored_in_the_place_of_a_later_version_is_no_longer_of_one(tmp_path: Path) -> None:
    """A server deleted the file of its own pinned block, and kept the row: others found no object behind it."""
    terms, clock = Terms(), Clock()
    terms.give(OWNERS[1], DAY, START)
    one = label(1, written=START - 2 * DAY)
    with closing(Disk(tmp_path, BIG, clock=clock)) as disk:
        disk.write([(one, rows(1))])
        data = bytearray(disk.path(one.key).read_bytes())
        data[8] = 99
        disk.path(one.key).write_bytes(data)
        disk.catalog.remove([one.key])
        disk.reconcile()
        assert one.key not in disk
        disk.write([(one, rows(1))])
        assert disk.pin([one.key]) == {one.key}
        assert expire_all(disk, terms) == ([], [])
        assert disk.path(one.key).exists()


def test_without_a_term_nothing_goes(tmp_path: Path) -> None:
    clock = Clock()
    with closing(Disk(tmp_path, BIG, clock=clock)) as disk:
        disk.write([(label(1), rows(1))])
        clock.now += 1e9
        assert expire_all(disk, Terms()) == ([], [])
        assert label(1).key in disk


_VERSION_3 = f"""
{WITHOUT_RANKS}DROP INDEX by_owner;
DROP INDEX by_age;
ALTER TABLE ghosts RENAME TO gone;
ALTER TABLE intervals RENAME TO spells;
ALTER TABLE objects RENAME COLUMN bucket TO sort;
ALTER TABLE gone RENAME COLUMN bucket TO sort;
ALTER TABLE objects ADD COLUMN heat REAL NOT NULL DEFAULT 0;
ALTER TABLE gone ADD COLUMN heat REAL NOT NULL DEFAULT 0;
ALTER TABLE objects DROP COLUMN written;
ALTER TABLE objects DROP COLUMN owner;
ALTER TABLE gone DROP COLUMN written;
ALTER TABLE gone DROP COLUMN owner;
ALTER TABLE notes DROP COLUMN written;
DROP TABLE erased;
DROP TABLE terms;
ALTER TABLE objects ADD COLUMN created REAL NOT NULL DEFAULT 0;
UPDATE objects SET created = 1600000000 + number;
PRAGMA user_version = 3;
"""


def test_a_folder_of_version_3_learns_ages_and_owners(tmp_path: Path) -> None:
    """An object is as old as it was in the catalogue then; what older versions deleted without a trace leaves none now."""
    clock = Clock()
    disk = Disk(tmp_path, BIG, clock=clock)
    child = replace(label(3), parent=label(1).key, start=8)
    orphan = replace(label(4), parent=bytes(32), start=8)
    disk.write([(label(1), rows(1)), (label(2, OWNERS[1]), rows(2)), (child, rows(3)), (orphan, rows(4)), (label(5), rows(5))])
    disk.close()
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as database:
        database.execute("PRAGMA secure_delete=OFF")
        database.executescript(_VERSION_3)
        database.execute("DELETE FROM objects WHERE key = ?", (label(5).key,))
        database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (tmp_path / "objects" / f"{label(5).key.hex()}.rows").unlink()
    assert traces(tmp_path, 5)
    with closing(Disk(tmp_path, BIG, clock=clock)) as disk:
        assert not traces(tmp_path, 5)
        found = {row.label.key: (row.label.written, row.label.owner) for row in disk.catalog.rows()}
        assert found == {
            label(1).key: (1600000001, OWNERS[0]),
            label(2).key: (1600000002, OWNERS[1]),
            label(3).key: (1600000003, OWNERS[0]),
            label(4).key: (1600000004, b""),
        }
        terms = Terms()
        terms.give(OWNERS[1], DAY, START)
        assert set(expire_all(disk, terms)[0]) == {label(2).key, label(4).key}, "and what may be anybody's"


def test_what_was_broken_off_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends right after the rows have gone, and before their traces have: nothing is due when the next one looks."""
    clock, folder = Clock(), tmp_path / "cache"
    scrub, left = schema.scrub, list[Path]()

    def killed(database: sqlite3.Connection) -> None:
        left.append(tmp_path / f"left {len(left)}")
        shutil.copytree(folder, left[-1])
        scrub(database)

    with closing(Disk(folder, BIG, clock=clock)) as disk:
        for number in range(40):
            disk.write([(label(number, written=START + number // 20 * DAY), rows(number))])
            disk.catalog.note(FINGERPRINT, [note(number)], START + number // 20 * DAY)
        clock.now += 7 * DAY
        monkeypatch.setattr(schema, "scrub", killed)
        expire_all(disk, Terms(7 * DAY))
        disk.erase([label(30).key])
        monkeypatch.undo()
        assert disk.catalog.ages.clean
        assert len(left) == 2
    expired, erased = left
    assert any(traces(expired, number) for number in range(20))
    assert traces(erased, 30)
    with closing(Disk(expired, BIG, clock=clock)) as disk:
        assert expire_all(disk, Terms(7 * DAY)) == ([], []), "nothing is due"
        assert not any(traces(expired, number) for number in range(20))
        assert traces(expired, 20)
    with closing(Disk(erased, BIG, clock=clock)) as disk:
        disk.reconcile()
        assert not traces(erased, 30)
        assert traces(erased, 31)


def test_who_reads_for_long_only_puts_it_off(tmp_path: Path) -> None:
    clock = Clock()
    with closing(Disk(tmp_path, BIG, clock=clock)) as disk, closing(sqlite3.connect(tmp_path / "index.sqlite")) as reader:
        disk.write([(label(1), rows(1)), (label(2, written=START + DAY), rows(2)), (label(3, written=START + DAY), rows(3))])
        disk.catalog._db.execute("PRAGMA busy_timeout=20")
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM objects").fetchone() == (3,)
        clock.now += 7 * DAY
        assert expire_all(disk, Terms(7 * DAY))[0] == [label(1).key]
        with pytest.raises(BlockingIOError, match="run `headstart cache gc` to finish"):
            disk.erase([label(2).key])
        assert traces(tmp_path, 1) | traces(tmp_path, 2) <= {"index.sqlite", "index.sqlite-wal"}
        assert traces(tmp_path, 1)
        assert not disk.catalog.ages.clean
        reader.execute("COMMIT")
        expire_all(disk, Terms(7 * DAY))
        assert disk.catalog.ages.clean
        assert not traces(tmp_path, 1) | traces(tmp_path, 2)
        assert traces(tmp_path, 3)


@settings(max_examples=20)
@given(seconds=st.sampled_from([60.0, 3600.0, DAY, 30 * DAY]), seed=st.integers(0, 99))
def test_terms_are_forgotten_when_nothing_can_be_left(seconds: float, seed: int) -> None:
    """Users of a key with a term come and go. What each writes goes in time, also what a long request writes at its end."""
    dice, terms, now = random.Random(seed), Terms(), START
    written: list[tuple[bytes, float]] = []
    requests: list[tuple[bytes, float]] = []
    users = 0
    while users < 200:
        now += dice.random() * seconds / 4
        users += dice.random() < 0.5
        owner = (users - min(users, int(dice.expovariate(2)))).to_bytes(8, "big")
        terms.give(owner, seconds, now)
        requests.append((owner, now))
        written.append((owner, now))
        for request in [one for one in requests if dice.random() < 0.3 or one[1] + LONGEST_REQUEST < now + seconds]:
            requests.remove(request)
            if now <= request[1] + LONGEST_REQUEST:
                written.append((request[0], now))
        written = [(who, when) for who, when in written if when > terms.due(who, now)]
        terms.forget(now)
        assert {who for who, _ in written} <= terms.owners.keys()
    terms.forget(now + 3 * seconds + LONGEST_REQUEST)
    assert not terms.owners
    assert terms.shortest == math.inf
    assert not terms.news()


def test_an_owner_who_comes_again_keeps_the_term() -> None:
    terms = Terms()
    for day in range(40):
        terms.give(OWNERS[0], 7 * DAY, START + day * DAY)
        terms.give(OWNERS[1], 7 * DAY, START)
        terms.forget(START + day * DAY)
        assert (OWNERS[1] in terms.owners) == (day < 15), "two terms, and a day for its last request"
        if day >= 14:
            terms.give(OWNERS[1], None, START)
        assert terms.of(OWNERS[0]) == 7 * DAY


def test_the_folder_forgets_terms_of_owners_of_whom_it_has_nothing(tmp_path: Path) -> None:
    """Not while an object or its ghost is there, and not while any server is asked by the owner."""
    clock, gone = Clock(), START + 3 * DAY + 1
    with closing(Disk(tmp_path, BIG, clock=clock)) as disk:
        ages = disk.catalog.ages
        disk.write([(label(0, OWNERS[0], START), rows(0)), (label(1, OWNERS[1], START), rows(1))])
        disk.remove([label(1).key])
        ages.keep(dict.fromkeys((*OWNERS, b"dora5678"), DAY), START)
        ages.keep({b"dora5678": DAY}, START + DAY)
        ages.forget_terms(gone - 2)
        assert len(ages.terms()) == 4
        ages.forget_terms(gone)
        assert ages.terms().keys() == {OWNERS[0], OWNERS[1], b"dora5678"}
        ages.forget_terms(gone + DAY)
        assert ages.terms().keys() == {OWNERS[0], OWNERS[1]}
        terms, clock.now = Terms(), gone
        terms.learn(ages.terms())
        expire_all(disk, terms)
        assert ages.terms() == {}
        assert not traces(tmp_path, 0)


def test_terms_of_an_older_release_are_kept_for_a_while(tmp_path: Path) -> None:
    """It did not note when their owners came."""
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.catalog.ages.keep({OWNERS[0]: DAY}, START)
        disk.catalog._db.execute("DELETE FROM given")
        disk.catalog.ages.forget_terms(START + 9 * DAY)
        assert disk.catalog.ages.terms() == {OWNERS[0]: DAY}
        disk.catalog.ages.forget_terms(START + 13 * DAY)
        assert disk.catalog.ages.terms() == {}


def test_a_server_forgets_terms_that_its_folder_forgets(tmp_path: Path) -> None:
    clock, terms = Clock(), Terms()
    tier = WriteBehind(lambda: Disk(tmp_path, BIG, clock=clock), FINGERPRINT, BIG, terms, clock)
    terms.give(OWNERS[0], DAY, START)
    terms.give(OWNERS[1], DAY, START)
    with closing(Disk(tmp_path, BIG)) as disk:
        wait_until(lambda: len(disk.catalog.ages.terms()) == 2)
    terms.forget(START + 99 * DAY)
    assert len(terms.owners) == 2, "the folder may have something of them"
    clock.now = START + 2 * DAY
    terms.give(OWNERS[0], DAY, clock.now)
    wait_until(lambda: not terms.news())
    clock.now = START + 4 * DAY
    wait_until(lambda: terms.owners == {OWNERS[0]: DAY})
    assert tier.close(30)


def test_a_look_costs_no_more_where_very_many_have_terms(tmp_path: Path) -> None:
    """Under `--isolate user` each user of a key has one."""
    terms, said = Terms(), list[str]()
    for number in range(2000):
        terms.give(number.to_bytes(8, "big"), 7 * DAY, START)
    with closing(Disk(tmp_path, BIG, clock=Clock())) as disk:
        disk.write([(label(number), rows(number)) for number in range(4)])
        disk.catalog.ages.keep(terms.owners, START)
        disk.catalog._db.set_trace_callback(said.append)
        expire_all(disk, terms)
        assert len(said) < 40


def test_what_gives_way_to_the_second_catalogue_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment there are two. What goes for that was evicted, not erased, and a request's is spared."""
    monkeypatch.setattr(disk_store, "RESERVE", 0)
    clock = Clock()
    with closing(Disk(tmp_path, BIG, clock=clock)) as disk:
        disk.write([(label(number, written=START + number * DAY), rows(number)) for number in range(40)])
        disk._given = disk.used
        disk.measure()
        clock.now += 7 * DAY
        erased, evicted = expire_all(disk, Terms(7 * DAY), lambda: [label(5).key])
        assert erased == [label(0).key]
        assert evicted
        assert label(5).key in disk
        assert disk.catalog.ghosts(evicted) == {*evicted}
        assert not disk.catalog.keys() & {*erased, *evicted}


# ── deleted by somebody's wish ───────────────────────────────────────────────────────────────────────────────────────


def test_erased_is_not_evicted(tmp_path: Path) -> None:
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(number), rows(number)) for number in range(4)])
        disk.catalog.note(FINGERPRINT, [note(number) for number in range(4)])
        disk.remove([label(0).key])
        disk.erase([label(1).key])
        assert disk.catalog.ghosts([label(number).key for number in range(4)]) == {label(0).key}
        assert not traces(tmp_path, 1)
        assert traces(tmp_path, 0)
        disk.erase([label(0).key])
        assert not traces(tmp_path, 0), "also what has gone before"
        data = disk.path(label(2).key).read_bytes()
        disk.path(label(2).key).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert disk.quarantine(label(2).key) is None
        disk.erase([label(0).key])
        assert traces(tmp_path, 2) == {"index.sqlite"}, "a ghost, not what was put aside: that may have been of this chain"
        disk.erase([label(2).key])
        assert not traces(tmp_path, 2)
        assert traces(tmp_path, 3)
        before = disk.catalog.ages.wiped()
        disk.catalog.note(FINGERPRINT, [note(4)], since=before)
        disk.erase([], START)
        disk.catalog.note(FINGERPRINT, [note(5)], since=before)
        before = disk.catalog.ages.wiped()
        disk.catalog.note(FINGERPRINT, [note(6)], since=before)
        disk.erase([label(9).key])
        disk.catalog.note(FINGERPRINT, [note(7)], since=before)
        found = [bool(traces(tmp_path, number)) for number in (4, 5, 6, 7)]
        assert found == [True, False, True, False], "it came before, and late"


def test_what_comes_while_somebody_deletes_everything_goes_too(tmp_path: Path) -> None:
    """It was written before, and came to disk after it had been listed. What is spared is asked for at the last moment."""
    with closing(Disk(tmp_path, BIG)) as disk, closing(Disk(tmp_path, BIG)) as server:
        disk.write([(label(number, written=START + number), rows(number)) for number in range(3)])
        listed = disk.catalog.keys()
        server.write([(label(number, written=START + number), rows(number)) for number in range(3, 9)])

        def spared() -> set[bytes]:
            assert len(disk) == 9
            return {label(1).key, label(4).key}

        gone = disk.erase(listed, START + 6, spared)
        assert {row.label.key for row in gone} == {label(number).key for number in (0, 2, 3, 5, 6)}
        assert server.catalog.keys() == {label(number).key for number in (1, 4, 7, 8)}
        assert not any(traces(tmp_path, number) for number in (0, 2, 3, 5, 6))


def test_a_chain_takes_nothing_along_that_has_no_time(tmp_path: Path) -> None:
    """Notes and ghosts of version 3 of the catalogue did not say when they were written."""
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.write([(label(number), rows(number)) for number in range(3)])
        disk.remove([label(2).key])
        disk.catalog.note(FINGERPRINT, [note(1)], 0.0)
        disk.catalog._db.execute("UPDATE ghosts SET written = 0")
        disk.erase([label(0).key])
        assert [found for _, found in disk.catalog.notes(FINGERPRINT)] == [note(1)]
        assert disk.catalog.ghosts([label(2).key])
        disk.erase([], START)
        assert not disk.catalog.ghosts([label(2).key])
        assert not traces(tmp_path, 1) - {f"{label(1).key.hex()}.rows", "index.sqlite"}
        assert not list(disk.catalog.notes(FINGERPRINT))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[WriteBehind]:
    """What a server has of the folder, which another process deletes from."""
    tier = WriteBehind(lambda: Disk(tmp_path, BIG), FINGERPRINT, BIG)
    yield tier
    assert tier.close(30)


def collected(tier: WriteBehind, until: type, count: int = 1) -> list[Notice]:
    found: list[Notice] = []

    def enough() -> bool:
        found.extend(tier.notices())
        return sum(isinstance(one, until) for one in found) >= count

    wait_until(enough, 30)
    return found


def test_a_running_server_is_told_what_was_erased(tmp_path: Path, running: WriteBehind) -> None:
    for number in range(3):
        assert running.offer(label(number, written=START + number), rows(number))
    collected(running, ObjectStored, 3)
    with closing(Disk(tmp_path, BIG)) as other:
        other.remove([label(0).key])
        told = collected(running, ObjectGone)  # its own have appeared to it as well, sooner or later
        assert [one for one in told if not isinstance(one, ObjectFound)] == [ObjectGone(label(0).key)]
        other.erase([label(1).key])
        told = collected(running, OwnersErased)
        assert told == [ObjectErased(label(1).key), OwnersErased(other.catalog.ages.last_tombstone(), frozenset(OWNERS[:1]))]
        other.erase([label(2).key], START + 5)
        assert collected(running, EverythingErased) == [ObjectErased(label(2).key), EverythingErased(START + 5)]


def test_wishes_that_come_together_are_all_told(tmp_path: Path, running: WriteBehind) -> None:
    for number in range(3):
        assert running.offer(label(number, written=START + number), rows(number))
    collected(running, ObjectStored, 3)
    with closing(Disk(tmp_path, BIG)) as other, other.writing():
        with schema.change(other.catalog._db):  # it looks before or after
            pass
        other.catalog._db.execute("BEGIN IMMEDIATE")
        other.catalog._db.execute("DELETE FROM objects WHERE key IN (?, ?)", (label(0).key, label(2).key))
        other.catalog._db.execute("INSERT OR REPLACE INTO erased (id, before, times) VALUES (1, ?, 2)", (START,))
        other.catalog._db.execute("INSERT INTO tombstones (owner, written) VALUES (?, 0.0)", (OWNERS[0],))
        other.catalog._db.execute("UPDATE totals SET erased = erased + 1")
        other.catalog._db.execute("COMMIT")
    found = collected(running, OwnersErased)
    assert {one.key for one in found if isinstance(one, ObjectErased)} == {label(0).key, label(2).key}
    assert EverythingErased(START) in found


def test_a_clock_that_is_set_back_does_not_end_the_writing(tmp_path: Path) -> None:
    """Somebody deletes everything while it is wrong: what comes later is kept, and deleted by the next wish."""
    clock = Clock()
    clock.now += 1000 * DAY
    terms = Terms()
    tier = WriteBehind(lambda: Disk(tmp_path, BIG, clock=clock), FINGERPRINT, BIG, terms, clock)
    with closing(Disk(tmp_path, BIG, clock=clock)) as other:
        other.erase([], clock.now)
        collected(tier, EverythingErased)
        terms.obeyed, clock.now = clock.now, START
        terms.before = START - 1  # as the engine does
        assert tier.offer(label(1, written=START), rows(1))
        collected(tier, ObjectStored)

        def noted() -> bool:
            tier.note(note(1))  # again: the first one may come while the thread drops those from before the deletion
            return bool([*other.catalog.notes(FINGERPRINT)])

        wait_until(noted)
        (written,) = other.catalog._db.execute("SELECT written FROM notes").fetchone()
        assert written == START, "by the same clock"
        clock.now += DAY
        other.erase([], START + 5)
        found = [one for one in collected(tier, EverythingErased) if isinstance(one, ObjectErased | EverythingErased)]
        assert found == [ObjectErased(label(1).key), EverythingErased(START + 5)]
        assert not traces(tmp_path, 1)
    assert tier.close(30)


def test_what_is_on_its_way_to_the_disk_is_erased_too(tmp_path: Path, running: WriteBehind) -> None:
    """It was offered before somebody deleted it, and would be written after that."""
    with closing(Disk(tmp_path, BIG)) as other:
        with other.writing():  # nobody else writes meanwhile
            for number in range(2):
                assert running.offer(label(number, written=START + 10 * number), rows(number))
            running.note(note(0))
            other.catalog.ages.wipe([], START + 5, time.time())
        found = collected(running, ObjectStored)
        assert [one.label.key for one in found if isinstance(one, ObjectRefused)] == [label(0).key]
        assert [one.label.key for one in found if isinstance(one, ObjectStored)] == [label(1).key]
        assert not traces(tmp_path, 0)
        other.erase([], START + 50)
        derived = replace(label(3, written=START + 60), canonical=False)
        assert running.offer(derived, rows(3))
        collected(running, ObjectStored)
        running.notices()
        with other.writing():
            assert running.offer(replace(derived, canonical=True), rows(3))  # in its place
            other.catalog.ages.wipe([derived.key], -math.inf, time.time(), OWNERS[:1])
            other.path(derived.key).unlink()
            other.catalog.ages.scrub()
        collected(running, ObjectRefused)
        assert not traces(tmp_path, 3)


def test_what_is_being_written_is_erased_too(tmp_path: Path, running: WriteBehind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its round of writing has begun when the owner's wish comes. When that is answered, nothing is there, nor comes later."""
    expire, begun, asked = Upkeep.expire, threading.Event(), threading.Event()

    def late(tier: Upkeep, disk: Disk, **options: bool) -> None:
        expire(tier, disk, **options)
        if running._queue.waiting and not begun.is_set():
            begun.set()
            assert asked.wait(30)

    monkeypatch.setattr(Upkeep, "expire", late)
    assert running.offer(label(0, written=START), rows(0))
    assert begun.wait(30)
    done = running.erase([label(0).key], b"alice123")
    asked.set()
    assert done.result(30) == 0
    assert next(one for one in collected(running, ObjectRefused) if isinstance(one, ObjectRefused)).reason == "erased"
    assert running.offer(label(1, written=START), rows(1))
    collected(running, ObjectStored)
    assert not traces(tmp_path, 0)


def test_what_has_expired_on_its_way_is_not_written(tmp_path: Path) -> None:
    clock, terms = Clock(), Terms(7 * DAY)
    tier = WriteBehind(lambda: Disk(tmp_path, BIG, clock=clock), FINGERPRINT, BIG, terms, clock)
    for number, age in enumerate((7, 1)):
        assert tier.offer(replace(label(number, OWNERS[0], START - age * DAY), owner=OWNERS[0]), rows(number))
    with closing(Disk(tmp_path, BIG, clock=clock)) as disk:
        found = collected(tier, ObjectStored)
        assert [one.label.key for one in found if isinstance(one, ObjectRefused)] == [label(0).key]
        assert disk.catalog.keys() == {label(1).key}
    assert tier.close(30)


def test_what_this_process_erases_it_need_not_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what another one erases makes it compare all that it knows."""
    clock, compared = Clock(), list[object]()
    ranges = KnownKeys.within
    monkeypatch.setattr(KnownKeys, "within", lambda known, keys: compared.append(0) or ranges(known, keys))
    tier = WriteBehind(lambda: Disk(tmp_path, BIG, clock=clock), FINGERPRINT, BIG, Terms(7 * DAY), clock)
    for number in range(4):
        assert tier.offer(label(number, OWNERS[0], START - number * DAY), rows(number))
    collected(tier, ObjectStored, 4)
    assert tier.erase([label(0).key], b"alice123").result(30)
    clock.now += 5 * DAY
    assert {one.key for one in collected(tier, ObjectErased, 3) if isinstance(one, ObjectErased)} == {
        label(number).key for number in (0, 2, 3)
    }
    assert not compared
    assert tier.close(30)


def test_terms_outlive_the_server(tmp_path: Path) -> None:
    """Until their owners' are said anew: nobody else knows whose term is which."""
    clock = Clock()

    def opened(terms: Terms) -> WriteBehind:
        return WriteBehind(lambda: Disk(tmp_path, BIG, clock=clock), FINGERPRINT, BIG, terms, clock)

    terms = Terms()
    terms.give(OWNERS[1], 7 * DAY, START)
    tier = opened(terms)
    for number, owner in enumerate(OWNERS):
        assert tier.offer(label(number, owner, START), rows(number))
    collected(tier, ObjectStored, 3)
    assert tier.close(30)
    clock.now += 8 * DAY
    again = Terms()
    tier = opened(again)
    assert again.owners == {OWNERS[1]: 7 * DAY}
    assert {one.label.key for one in collected(tier, object) if hasattr(one, "label")} == {label(0).key, label(2).key}
    assert tier.counters["erased"] == 1
    assert not traces(tmp_path, 1)
    again.give(OWNERS[1], None, START)
    assert tier.offer(label(5, OWNERS[1], START), rows(5))
    collected(tier, ObjectStored)
    assert tier.close(30)
    with closing(Disk(tmp_path, BIG)) as disk:
        assert disk.catalog.ages.terms() == {}


def test_servers_learn_each_others_terms(tmp_path: Path) -> None:
    """Whoever was there first; and nobody forgets what another one has said."""
    terms = Terms(), Terms()
    tiers = [WriteBehind(lambda: Disk(tmp_path, BIG), FINGERPRINT, BIG, one) for one in terms]
    terms[0].give(OWNERS[0], 7 * DAY, START)
    wait_until(lambda: terms[1].owners == {OWNERS[0]: 7 * DAY})
    terms[1].give(OWNERS[1], DAY, START)
    wait_until(lambda: terms[0].owners == {OWNERS[0]: 7 * DAY, OWNERS[1]: DAY})
    terms[1].give(OWNERS[0], None, START)
    wait_until(lambda: terms[0].owners == {OWNERS[1]: DAY})
    assert all(tier.close(30) for tier in tiers)
    with closing(Disk(tmp_path, BIG)) as disk:
        assert disk.catalog.ages.terms() == {OWNERS[1]: DAY}


def test_terms_outlive_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is damaged and made anew: the server still knows them."""
    work, lost = WriteBehind._work, threading.Event()

    def lose_once(tier: WriteBehind, *batch: Any) -> None:
        """As after any fault. On the thread that works with the disk, which would otherwise open it meanwhile."""
        if not lost.is_set():
            assert tier._disk is not None
            tier._disk.abandon_catalog()
            tier._disk = None
            lost.set()
        work(tier, *batch)

    terms = Terms()
    tier = WriteBehind(lambda: Disk(tmp_path, BIG), FINGERPRINT, BIG, terms)
    terms.give(OWNERS[0], 7 * DAY, START)
    terms.give(OWNERS[1], DAY, START)
    with closing(Disk(tmp_path, BIG)) as disk:
        wait_until(lambda: len(disk.catalog.ages.terms()) == 2)
    monkeypatch.setattr(WriteBehind, "_work", lose_once)
    assert lost.wait(30)
    *_, last = collected(tier, OwnersErased)  # nobody knows what the lost one would have said
    assert isinstance(last, OwnersErased)
    tier.obey(last.number)
    assert tier.offer(label(1), rows(1))
    collected(tier, ObjectStored)
    assert terms.owners == {OWNERS[0]: 7 * DAY, OWNERS[1]: DAY}
    assert tier.close(30)
    with closing(Disk(tmp_path, BIG)) as disk:
        assert disk.catalog.ages.terms() == terms.owners


def test_what_a_crash_of_another_process_left_does_not_outlive_its_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "POLL", 0.02)
    clock = Clock()
    tier = WriteBehind(lambda: Disk(tmp_path, BIG, clock=clock), FINGERPRINT, BIG, Terms(1.0), clock)
    wait_until(lambda: tier._upkeep.tidied > -math.inf)
    with closing(Disk(tmp_path, BIG, clock=clock)) as other:
        other.write([(label(1), rows(1))])
        with other.writing():
            other.catalog.remove([label(1).key])
        clock.now += 1
        wait_until(lambda: not other.path(label(1).key).exists())
    assert tier.close(30)


def test_a_budget_still_counts_by_owner_where_a_beginning_has_gone(tmp_path: Path) -> None:
    """The end of a chain is its owner's, also when what says so is too old to be kept."""
    with closing(Disk(tmp_path, disk_store.RESERVE + 10 * 8192 * 2, portion=0.3)) as disk:
        disk.write([(label(1), rows(1))])
        disk.write([(replace(label(2), parent=label(1).key, start=8), rows(2))])
        disk.erase([label(1).key])
        assert [row.label.owner for row in disk.catalog.rows()] == [OWNERS[0]]
        disk.write([(replace(label(3), parent=label(2).key, start=16), rows(3))])
        assert {row.label.owner for row in disk.catalog.rows()} == {OWNERS[0]}


def test_a_deletion_that_cannot_delete_a_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner must not believe that it is gone. The row stays, so the owner can try again."""
    with closing(Disk(tmp_path, 1 << 40)) as disk:
        disk.write([(label(number), rows(number)) for number in range(2)])
        unlink = Path.unlink

        def refused(path: Path, missing_ok: bool = False) -> None:
            if path.name.startswith(label(1).key.hex()):
                raise PermissionError(13, "not permitted", str(path))
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", refused)
        with pytest.raises(OSError, match="1 file cannot be deleted"):
            disk.erase([label(0).key, label(1).key])
        assert disk.catalog.keys() == {label(1).key}
        monkeypatch.undo()
        disk.erase([label(1).key])
        assert not disk.catalog.keys()
