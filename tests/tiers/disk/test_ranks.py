"""Stored ranks: the order of eviction costs the same, however much is stored, and no rank is old."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.prefix_cache.quota import Quota
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.tiers.disk.catalog import Catalog
from headstart.tiers.disk.format import Label
from headstart.tiers.disk.ranks import LEAST, PER_VICTIM

SIZE = 4096
OWNERS = b"alice123", b"bob45678"
KIND = RequestTraits.of(2, new=9000, siblings=1, reply=700, called=True)


def label(number: int, parent: int | None = None, owner: bytes = b"") -> Label:
    above = bytes(32) if parent is None else parent.to_bytes(32)
    return Label(number.to_bytes(32), above, b"f" * 32, 0 if parent is None else 8, (number,) * 8, True, 1.0, owner=owner)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with closing(Catalog(tmp_path / "index.sqlite")) as catalog:
        yield catalog


def fill(catalog: Catalog, count: int) -> None:
    """First blocks, the youngest last, half of them with a block after them."""
    catalog.add([(label(number, owner=OWNERS[number % 2]), SIZE) for number in range(1, count, 2)], 0.0)
    catalog.add([(label(number, number - 1, OWNERS[number % 2]), SIZE) for number in range(2, count + 1, 2)], 0.0)
    for number in range(1, count + 1):
        catalog._db.execute("UPDATE objects SET used = ? WHERE key = ?", (float(number), label(number).key))


def steps(catalog: Catalog, count: int) -> int:
    """How many hundred steps SQLite's machine takes to evict `count` objects."""
    taken = [0]

    def step() -> int:
        taken[0] += 1
        return 0

    catalog.ranks.learn(1e6)
    catalog._db.set_progress_handler(step, 100)
    catalog.remove([row.label.key for row in catalog.victims((), count * SIZE, 1e6)], 1e6)
    catalog.add([(label(1 << 30), SIZE)], 1e6)
    assert (catalog.used(), len(catalog)) == (len(catalog) * SIZE, len(catalog))
    catalog._db.set_progress_handler(None, 0)
    return taken[0]


def test_evicting_costs_the_same_however_much_is_stored(tmp_path: Path) -> None:
    found = []
    for count in (2 * LEAST, 20 * LEAST):
        with closing(Catalog(tmp_path / f"{count}.sqlite")) as catalog:
            fill(catalog, count)
            found.append(steps(catalog, 4))
    assert found[1] <= found[0] + 10, found
    assert found[0] > 10, "nothing was counted"


def test_no_rank_is_older_than_a_round(catalog: Catalog) -> None:
    """While a sixteenth of the objects is evicted, all others that nothing follows get new ranks."""
    count = 4000
    fill(catalog, count)
    catalog._db.execute("UPDATE objects SET rank = 7e77")
    evicted = 0
    while evicted < count / PER_VICTIM:
        keys = [row.label.key for row in catalog.victims((), 40 * SIZE, 1e6)]
        evicted += len(keys)
        catalog.remove(keys, 1e6)
        assert len(keys) == 40
    assert catalog._db.execute("SELECT COUNT(*) FROM objects WHERE children = 0 AND rank = 7e77").fetchone() == (0,)


def test_the_lowest_ranks_go_and_parents_once_they_are_leaves(catalog: Catalog) -> None:
    """In a large table too, where most ranks are those of earlier."""
    fill(catalog, 10 * LEAST)
    for now in (1e6, 2e6, 3e6):
        keys = [int.from_bytes(row.label.key) for row in catalog.victims((), 100 * SIZE, now)]
        before = set[int]()
        for key in keys:
            assert key % 2 == 0 or key + 1 in before or catalog.get(label(key + 1).key) is None, "its child would be useless"
            before.add(key)
        catalog.remove([label(key).key for key in keys], now)
    assert len(catalog) == 10 * LEAST - 300
    left = [row.used for row in catalog.rows()]
    assert min(left) > 250, "of equals, what was used longest ago goes first"


def test_a_use_moves_an_object_back_at_once(catalog: Catalog) -> None:
    fill(catalog, 10 * LEAST)
    first = [row.label.key for row in catalog.victims((), 2 * SIZE, 1e6)]
    catalog.use([(key, 1e6) for key in first])
    assert not {*first} & {row.label.key for row in catalog.victims((), 20 * SIZE, 1e6)}


def test_a_reply_ranks_leaves_only_and_others_once_they_are_leaves(catalog: Catalog) -> None:
    """Its traits change what an object is worth. One that others follow has no place in the order."""
    fill(catalog, 10 * LEAST)
    for number in (1, 3, 5):  # replies of one kind came again, so they are worth more
        catalog.replied([(label(number + 1).key, KIND)], 1e5)
        for now in range(20):
            catalog.use([(label(number + 1).key, 1e5 + now)])
    catalog.ranks.learn(1e6)

    def ranks() -> dict[int, float]:
        found = catalog._db.execute("SELECT key, rank FROM objects WHERE key <= ?", (label(20).key,))
        return {int.from_bytes(key): rank for key, rank in found}

    catalog.use([(label(number).key, 1e6) for number in (15, 16)])
    before = ranks()
    catalog.replied([(label(number).key, KIND) for number in (15, 16)], 1e6)
    after = ranks()
    assert {number for number in before if before[number] != after[number]} == {16}
    catalog.remove([label(16).key], 1e6)
    assert ranks()[15] == after[16], "both save as much, and were used by the same requests"


def test_what_loses_its_last_child_to_a_deletion_has_its_rank_at_once(catalog: Catalog) -> None:
    """It was not ranked as long as something followed it. It must not be taken for something that was just used."""
    fill(catalog, 10 * LEAST)
    catalog.ranks.learn(1e6)
    catalog._db.execute("UPDATE objects SET rank = 7e77 WHERE children")
    catalog.ages.erase([label(2).key], 1e6)
    catalog.ages.wipe([label(4).key, label(6).key, label(5).key], float("-inf"), 1e6)
    left = catalog._db.execute("SELECT key, rank FROM objects WHERE key IN (?, ?)", (label(1).key, label(3).key)).fetchall()
    assert len(left) == 2
    assert all(rank < 7e77 for _, rank in left)


def test_owners_above_the_quota_go_first_and_only_they_are_counted(catalog: Catalog) -> None:
    """Also when there are many owners, of whom the query sees two."""
    dice = random.Random(0)
    small = [dice.randbytes(8) for _ in range(500)]
    catalog.add([(replace(label(number), owner=owner), SIZE) for number, owner in enumerate(small, 1)], 1.0)
    catalog.add([(replace(label(number), owner=OWNERS[0]), SIZE) for number in range(1000, 1040)], 2.0)
    quota = Quota(30 * SIZE)
    quota.hold(small[0], 30 * SIZE)  # an object of his is to come
    found = catalog.victims((), 15 * SIZE, 3.0, quota, [small[0]])
    owners = [row.label.owner for row in found]
    assert owners.count(OWNERS[0]) == 10
    assert owners.count(small[0]) == 1
    assert sum(map(bool, map(quota.held, small))) <= 6, "of the others, one was looked at, and those who lost an object"
    assert set(owners[:11]) == {OWNERS[0], small[0]}


def test_a_sample_stands_for_all(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of open intervals, found in a part of the table: those of the whole, more or less."""
    dice = random.Random(1)
    catalog.add([(label(number), SIZE) for number in range(1, 6001)], 0.0)
    catalog.remove([label(number).key for number in dice.sample(range(1, 6001), 2000)], 1.0)
    whole = {(one.uses, one.age(1000.0)): one.request_traits.weight for one in catalog.ranks._open_intervals("objects", 1000.0)}
    monkeypatch.setattr("headstart.tiers.disk.ranks.SAMPLE", 500)
    part = {(one.uses, one.age(1000.0)): one.request_traits.weight for one in catalog.ranks._open_intervals("objects", 1000.0)}
    assert part == pytest.approx(whole)
