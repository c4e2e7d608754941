from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.tiers.shared.breaker import FAILURES, FIRST, JITTER, MOST, TRIAL, Breaker


def opened(chance: float = 0.0, now: float = 0.0) -> Breaker:
    breaker = Breaker(lambda: chance)
    breaker.succeeded()
    for number in range(1, FAILURES + 1):
        assert breaker.allows(now)
        assert breaker.failed(now) == (number == FAILURES)
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(lambda: 0.0)
    for _ in range(10):
        for _ in range(FAILURES - 1):
            breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.closed
    assert not opened().closed


def test_the_first_failure_is_news_if_no_call_has_succeeded() -> None:
    breaker = Breaker(lambda: 0.0)
    assert [breaker.failed(0.0) for _ in range(FAILURES)] == [True, *[False] * (FAILURES - 2), True]
    breaker.succeeded()
    assert not breaker.failed(FIRST)


def test_one_call_tries_and_its_success_closes_it() -> None:
    breaker = opened()
    assert not breaker.allows(FIRST - 0.01)
    assert breaker.seconds(0.0) == FIRST
    assert breaker.allows(FIRST)
    assert not breaker.allows(FIRST)
    breaker.succeeded()
    assert breaker.closed
    assert breaker.allows(FIRST)
    assert breaker.seconds(FIRST) == 0


def test_waits_double_up_to_a_limit() -> None:
    breaker, now, waits = opened(), 0.0, [FIRST]
    for _ in range(8):
        now += breaker.seconds(now)
        assert breaker.allows(now)
        assert breaker.failed(now)
        waits.append(breaker.seconds(now))
    assert waits == pytest.approx([1, 2, 4, 8, 16, 32, MOST, MOST, MOST])


def test_late_failures_do_not_prolong_a_wait() -> None:
    breaker = opened()
    assert not breaker.failed(0.5)
    assert not breaker.failed(0.9)
    assert breaker.allows(FIRST)


def test_a_call_that_never_reports_does_not_keep_it_open() -> None:
    breaker = opened()
    assert breaker.allows(FIRST)
    assert not breaker.allows(FIRST + TRIAL - 0.1)
    assert breaker.allows(FIRST + TRIAL)


def test_it_can_be_opened_at_once() -> None:
    breaker = Breaker(lambda: 0.0)
    breaker.trip(5.0)
    breaker.trip(5.5)
    assert breaker.seconds(5.0) == FIRST


@given(st.floats(0, 1), st.integers(1, 20))
def test_jitter_shortens_a_wait_by_half_at_most(chance: float, failures: int) -> None:
    breaker, now = opened(chance), 0.0
    wait = FIRST
    for _ in range(failures):
        assert wait * (1 - JITTER) - 1e-6 <= breaker.seconds(now) <= wait + 1e-6
        now += breaker.seconds(now)
        assert breaker.allows(now)
        breaker.failed(now)
        wait = min(MOST, 2 * wait)
