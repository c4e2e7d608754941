"""What reuse has saved, from requests and from the server's sums."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.cli.top.savings import Savings, of_sums, savings
from scripted_top import request, state


def of(*rows: dict[str, Any]) -> Savings:
    return savings(state(("requests", list(rows))).requests.values())


def cold(number: int, **more: Any) -> dict[str, Any]:
    seconds = {"queued": 0.0, "prefill": 2.0, "ttft": 2.0, "decode": 1.0}
    return request(number, cached=0, live=0, tiers={}, computed=1000, seconds=seconds, **more)


def test_tokens_are_summed_by_tier() -> None:
    found = of(cold(1), request(2), request(3, "queued"), request(4, "failed"))
    assert (found.requests, found.prompt, found.computed, found.cached) == (2, 2000, 1100, 900)
    assert found.tiers == {"live": 500, "memory": 300, "disk": 100}


def test_seconds_saved_use_the_measured_speed() -> None:
    """1,000 tokens took 2 s. A prompt of 1,000 that took 0.2 s saved 1.8 s."""
    found = of(cold(1), request(2, computed=10, cached=990))
    assert found.saved == pytest.approx(1.8)
    assert (found.warm, found.cold) == (0.21, 2.0)
    assert found.decode == pytest.approx((20 + 30) / 2)


def test_without_a_long_prefill_no_seconds_are_claimed() -> None:
    assert of(request(1, computed=10, cached=990)).saved is None
    assert of() == Savings(0, 0, {}, 0, None, None, None, None)


def test_choices_of_a_request_count_its_prompt_once() -> None:
    rows = [cold(1, id="a"), request(2, id="a", choice=1, computed=1, cached=999)]
    assert (of(*rows).prompt, of(*rows).computed) == (1000, 1000)


def test_the_server_s_own_sums() -> None:
    stats = {
        "requests": 7,
        "prompt": 100,
        "tiers": {"live": 60, "disk": 20},
        "computed": 20,
        "saved_seconds": 3.5,
        "ttft": {"warm": {"requests": 6, "median": 0.1}, "cold": {"requests": 1, "median": None}},
        "decode": 50.0,
    }
    assert of_sums(stats) == Savings(7, 100, {"live": 60, "disk": 20}, 20, 3.5, 0.1, None, 50.0)
