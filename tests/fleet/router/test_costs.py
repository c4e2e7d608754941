"""Costs against a replica that serves its queue step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.router.costs import Board, Weights
from headstart.fleet.router.curve import Curve
from headstart.fleet.router.holdings import Reach
from headstart.fleet.router.reports import Load, Speed, Tier

SPEED = Speed(Curve(0.01, 1e-6), memory=1e-4, disk=1e-3, fetch=2e-3, round_trip=0.05)


def nothing(columns: int = 1) -> Reach:
    return Reach(np.zeros(columns, np.int64), np.zeros(columns, np.int64), np.zeros((len(Tier), columns), np.int64))


def board(
    load: Load | None = None, *, speed: Speed = SPEED, weights: Weights | None = None, booked: tuple[float, ...] = ()
) -> Board:
    made = Board(weights)
    made.grow()
    made.present(0, speed)
    made.load(0, load or Load(), booked, 0.0)
    return made


def in_turns(prefills: list[float], own: float) -> float:
    """When a prompt that comes last is done, if all take turns of equal length."""
    left, now = [*prefills, own], 0.0
    while left[-1] > 1e-12:
        running = [one for one in left if one > 1e-12]
        step = min(running)
        now += step * len(running)
        left = [max(0.0, one - step) for one in left]
    return now


@given(st.lists(st.floats(0.01, 20), max_size=20) | st.just([0.1] * 140), st.integers(0, 3), st.integers(1, 4000))
@examples(200)
def test_a_prompt_waits_for_its_turns(prefills: list[float], arriving: int, tokens: int) -> None:
    known, booked = prefills[arriving:], tuple(prefills[:arriving])
    estimate = board(Load(prefills=tuple(known)), booked=booked).estimate(nothing(), tokens, 64, 0.0)
    own = SPEED.prefill.seconds(0, tokens)
    waits = [*known, *booked]
    expected = in_turns(waits[:128], own) + sum(waits[128:])
    assert estimate.first_token[0] == pytest.approx(expected)


@given(st.lists(st.floats(0.01, 20), max_size=8), st.floats(0, 50), st.floats(0, 10))
@examples(100)
def test_a_queue_drains_while_time_passes(prefills: list[float], queued: float, passed: float) -> None:
    made = board(Load(prefills=tuple(prefills), queued=queued))
    assert made.waiting(0, passed) == pytest.approx(max(0.0, sum(prefills) + queued - passed))
    made.add(0, 5.0, passed)
    assert made.waiting(0, passed + 1) == pytest.approx(max(0.0, sum(prefills) + queued - passed) + 4.0)


def test_a_prompt_waits_for_what_is_left() -> None:
    estimate = board(Load(prefills=(5.0,)), speed=Speed(Curve(0.01))).estimate(nothing(), 1000, 64, 4.0)
    assert estimate.first_token[0] == pytest.approx(1.0 + 10.0)


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=8), st.floats(0.01, 4), st.integers(1, 4000))
@examples(100)
def test_a_prompt_waits_for_half_a_call_of_each_prompt_at_least(prefills: list[float], call: float, tokens: int) -> None:
    own = SPEED.prefill.seconds(0, tokens)
    estimate = board(Load(prefills=tuple(prefills), call=call)).estimate(nothing(), tokens, 64, 0.0)
    waits = sum(min(one, call / 2) if own < call / 2 else min(one, own) for one in prefills)
    assert estimate.first_token[0] == pytest.approx(waits + own)


def test_bookings_take_turns_too() -> None:
    made = board(Load(prefills=(5.0,)), speed=Speed(Curve(0.01)))
    for _ in range(200):
        made.add(0, 3.0, 0.0)
    assert made.estimate(nothing(), 100, 64, 0.0).first_token[0] == pytest.approx(1.0 + 128 * 1.0 + 73 * 3.0)


def test_restoring_costs_what_its_tier_costs() -> None:
    tiers = np.zeros((len(Tier), 1), np.int64)
    tiers[Tier.LIVE], tiers[Tier.MEMORY], tiers[Tier.DISK] = 1, 2, 3
    estimate = board().estimate(Reach(np.array([6]), np.array([6]), tiers), 1000, 100, 0.0)
    assert estimate.work[0] == pytest.approx(SPEED.prefill.seconds(600, 1000) + 200 * 1e-4 + 300 * 1e-3)
    assert estimate.start[0] == 600


@pytest.mark.parametrize(("fetch", "used"), [(2e-3, True), (2e-2, False), (None, False)])
def test_a_fetch_is_used_if_it_is_faster(fetch: float | None, used: bool) -> None:
    tiers = np.zeros((len(Tier), 1), np.int64)
    tiers[Tier.LIVE], tiers[Tier.SHARED] = 2, 4
    speed = Speed(Curve(0.01), fetch=fetch, round_trip=0.05)
    made = board(Load(prefills=(0.1,), fetching=0.25), speed=speed, weights=Weights(work=3.0, others=0.0))
    estimate = made.estimate(Reach(np.array([2]), np.array([6]), tiers), 1000, 100, 0.0)
    seconds = 0.05 + 0.25 + 400 * 2e-3
    compute, first = (4.0, seconds + 4.0) if used else (8.0, 8.1)
    assert estimate.start[0] == (600 if used else 200)
    assert estimate.first_token[0] == pytest.approx(first)
    assert estimate.cost[0] == pytest.approx(first + 2.0 * (compute + (seconds if used else 0.0)))


def test_what_is_coming_is_there_when_it_has_been_computed() -> None:
    tiers = np.zeros((len(Tier), 1), np.int64)
    tiers[Tier.COMING] = 5
    made = board(Load(prefills=(7.0,)), speed=Speed(Curve(0.01)))
    estimate = made.estimate(Reach(np.array([5]), np.array([5]), tiers), 600, 100, 0.0)
    assert estimate.first_token[0] == pytest.approx(5.0 + 1.0)


def test_decoding_slows_prefill_down_and_a_full_replica_makes_wait() -> None:
    for hold in (1.0, 7.0):
        made = board(Load(prefills=(2.0,), drag=0.5, hold=hold), speed=Speed(Curve(0.01)))
        estimate = made.estimate(nothing(), 400, 100, 0.0)
        assert estimate.first_token[0] == pytest.approx(max(2.0 * 1.5, hold) + 4.0 * 1.5)


def test_a_crowd_costs_later_requests_and_not_this_one() -> None:
    alone, crowded = (board(Load(crowd=crowd)).estimate(nothing(), 400, 100, 0.0) for crowd in (0.0, 2.5))
    assert crowded.first_token[0] == alone.first_token[0]
    assert crowded.cost[0] == pytest.approx(alone.cost[0] + 2.5)


def test_columns_grow_and_keep_their_figures() -> None:
    made = board(Load(prefills=(1.0, 2.0)))
    for column in range(1, 100):
        made.grow()
        made.present(column, SPEED)
    made.absent(50)
    estimate = made.estimate(nothing(100), 640, 64, 0.0)
    assert made.waiting(0, 0.0) == 3.0
    assert np.isinf(estimate.cost[50])
    assert np.isfinite(np.delete(estimate.cost, 50)).all()
    assert estimate.cost[0] > estimate.cost[1] == estimate.cost[99]
