"""Prefill curves, given and learnt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.router.curve import Curve, CurveFit


@given(st.floats(1e-5, 1e-2), st.floats(0, 1e-6), st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 5000))
@examples(100)
def test_a_prompt_costs_the_sum_of_its_calls(flat: float, deep: float, start: int, first: int, second: int) -> None:
    curve = Curve(flat, deep)
    middle, stop = start + first, start + first + second
    assert curve.seconds(start, middle) + curve.seconds(middle, stop) == pytest.approx(curve.seconds(start, stop))
    assert curve.seconds(0, stop) > curve.seconds(start, stop) or start == 0


@given(st.floats(1e-5, 1e-2), st.floats(0, 1e-6))
@examples(40)
def test_a_fit_finds_the_curve_that_was_measured(flat: float, deep: float) -> None:
    true, fit = Curve(flat, deep), CurveFit()
    for start in range(0, 30_000, 512):
        fit.measured(start, start + 512, true.seconds(start, start + 512))
    assert fit.curve.seconds(0, 20_000) == pytest.approx(true.seconds(0, 20_000), rel=0.01)
    assert fit.curve.seconds(20_000, 30_000) == pytest.approx(true.seconds(20_000, 30_000), rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 2048), st.floats(1e-6, 100)), min_size=1, max_size=20))
@examples(100)
def test_no_measurement_makes_a_cost_negative(calls: list[tuple[int, int, float]]) -> None:
    fit = CurveFit()
    for start, tokens, seconds in calls:
        fit.measured(start, start + tokens, seconds)
        assert fit.curve.per_token >= 0
        assert fit.curve.per_depth >= 0
        assert fit.curve.seconds(0, 1000) > 0


def test_a_fit_follows_a_machine_that_became_slower() -> None:
    fit = CurveFit(Curve(1.0))
    for seconds in (0.001, 0.002):
        for start in range(0, 1_000_000, 1000):
            fit.measured(start % 10_000, start % 10_000 + 1000, 1000 * seconds)
    assert fit.curve.seconds(0, 10_000) == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize("call", [(5, 5, 1.0), (5, 4, 1.0), (0, 5, 0.0)])
def test_a_call_computes_something_in_some_time(call: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="a call from"):
        CurveFit().measured(*call)
