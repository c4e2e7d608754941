"""Ghosts: against a dict, and which are dropped."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.prefix_cache import ghosts as ghosts_module
from headstart.prefix_cache.ghosts import Ghosts
from headstart.prefix_cache.reuse_model import KINDS, OCTAVES, RequestTraits, ReuseStats

MANY = 10**6


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def history(number: int) -> ReuseStats:
    traits = RequestTraits.of(1 + number % 7, new=number, siblings=number % 5 - 1, reply=number)
    return ReuseStats(0.0, number / 7, 1 + number % 9, traits, number % 3)


STEPS = st.lists(st.tuples(st.sampled_from(("put", "put", "pop", "replace")), st.integers(0, 60)), max_size=150)


@pytest.mark.parametrize("rows", [1, 4])
@given(steps=STEPS)
@examples(60)
def test_they_are_a_dict(rows: int, steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ghosts_module, "ROWS", rows)
        found, model = Ghosts(), dict[bytes, ReuseStats]()
        for number, (step, one) in enumerate(steps):
            if step == "pop":
                assert found.pop(key(one)) == model.pop(key(one), None)
            elif step == "replace" and key(one) in model:
                found.replace(key(one), history(number))
                model[key(one)] = history(number)
            elif key(one) not in model:
                assert found.put(key(one), history(number), MANY) == []
                model[key(one)] = history(number)
            found.check()
            assert dict(found.items()) == model
            assert {*found} == {*model}
            assert all(found.get(key(one)) == model.get(key(one)) for one in range(60))
            assert all((key(one) in found) == (key(one) in model) for one in range(60))


def test_the_oldest_are_dropped() -> None:
    """Few stand in one bucket, so the order is exact. Of many, all that came latest stay, and nothing stays for very long."""
    few = Ghosts()
    assert [few.put(key(number), history(number), 4) for number in range(6)] == [
        *([] for _ in range(4)),
        *([(key(number), history(number))] for number in range(2)),
    ]
    assert [dropped for dropped, _ in few.put(key(6), history(6), 3)] == [key(2), key(3)], "two, until there are so few"
    many, most, came = Ghosts(), 1000, dict[bytes, int]()
    ages = []
    for number in range(8 * most):
        came[key(number)] = number
        ages += [number - came[dropped] for dropped, _ in many.put(key(number), history(number), most)]
    many.check()
    assert len(many) == most
    assert most / 8 < min(ages) < max(ages) < 4 * most
    assert sum(ages) / len(ages) == pytest.approx(most, rel=0.05)


def test_all_are_dropped_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts_module, "ROWS", 16)
    found = Ghosts()
    for number in range(300):
        found.put(key(number), history(number), MANY)
    pieces, late = list[set[bytes]](), 300
    for piece in found.clearing():
        pieces.append({dropped for dropped, _ in piece})
        if len(pieces) < 10:
            found.put(key(late), history(late), MANY)
            late += 1
        found.check()
    assert {key(number) for number in range(300)} <= set().union(*pieces)
    assert max(map(len, pieces)) < 64
    assert not any(key(number) in found for number in range(300))


def test_a_sample_stands_for_all() -> None:
    """Their open intervals, by kind and age: of all, as if each were counted; of a part, about the same."""
    found, open_intervals = Ghosts(), np.zeros((KINDS, OCTAVES))
    for number in range(20_000):
        found.put(key(number), history(number), MANY)
    for _, stats in found.items():
        open_intervals[stats.kind, stats.age(4000.0)] += stats.request_traits.weight
    pieces = list(found.sampled(1))
    assert len(pieces) > 1
    assert np.allclose(sum(piece.open(4000.0) for piece in pieces), open_intervals)
    part = list(found.sampled(4))
    assert sum(len(piece.last) for piece in part) * 4 == pytest.approx(20_000, rel=0.1)
    ages = [sum(piece.open(4000.0) for piece in some).sum(axis=0) for some in (part, pieces)]
    assert ages[0] == pytest.approx(ages[1], rel=0.1, abs=100)
    assert not sum(len(piece.last) for piece in Ghosts().sampled(1))


def test_long_histories_are_cut() -> None:
    found = Ghosts()
    found.put(key(1), ReuseStats(0.0, 1.0, 10**6, children=10**6), MANY)
    stats = found.get(key(1))
    assert stats is not None
    assert (stats.uses, stats.children) == (65535, 65535)
