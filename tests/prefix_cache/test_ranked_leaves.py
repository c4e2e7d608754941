"""Ranked leaves: against a sorted list, with so few ranks that many are equal."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.prefix_cache import ranked_leaves
from headstart.prefix_cache.ranked_leaves import RankedLeaves, place_of


@dataclass(eq=False)
class Ranked:
    """What is kept in order."""

    id: bytes
    rank: float | None
    last: float
    start: int
    owner: bytes = b""


NUMBERS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)), max_size=120)


@pytest.mark.parametrize("run", [4, 16])
@given(numbers=NUMBERS, remove=st.lists(st.integers(0, 10**6), max_size=140), at_once=st.booleans(), hand=st.integers(0, 130))
@examples(60)
def test_it_is_a_sorted_list(
    run: int, numbers: list[tuple[int, int, int]], remove: list[int], at_once: bool, hand: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked_leaves, "RUN", run)
        patch.setattr(ranked_leaves, "SPARSE", run // 2)
        model = [
            Ranked(bytes([number]), float(rank), float(last), start) for number, (rank, last, start) in enumerate(numbers)
        ]
        leaves = RankedLeaves(model if at_once else ())
        for leaf in () if at_once else model:
            leaves.add(leaf)
            leaves.check()
        model.sort(key=place_of)
        while True:
            leaves.check()
            assert list(leaves) == model
            assert (len(leaves), bool(leaves)) == (len(model), bool(model))
            assert leaves.first() is (model[0] if model else None)
            assert leaves.after((), 3) == model[:3]
            if model:
                number = hand % len(model)
                assert leaves.after(place_of(model[number]), hand) == model[number + 1 :][:hand]
            if not (remove and model):
                break
            leaves.remove(model.pop(remove.pop() % len(model)))


def test_a_leaf_without_a_rank_is_refused() -> None:
    with pytest.raises(AssertionError):
        RankedLeaves().add(Ranked(b"", None, 0.0, 0))
