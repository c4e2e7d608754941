"""Tiers of a simulated fleet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.simulator.tiers import BlockLru


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), max_size=20), st.integers(0, 12))
@examples(200)
def test_the_least_recently_used_blocks_go_first(uses: list[list[int]], room: int) -> None:
    tier, order, held = BlockLru(room), list[int](), set[int]()
    for keys in uses:
        added, evicted = tier.use(keys)
        kept = keys[:room]
        assert added == [key for key in kept if key not in held]
        order = [key for key in order if key not in kept] + kept[::-1]
        assert evicted == order[: max(0, len(order) - room)]
        order = order[len(evicted) :]
        held = set(order)
        assert len(tier) == len(held) <= room
        assert {key for key in range(10) if key in tier} == held
        assert tier.leading(keys) == len(kept)


def test_leading_blocks_end_at_the_first_that_is_missing() -> None:
    tier = BlockLru(10)
    tier.use([1, 2, 4])
    assert tier.leading([1, 2, 3, 4]) == 2
    assert tier.leading([3, 1]) == 0
    assert tier.leading([]) == 0
