"""A map that is walked in pieces while it changes loses nothing that stays, and shows nothing twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart.prefix_cache import id_map
from headstart.prefix_cache.id_map import IdMap


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest() if number else b""


NUMBERS = st.integers(0, 300)


@pytest.fixture(params=[5, id_map.LARGE])
def few(request: pytest.FixtureRequest) -> Iterator[None]:
    """The number of values of a dict that is divided."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_map, "LARGE", request.param)
        patch.setattr(id_map, "SPREAD", min(id_map.SPREAD, request.param // 2))
        patch.setattr(id_map, "PIECE", 3)
        yield


ONE_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.usefixtures("few")
@ONE_FIXTURE
@given(st.lists(st.tuples(st.booleans(), NUMBERS)))
def test_it_is_a_dict(changes: list[tuple[bool, int]]) -> None:
    found, known = IdMap[int](), dict[bytes, int]()
    for put, number in changes:
        if put:
            found[key(number)] = known[key(number)] = number
        elif key(number) in known:
            del found[key(number)], known[key(number)]
        assert found.get(key(number)) == known.get(key(number))
        assert (key(number) in found) == (key(number) in known)
    assert {one: found[one] for one in found} == known
    assert len(found) == len(known)
    assert sorted(found.values()) == sorted(known.values())
    assert dict(found.items()) == known
    for _ in found.clearing():
        pass
    assert not len(found)
    assert not list(found)


def test_dicts_are_divided_one_after_the_other() -> None:
    """They are about equal. If all were divided at once, the collector would have very much to look at in one pass."""
    found, dice, counts = IdMap[int](), random.Random(0), [1]
    for number in range(100_000):
        found[dice.randbytes(32)] = number
        if number % 1000 == 0:
            counts.append(len(found._different))
    assert counts[-1] == 64
    assert max(after - before for before, after in pairwise(counts)) <= 5


@pytest.mark.usefixtures("few")
@ONE_FIXTURE
@given(st.sets(NUMBERS), st.lists(st.tuples(st.booleans(), NUMBERS)))
def test_a_walk_shows_what_stays_once(before: set[int], changes: list[tuple[bool, int]]) -> None:
    found = IdMap[int]()
    for number in before:
        found[key(number)] = number
    stays, ever, seen = set(before), set(before), list[int]()
    pending = list(changes)
    for piece in found.pieces():
        assert all(found.get(key(number)) == number for number in piece), "it shows what is there"
        seen += piece
        for put, number in pending[:3]:
            ever.add(number)
            if put:
                found[key(number)] = number
            elif key(number) in found:
                del found[key(number)]
                stays.discard(number)
        del pending[:3]
    assert len(seen) == len({*seen})
    assert stays <= {*seen} <= ever
