"""What goes from the disk: the same policies as in memory, over what the catalogue remembers between starts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST, RequestTraits, ReuseModel, ReuseStats
from headstart.tiers.disk.catalog import Catalog, Note
from headstart.tiers.disk.format import Label
from headstart.tiers.disk.ranks import WAIT

DAY = 86_400.0
SIZE = 4096


def gone(catalog: Catalog) -> list[int]:
    """Objects that are remembered after they have gone."""
    return [int.from_bytes(key) for (key,) in catalog._db.execute("SELECT key FROM ghosts ORDER BY number")]


def label(number: int, parent: int | None = None, seconds: float = 1.0) -> Label:
    above = bytes(32) if parent is None else parent.to_bytes(32)
    return Label(number.to_bytes(32), above, b"f" * 32, 0 if parent is None else 8, (number,) * 8, True, seconds)


def state(number: int) -> Label:
    """The checkpoint at the end of block `number`; counted from 1000."""
    return replace(label(1000 + number, number), kind="state")


def names(catalog: Catalog, count: int, now: float) -> list[int]:
    """The next `count` victims, as of what is known now."""
    catalog.ranks.learn(now)
    return [int.from_bytes(row.label.key) for row in catalog.victims((), count * SIZE, now)]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "index.sqlite")


def test_the_disk_ranks_as_memory_does(catalog: Catalog) -> None:
    stats_of: dict[int, ReuseStats] = {}
    for number in range(1, 9):
        seconds = 1.0 + number % 3
        catalog.add([(label(number, seconds=seconds), SIZE)], 10.0 * number)
        stats_of[number] = ReuseStats(seconds / SIZE, 10.0 * number, 1)
    reuse = ReuseModel()
    for number, now in ((3, 100.0), (5, 150.0), (3, 400.0), (8, 500.0)):
        catalog.use([(label(number).key, now)])
        reuse.returned(stats_of[number], now)
        stats_of[number].use(now)
    request_traits = RequestTraits.of(3, new=9000, siblings=1, reply=700, called=True)
    catalog.replied([(label(5).key, request_traits), (label(99).key, request_traits)])
    stats_of[5].request_traits = request_traits
    catalog.use([(label(5).key, 550.0)])
    reuse.returned(stats_of[5], 550.0)
    stats_of[5].use(550.0)
    catalog.add([(label(20), SIZE), (label(21), SIZE)], 20.0)
    catalog.remove([label(20).key], 30.0)
    stats_of[21] = ReuseStats(1.0 / SIZE, 20.0, 1)
    reuse.learn([*stats_of.values(), ReuseStats(1.0, 20.0, 1)], 600.0)
    order = sorted(stats_of, key=lambda number: (reuse.value(stats_of[number], 600.0), stats_of[number].last))
    assert names(catalog, 9, 600.0) == order


def test_what_hangs_on_a_block_goes_before_it(catalog: Catalog) -> None:
    catalog.add([(label(1), SIZE), (label(2, 1), SIZE), (label(3), SIZE)], 1.0)
    for now in range(2, 20):
        catalog.use([(label(2).key, float(now)), (label(3).key, float(now))])
    assert names(catalog, 3, 20.0) == [2, 1, 3] or names(catalog, 3, 20.0) == [3, 2, 1]
    catalog.pin([label(2).key])
    assert names(catalog, 3, 20.0) == [3]


def test_what_a_pinned_object_needs_stays_pinned(catalog: Catalog) -> None:
    """Another process may have pinned a longer chain, or a branch, since this one was looked at."""
    labels = [label(1), label(2, 1), label(3, 2), state(3), label(4, 2)]
    line = [replace(one, start=start) for one, start in zip(labels, (0, 8, 16, 16, 16), strict=True)]
    catalog.add([(one, SIZE) for one in line], 1.0)
    catalog.pin([one.key for one in line])
    catalog.unpin([label(1).key, state(3).key, label(2, 1).key, label(3, 2).key, label(9).key])
    assert {key for (key,) in catalog._db.execute("SELECT key FROM objects WHERE pinned")} == {
        label(1).key,
        label(2).key,
        label(4).key,
    }
    catalog.unpin([one.key for one in line])
    assert catalog.pinned_bytes() == {}


def test_a_checkpoint_stays_pinned_with_its_block(catalog: Catalog) -> None:
    """A server that had not heard of a longer pinned chain unpinned a shorter one, and took the checkpoint in its middle."""
    line = [replace(one, start=start) for one, start in ((label(1), 0), (state(1), 0), (label(2, 1), 8), (state(2), 8))]
    catalog.add([(one, SIZE) for one in line], 1.0)
    catalog.pin([one.key for one in line])
    catalog.unpin([one.key for one in line[:2]])
    assert sum(catalog.pinned_bytes().values()) == 4 * SIZE
    catalog.unpin([line[3].key])
    assert sum(catalog.pinned_bytes().values()) == 3 * SIZE, "nothing hangs on it"
    catalog.unpin([line[2].key, line[1].key])
    assert sum(catalog.pinned_bytes().values()) == SIZE
    catalog.unpin([line[0].key])
    assert not catalog.pinned_bytes()


def test_rows_that_no_checkpoint_makes_useful_go_first(catalog: Catalog) -> None:
    """Of a line the rows behind its last checkpoint, once that has gone; not those whose checkpoint may still come."""
    line = [label(1), label(2, 1), label(3, 2), label(4, 3)]
    catalog.add([(one, SIZE) for one in (*line, state(2), state(4))], 1.0)
    others = [replace(label(number), fingerprint=b"g" * 32) for number in (20, 21)]
    catalog.add([(one, SIZE) for one in others], 1.0)
    for now in range(2, 30):
        catalog.use([(one.key, float(now)) for one in (*line, state(2))])
    later = 30.0 + WAIT
    catalog.add([(label(30), SIZE)], later)
    assert names(catalog, 3, later) == [1004, 4, 3], "rather than what was used less"
    assert names(catalog, 9, later)[3:] == [20, 21, 1002, 2, 1, 30]
    assert 4 not in names(catalog, 3, 40.0)
    catalog.remove([state(4).key])
    assert names(catalog, 2, later) == [4, 3]
    assert names(catalog, 1, 40.0) == [20]
    catalog.remove([state(2).key])
    assert names(catalog, 2, later) == [20, 21], "nobody knows any more that it is a model with state"


def test_a_daily_prefix_outlives_one_shots_and_a_restart(tmp_path: Path) -> None:
    """Each hour another object comes, into room for six: LRU has forgotten the prefix long before the next day."""
    path = tmp_path / "index.sqlite"
    missed = []
    for start in (0, 4, 8):  # opened anew every few days
        catalog = Catalog(path)
        for hour in range(start * 24, start * 24 + 4 * 24):
            now, one = hour * 3600.0, label(1 if hour % 24 == 9 else 1000 + hour)
            if catalog.get(one.key) is not None:
                catalog.use([(one.key, now)])
                continue
            if one == label(1):
                missed.append(hour // 24)
            if len(catalog) >= 6:
                catalog.remove([row.label.key for row in catalog.victims((), SIZE, now)])
            catalog.add([(one, SIZE)], now)
        catalog.close()
    assert missed == [0, 1] or missed == [0, 1, 2]


def test_what_is_kept_and_what_may_go_are_all_there_is(catalog: Catalog) -> None:
    dice = random.Random(0)
    for number in range(1, 60):
        catalog.add([(label(number, dice.randrange(1, number) if number > 5 else None), dice.randint(1, 9) * SIZE)], 1.0)
    for _ in range(50):
        pinned, spare = ([label(number).key for number in dice.sample(range(1, 60), 3)] for _ in range(2))
        catalog.pin(pinned)
        going = sum(row.allocated for row in catalog.victims(spare, 1 << 40, 2.0))
        assert catalog.kept(spare) + going == catalog.used()
        catalog.unpin(pinned)


def test_uses_are_remembered_after_an_object_has_gone(catalog: Catalog) -> None:
    catalog.add([(label(1), SIZE)], 10.0)
    catalog.use([(label(1).key, 20.0)])
    request_traits = RequestTraits.of(20, new=9000, siblings=1, reply=700, called=True)
    catalog.replied([(label(1).key, request_traits)])
    catalog.remove([label(1).key, label(7).key])
    assert len(gone(catalog)) == 1
    catalog.add([(label(1), SIZE)], 50.0)
    assert catalog._histories([label(1).key])[label(1).key][1].request_traits == request_traits
    row = catalog.get(label(1).key)
    assert row is not None
    assert (row.uses, row.used) == (3, 50.0)
    assert not gone(catalog)
    counts = catalog.ranks.counts()
    assert counts[1].sum() == 0
    assert counts.sum() == pytest.approx(2 * UNKNOWN_REQUEST.weight), "used after 10 seconds, and after 30"


def test_a_better_copy_is_not_a_use(catalog: Catalog) -> None:
    catalog.add([(label(1), SIZE)], 10.0)
    catalog.add([(label(1), 2 * SIZE)], 20.0)
    row = catalog.get(label(1).key)
    assert row is not None
    assert (row.uses, row.used, row.allocated) == (1, 10.0, 2 * SIZE)


def test_ghosts_are_bounded(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.tiers.disk.catalog.GHOSTS", 10)
    for number in range(1, 40):
        catalog.add([(label(number), SIZE)], float(number))
        catalog.remove([label(number).key])
    assert gone(catalog) == list(range(30, 40))
    assert catalog.ranks.counts()[1].sum() == pytest.approx(29 * UNKNOWN_REQUEST.weight), (
        "the others are remembered as never having come again"
    )


def test_two_processes_learn_together(tmp_path: Path) -> None:
    one, two = (Catalog(tmp_path / "index.sqlite") for _ in range(2))
    one.add([(label(1), SIZE)], 0.0)
    for now in range(1, 40):
        (one if now % 2 else two).use([(label(1).key, float(now))])
    assert one.ranks.counts().sum() == two.ranks.counts().sum() == pytest.approx(39 * UNKNOWN_REQUEST.weight)


_GARBAGE = ("2, 0, 0, 1", "0, 9999, 0, 1", "0, 0, 24, 1", "0, 0, 0, -1", "0, 0, 0, 1e300", "0, 0.5, 0, 1", "0, 'x', 0, 1")


@pytest.mark.parametrize("garbage", _GARBAGE)
def test_what_was_learned_may_be_garbage(catalog: Catalog, garbage: str) -> None:
    catalog.add([(label(1), SIZE), (label(2), SIZE)], 5.0)
    catalog._db.execute(f"INSERT INTO intervals (row, kind, octave, count) VALUES ({garbage})")
    catalog._db.execute("UPDATE objects SET bucket = 1e6 + 0.5, weight = 1e300 WHERE key = ?", (label(1).key,))
    assert sorted(names(catalog, 2, 10.0)) == [1, 2]
    catalog.use([(label(2).key, 9.0)])
    assert catalog.ranks.counts().sum() == UNKNOWN_REQUEST.weight


def test_old_times_are_forgotten(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.tiers.disk.ranks.MEMORY", 3)
    catalog.add([(label(1), SIZE), (label(2), SIZE)], 0.0)
    for now in range(1, 40):
        catalog.use([(label(1).key, float(now))])
    before = catalog.ranks.counts().sum()
    assert before > 1.5
    catalog.ranks.learn(40.0)
    assert catalog.ranks.counts().sum() == pytest.approx(before / 2)


def test_notes_are_gone_with_their_block_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(tmp_path / "index.sqlite")
    one, two = label(1), label(2)
    catalog.add([(one, SIZE), (two, SIZE)], 1.0)
    catalog.note(b"f", [Note(b"a", one.key, b"1"), Note(b"b", two.key, b"2")])
    catalog.note(b"f", [Note(b"a", one.key, b"3")])
    catalog.note(b"g", [Note(b"a", one.key, b"4")])
    assert [note.value for _, note in catalog.notes(b"f")] == [b"2", b"3"]
    last = max(number for number, _ in catalog.notes(b"f"))
    assert not list(catalog.notes(b"f", last))
    catalog.remove([two.key])
    assert [note.value for _, note in catalog.notes(b"f")] == [b"3"]
    monkeypatch.setattr("headstart.tiers.disk.catalog.NOTES", 5)
    catalog.note(b"f", [Note(b"%d" % number, one.key, b"") for number in range(20)])
    assert [note.key for _, note in catalog.notes(b"f")] == [b"15", b"16", b"17", b"18", b"19"]
    catalog.close()
