"""What other processes change in the catalogue is found piece by piece, and none of it is missed."""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from effort import SLOW
from headstart.tiers import catalog_watch
from headstart.tiers.catalog_watch import LARGE, CatalogWatch, KnownKeys
from headstart.tiers.disk import ages, schema
from headstart.tiers.disk import catalog as disk_catalog
from headstart.tiers.disk.catalog import Catalog, Note
from headstart.tiers.disk.format import Label
from headstart.tiers.notices import (
    EverythingErased,
    NoteFound,
    Notice,
    ObjectErased,
    ObjectFound,
    ObjectGone,
    OwnersErased,
    PinsFound,
)

FINGERPRINT = b"f" * 32
SIZE = 4096


def label(number: int, fingerprint: bytes = FINGERPRINT) -> Label:
    return Label(sha256(b"%d" % number).digest(), bytes(32), fingerprint, 0, (number,) * 8, True, 1.0, owner=b"alice123")


@pytest.fixture
def catalogs(tmp_path: Path) -> Iterator[tuple[Catalog, Catalog]]:
    one, two = (Catalog(tmp_path / "index.sqlite") for _ in range(2))
    with closing(one), closing(two):
        yield one, two


def look(watch: CatalogWatch, catalog: Catalog) -> list[Notice]:
    """Looks until there is nothing more."""
    found = watch.look(catalog)
    while watch.more:
        found += watch.look(catalog)
    return found


def test_known_keys_are_a_set() -> None:
    dice = random.Random(0)
    known, expected = KnownKeys(), set[bytes]()
    for _ in range(300):
        keys = {dice.randbytes(32) for _ in range(3)} | {bytes([dice.choice((0, 255))]) * 32}
        known.add(keys)
        expected |= keys
        gone = set(dice.sample(sorted(expected), 2))
        known.remove(gone)
        expected -= gone
    assert {*known} == expected
    assert all(key in known for key in expected)
    assert not any(dice.randbytes(32) in known for _ in range(100))
    ranges = known.ranges()
    assert len(ranges) > 1
    keys = [known.within(each) for each in ranges]
    assert max(map(len, keys)) < LARGE
    assert {key for each in keys for key in each} == expected
    more = {dice.randbytes(32) for _ in range(1000)}
    known.add(more)
    assert sorted(key for each in ranges for key in known.within(each)) == sorted(expected | more), "whatever is divided since"
    known.remove(expected)
    assert sorted(key for each in ranges for key in known.within(each)) == sorted(more)
    known.remove(more)
    assert not [*known]
    known.add(expected)
    assert [*known] == sorted(expected)


def test_a_large_catalogue_is_read_in_pieces(catalogs: tuple[Catalog, Catalog]) -> None:
    """A look reads a bounded number of rows; while there is no room it reads none, and pins come after what they pin."""
    ours, _ = catalogs
    count = 3 * catalog_watch.PIECE + 7
    ours.add([(label(number), SIZE) for number in range(count)])
    ours.add([(label(number, b"g" * 32), SIZE) for number in range(count, count + 9)])
    ours.pin([label(3).key])
    ours.note(FINGERPRINT, [Note(b"%d" % number, label(1).key, b"v") for number in range(10)])
    watch = CatalogWatch(FINGERPRINT)
    found = list[Notice]()
    assert not any(isinstance(one, ObjectFound) for one in watch.look(ours, reports=False))
    assert watch.more
    while watch.more:
        piece = watch.look(ours)
        assert len(piece) <= catalog_watch.PIECE + 20
        assert watch.complete == any(isinstance(one, PinsFound) for one in piece)
        found += piece
    assert {one.label.key for one in found if isinstance(one, ObjectFound)} == {label(number).key for number in range(count)}
    assert found[-1] == PinsFound(frozenset([label(3).key]))
    assert watch.look(ours) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ghosts", [1 << 15, 5])
def test_nothing_that_others_do_is_missed(
    catalogs: tuple[Catalog, Catalog], monkeypatch: pytest.MonkeyPatch, seed: int, ghosts: int
) -> None:
    """Objects come, are evicted, erased and come back, between looks that read little, also if the log of ghosts is overrun."""
    monkeypatch.setattr(catalog_watch, "PIECE", 20)
    monkeypatch.setattr(disk_catalog, "GHOSTS", ghosts)
    ours, theirs = catalogs
    dice, watch, there = random.Random(seed), CatalogWatch(FINGERPRINT), set[bytes]()

    def note(found: list[Notice]) -> None:
        for notice in found:
            if isinstance(notice, ObjectFound):
                there.add(notice.label.key)
            elif isinstance(notice, ObjectGone | ObjectErased):
                there.discard(notice.key)

    for _ in range(200):
        catalog = dice.choice(catalogs)
        some = [label(dice.randrange(200)) for _ in range(dice.randrange(1, 30))]
        match dice.choice(("add", "add", "remove", "erase", "look", "look")):
            case "add":
                catalog.add([(one, SIZE) for one in some])
            case "remove":
                catalog.remove([one.key for one in some])
            case "erase":
                catalog.ages.erase([one.key for one in some])
            case "look":
                note(watch.look(ours))
        if dice.random() < 0.1:
            note(look(watch, ours))
            assert there == {*watch.known} == theirs.keys()


def test_evicted_and_erased_are_told_apart(catalogs: tuple[Catalog, Catalog]) -> None:
    ours, theirs = catalogs
    ours.add([(label(number), SIZE) for number in range(4)], 1.0)
    watch = CatalogWatch(FINGERPRINT)
    look(watch, ours)
    theirs.remove([label(0).key], 2.0)
    assert look(watch, ours) == [ObjectGone(label(0).key)]
    assert watch.foreign_writes
    theirs.ages.wipe([label(1).key], -math.inf, 3.0)
    theirs.remove([label(2).key], 4.0)
    found = look(watch, ours)
    assert found == [ObjectGone(label(2).key), ObjectErased(label(1).key)]
    assert watch.take_erased() == {label(1).key}
    assert not watch.take_erased()


def test_frequent_erasures_do_not_hide_one(catalogs: tuple[Catalog, Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others erase something between each two looks, and a comparison takes many looks."""
    monkeypatch.setattr(catalog_watch, "PIECE", 20)
    ours, theirs = catalogs
    count = 300
    ours.add([(label(number), SIZE) for number in range(count)], 1.0)
    watch, found = CatalogWatch(FINGERPRINT), list[Notice]()
    look(watch, ours)
    for number in range(count // 2):
        theirs.ages.wipe([label(number).key], -math.inf, 2.0, [label(number).owner])
        found += watch.look(ours)
    assert ObjectErased(label(0).key) in found
    told = [place for place, one in enumerate(found) if isinstance(one, OwnersErased)]
    assert told
    assert found.index(ObjectErased(label(0).key)) < told[0]
    found += look(watch, ours)
    assert found[-1] == OwnersErased(theirs.ages.last_tombstone(), frozenset([label(0).owner]))
    assert {one.key for one in found if isinstance(one, ObjectErased)} == {label(number).key for number in range(count // 2)}
    assert watch.compared


def test_a_tombstone_is_told_after_all_that_it_has_deleted(
    catalogs: tuple[Catalog, Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what a server has on its way to the disk could be stored after both. Others delete within a look, and during a
    comparison that takes many."""
    monkeypatch.setattr(catalog_watch, "PIECE", 4)
    monkeypatch.setattr(catalog_watch, "LARGE", 8)
    ours, theirs = catalogs
    ours.add([(label(number), SIZE) for number in range(60)], 1.0)
    watch, real, within = CatalogWatch(FINGERPRINT), CatalogWatch._wiped, [30]

    def delete(number: int) -> None:
        theirs.ages.wipe([label(number).key], -math.inf, 2.0, [b"%08d" % number])

    def wiped(self: CatalogWatch, before: tuple[float, int]) -> Iterator[Notice]:
        yield from real(self, before)
        while within:
            delete(within.pop())

    look(watch, ours)
    delete(10)
    monkeypatch.setattr(CatalogWatch, "_wiped", wiped)
    found = watch.look(ours)
    delete(20)
    found += look(watch, ours)
    told = [(place, one.owners or ()) for place, one in enumerate(found) if isinstance(one, OwnersErased)]
    for number in (10, 20, 30):
        first = min(place for place, owners in told if b"%08d" % number in owners)
        assert found.index(ObjectErased(label(number).key)) < first
    delete(40)
    watch.look(ours)
    assert not watch.compared
    ours.ages.wipe([], -math.inf, 2.0, [b"bob45678"])  # an own deletion, for which nothing is compared again
    watch.buried_here(ours.ages.own_tombstones)
    watch.erased_here(1)
    look(watch, ours)
    assert watch.tombstone == ours.ages.last_tombstone()


def test_an_eviction_is_found_without_reading_everything(catalogs: tuple[Catalog, Catalog]) -> None:
    """The same few statements, and the same work in them, whatever is stored."""
    ours, theirs = catalogs
    found = []
    for count in (200, 4000):
        ours.add([(label(number), SIZE) for number in range(count)], 1.0)
        watch, steps = CatalogWatch(FINGERPRINT), list[None]()
        look(watch, ours)
        theirs.remove([label(0).key], 2.0)
        ours._db.set_progress_handler(lambda steps=steps: steps.append(None), 10)
        assert look(watch, ours) == [ObjectGone(label(0).key)]
        ours._db.set_progress_handler(None, 0)
        found.append(len(steps))
    assert found[1] <= found[0] + 2, found


def test_notes_are_read_in_pieces(catalogs: tuple[Catalog, Catalog]) -> None:
    ours, _ = catalogs
    count = 2 * catalog_watch.PIECE + 3
    ours.note(FINGERPRINT, [Note(b"%d" % number, b"block", b"v") for number in range(count)])
    watch = CatalogWatch(FINGERPRINT)
    watch.begin(ours)
    assert len(watch.look(ours)) == catalog_watch.PIECE
    assert len([one for one in look(watch, ours) if isinstance(one, NoteFound)]) == count - catalog_watch.PIECE


def test_a_deletion_before_the_first_look_concerns_a_process_that_ran_already(catalogs: tuple[Catalog, Catalog]) -> None:
    """Its disk was opened late, because it failed. Its memory may hold what was deleted."""
    mine, other = catalogs
    other.add([(label(0), SIZE)], now=10.0)
    other.ages.wipe([label(0).key], 20.0, 20.0)
    early, late = CatalogWatch(FINGERPRINT, 15.0), CatalogWatch(FINGERPRINT, 25.0)
    assert EverythingErased(20.0) in look(early, mine)
    assert early.wiped_first == 0.0
    assert not any(isinstance(notice, EverythingErased) for notice in look(late, mine))
    assert late.wiped_first == 20.0


def test_a_deletion_up_to_an_earlier_time_is_heard_too(catalogs: tuple[Catalog, Catalog]) -> None:
    """The clock was set back between the two, so there may be text that is older than the first one, and came after it."""
    mine, other = catalogs
    watch = CatalogWatch(FINGERPRINT, 5.0)
    watch.begin(mine)
    other.ages.wipe([], 20.0, 20.0)
    assert look(watch, mine) == [EverythingErased(20.0)]
    for _ in range(2):
        other.ages.wipe([], 15.0, 25.0)
        (told,) = look(watch, mine)
        assert isinstance(told, EverythingErased)
        assert 15.0 <= told.before == pytest.approx(20.0)
    other.ages.wipe([label(0).key], -math.inf, 25.0)
    assert not look(watch, mine)
    other.ages.wipe([], 10.0, 12.0)
    assert look(watch, mine) == [EverythingErased(10.0)]


def test_others_deletions_name_their_owners(catalogs: tuple[Catalog, Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to hear of an earlier deletion, nor of an own one. Who has missed a tombstone takes everybody for an owner."""
    monkeypatch.setattr(ages, "TOMBSTONES", 4)
    ours, theirs = catalogs
    theirs.ages.wipe([], -math.inf, 1.0, [b"alice"])
    watch = CatalogWatch(FINGERPRINT)
    watch.begin(ours)
    assert look(watch, ours) == []

    def told() -> frozenset[bytes] | None:
        (found,) = [one for one in look(watch, ours) if isinstance(one, OwnersErased)]
        assert found.number == watch.tombstone == theirs.ages.last_tombstone()
        return found.owners

    theirs.ages.wipe([], -math.inf, 2.0, [b"bob", b"carol"])
    ours.ages.wipe([], -math.inf, 3.0, [b"dave"])
    watch.buried_here(ours.ages.own_tombstones)
    theirs.ages.wipe([], 3.0, 3.0)  # everything: not by owner
    assert told() == {b"bob", b"carol"}
    ours.ages.wipe([], -math.inf, 4.0, [b"dave"])
    watch.buried_here(ours.ages.own_tombstones)
    assert told() == frozenset()
    theirs.ages.wipe([], -math.inf, 5.0, [b"", b"erin"])
    assert told() is None, "the owner of one entry is not known"
    for _ in range(5):
        theirs.ages.wipe([], -math.inf, 6.0, [b"frank"])
    assert told() is None, "the first of them is gone"
    theirs.ages.wipe([], -math.inf, 7.0, [b"%d" % number for number in range(ages.OWNERS + 1)])
    assert told() is None, "too many to name each"
    theirs.ages.wipe([], -math.inf, 8.0, [b"grace"])
    theirs.ages.wipe([], -math.inf, 9.0, [b"heidi"])
    theirs.ages.outdate_tombstones(8.0)
    assert told() is None
    theirs.ages.wipe([], -math.inf, 10.0, [b"heidi"])
    theirs.ages.outdate_tombstones(9.0)
    assert told() == {b"heidi"}, "the older ones were told before"


def test_a_new_catalogue_does_not_know_what_was_deleted(tmp_path: Path) -> None:
    """Another one was lost, with its tombstones."""
    path, watch = tmp_path / "index.sqlite", CatalogWatch(FINGERPRINT)
    with closing(Catalog(path)) as catalog:
        catalog.ages.wipe([], -math.inf, 1.0, [b"alice"])
        watch.begin(catalog)
        assert look(watch, catalog) == []
    with closing(Catalog(path)) as catalog:
        watch.restart()
        assert look(watch, catalog) == [], "the same one, opened again"
    schema.drop(path)
    with closing(Catalog(path)) as catalog:
        watch.restart()
        assert look(watch, catalog) == [OwnersErased(catalog.ages.last_tombstone(), None)]


def test_an_object_is_not_written_after_a_tombstone_of_its_owner(catalogs: tuple[Catalog, Catalog]) -> None:
    ours, theirs = catalogs
    watch = CatalogWatch(FINGERPRINT)
    watch.begin(ours)
    before, one = watch.tombstone, label(0)
    theirs.ages.wipe([], -math.inf, 1.0, [b"somebody"])
    assert not watch.outdated(ours, one, before)
    assert watch.outdated(ours, replace(one, owner=b""), before), "of an unknown owner"
    ours.ages.wipe([], -math.inf, 1.0, [one.owner])
    watch.buried_here(ours.ages.own_tombstones)
    assert not watch.outdated(ours, one, before), "this process obeys its own already"
    theirs.ages.wipe([], -math.inf, 1.0, [one.owner])
    assert watch.outdated(ours, one, before)
    assert not watch.outdated(ours, one, theirs.ages.last_tombstone())


def test_a_look_that_fails_loses_nothing(catalogs: tuple[Catalog, Catalog]) -> None:
    """Wherever it fails: everything is found once, as if it had not failed."""
    ours, theirs = catalogs
    for fails in range(1, 100, 1 if SLOW else 6):
        watch, held, count = CatalogWatch(FINGERPRINT), [label(number) for number in range(10)], fails
        ours.ages.erase([one.key for one in held])
        ours.add([(one, SIZE) for one in held])
        watch.begin(ours)
        look(watch, ours)
        theirs.remove([held[0].key])
        theirs.ages.wipe([one.key for one in held[1:4]], -math.inf, 1.0, [b"alice123"])
        theirs.add([(label(100 + fails), SIZE)])
        theirs.pin([held[5].key])

        def failing(*_: object) -> int:
            nonlocal count
            count -= 1
            return int(count == 0)

        ours._db.set_authorizer(failing)  # each thing that a statement does may be refused
        found = list[Notice]()
        try:
            found += watch.look(ours)
            while watch.more:
                found += watch.look(ours)
        except sqlite3.DatabaseError:
            found += watch.take_found()
        failed = count <= 0
        ours._db.set_authorizer(None)
        found += look(watch, ours)
        erased = [ObjectErased(one.key) for one in held[1:4]]
        gone = sorted([ObjectGone(held[0].key), *erased], key=repr)
        assert sorted((one for one in found if isinstance(one, ObjectGone | ObjectErased)), key=repr) == gone, fails
        assert [one for one in found if isinstance(one, ObjectFound)] == [ObjectFound(label(100 + fails))]
        assert [one.owners for one in found if isinstance(one, OwnersErased)] == [frozenset([b"alice123"])]
        assert [one for one in found if isinstance(one, PinsFound)] == [PinsFound(frozenset({held[5].key}))]
        if not failed:
            break
    assert fails > 10


def test_what_is_erased_while_the_disk_is_closed_is_found(catalogs: tuple[Catalog, Catalog]) -> None:
    """Else a server whose disk fails just then would keep it in memory, and write it to disk again."""
    ours, theirs = catalogs
    held = [label(number) for number in range(4)]
    ours.add([(one, SIZE) for one in held])
    watch = CatalogWatch(FINGERPRINT)
    look(watch, ours)
    assert {*watch.lose_sight()} == {one.key for one in held}
    for _ in range(2):  # the disk fails again before that was compared
        watch.restart()
        watch.look(ours, tidied=False)
        assert {*watch.lose_sight()} == {one.key for one in held}
    assert sorted(key for keys in watch._unseen for key in keys) == sorted(one.key for one in held)
    theirs.remove([held[0].key])
    theirs.ages.erase([held[1].key])
    watch.restart()
    assert ObjectErased(held[1].key) not in watch.look(ours, tidied=False)
    assert not watch.more  # a caller who looks until there is nothing more has not tidied yet
    watch.more = True
    found = look(watch, ours)
    assert [one for one in found if isinstance(one, ObjectErased)] == [ObjectErased(held[1].key)]
    assert ObjectGone(held[0].key) in found
    assert not look(watch, ours)
