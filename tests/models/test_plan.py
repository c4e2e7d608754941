from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.models.plan import HALF_LIFE, Holder, MemoryShares, ModelUse, place, value_of

GIB = 1 << 30


def test_as_many_models_are_kept_as_fit_with_their_conversations() -> None:
    shares = MemoryShares.of(16 * GIB, [4 * GIB, 2 * GIB, 1 * GIB, 1 * GIB])
    assert (shares.keep, shares.rest) == (3, 3 * GIB)
    assert MemoryShares.of(7 * GIB, [4 * GIB, 2 * GIB, 1 * GIB]).keep == 2
    assert MemoryShares.of(4 * GIB + 1, [4 * GIB, 2 * GIB]).keep == 1


def test_the_devices_must_hold_the_largest_models_that_are_loaded_at_the_same_time() -> None:
    weights = [1 * GIB, 4 * GIB, 2 * GIB]
    assert MemoryShares.of(16 * GIB, weights, 2).together == (4 * GIB, 2 * GIB)
    assert MemoryShares.of(16 * GIB, weights, 1).together == ()
    assert MemoryShares.of(16 * GIB, weights[:1], 3).together == ()


@given(
    st.integers(1, 64 * GIB), st.lists(st.integers(1, 32 * GIB), min_size=1, max_size=6), st.none() | st.integers(1, 6)
)
def test_a_model_alone_never_gets_more_than_there_is(total: int, weights: list[int], keep: int | None) -> None:
    try:
        shares = MemoryShares.of(total, weights, keep)
    except ConfigError:
        assert min(weights) >= total
        return
    assert shares.rest >= 0
    assert all(shares.of_model(size) <= total for size in weights)
    if keep is None:
        assert sum(map(shares.of_model, shares.together)) <= total


@pytest.mark.parametrize("keep", [None, 2])
@pytest.mark.parametrize("large", [7 * GIB + GIB // 2, 20 * GIB])
def test_a_model_that_fits_beside_none_changes_nothing_for_the_others(large: int, keep: int | None) -> None:
    without, beside = (MemoryShares.of(8 * GIB, weights, keep) for weights in ([GIB, GIB], [GIB, large, GIB]))
    assert (without, without.of_model(GIB)) == (beside, 4 * GIB)
    assert beside.holds(large) == (large < 8 * GIB)
    assert beside.of_model(large) == 8 * GIB


def test_as_many_are_kept_of_models_that_came_later_as_of_models_that_were_there() -> None:
    alone = MemoryShares.of(8 * GIB, [GIB])
    assert (alone.keep, alone.shared_by([GIB, GIB])) == (1, MemoryShares.of(8 * GIB, [GIB, GIB]))
    assert alone.shared_by([GIB, GIB]).keep == 2
    assert MemoryShares.of(8 * GIB, [GIB], 1).shared_by([GIB, GIB]).keep == 1


def test_of_two_models_that_do_not_fit_together_each_may_use_everything() -> None:
    shares = MemoryShares.of(8 * GIB, [7 * GIB, 2 * GIB])
    assert (shares.keep, shares.of_model(7 * GIB), shares.of_model(2 * GIB)) == (1, 8 * GIB, 8 * GIB)


def test_too_little_memory_for_any_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="Give more memory"):
        MemoryShares.of(GIB, [2 * GIB, 3 * GIB])


def test_a_model_is_worth_what_its_next_use_saves() -> None:
    assert value_of(2.0, 3.0, GIB) > value_of(1.0, 3.0, GIB)
    assert value_of(1.0, 4.0, GIB) > value_of(1.0, 3.0, GIB)
    assert value_of(1.0, 3.0, GIB) > value_of(1.0, 3.0, 2 * GIB)
    use = ModelUse().used(0.0).used(0.0)
    assert (use.rate(0.0), use.rate(HALF_LIFE)) == (2.0, 1.0)


def holder(name: str, value: float, need: int = 1, **how: bool) -> Holder:
    return Holder(name, need, value, **how)


def test_the_least_valuable_idle_model_gives_way() -> None:
    holders = [holder("a", 3.0, idle=True), holder("b", 1.0, idle=True), holder("c", 0.5)]
    assert place(1, holders, total=9, keep=3, urgent=True).unload == ("b",)


def test_a_busy_model_gives_way_only_to_a_request_that_has_waited() -> None:
    holders = [holder("a", 3.0), holder("b", 1.0), holder("c", 0.1, ready=False)]
    assert place(1, holders, total=9, keep=3, urgent=False).drain == ()
    assert place(1, holders, total=9, keep=3, urgent=True).drain == ("b",)


def test_what_is_leaving_is_waited_for() -> None:
    chosen = place(1, [holder("a", 1.0, leaving=True), holder("b", 1.0, idle=True)], total=2, keep=2, urgent=True)
    assert (chosen.fits, chosen.unload, chosen.drain) == (False, (), ())


@given(
    st.integers(1, 10),
    st.lists(st.tuples(st.integers(1, 10), st.floats(0, 9), st.booleans(), st.booleans(), st.booleans()), max_size=5),
    st.integers(10, 20),
    st.integers(1, 5),
    st.booleans(),
)
def test_no_more_models_give_way_than_needed(
    need: int, made: list[tuple[int, float, bool, bool, bool]], total: int, keep: int, urgent: bool
) -> None:
    holders = [
        Holder(f"{number}", size, value, leaving=leaving, idle=idle and not leaving, ready=ready or idle)
        for number, (size, value, leaving, idle, ready) in enumerate(made)
    ]
    chosen = place(need, holders, total, keep, urgent=urgent)
    gone = {*chosen.unload, *chosen.drain}
    by_name = {one.name: one for one in holders}
    if chosen.fits:
        assert not gone
        assert sum(one.need for one in holders) + need <= total
        assert len(holders) < keep
        return
    assert not any(by_name[name].leaving for name in gone)
    assert all(by_name[name].idle for name in chosen.unload)
    assert urgent or not chosen.drain
    if gone:  # without the last one it would not be enough
        stay = [one for one in holders if not one.leaving and one.name not in gone]
        last = by_name[[*chosen.unload, *chosen.drain][-1]]
        before = [*stay, last]
        assert sum(one.need for one in before) + need > total or len(before) >= keep
    worst = min((one.value for one in holders if one.idle), default=None)
    assert not chosen.unload or by_name[chosen.unload[0]].value == worst
