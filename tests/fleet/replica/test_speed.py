"""What a replica measures of itself."""

from __future__ import annotations

import pytest

from headstart.fleet.replica.speed import Speedometer
from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import Speed


def nothing(size: int) -> None:
    return None


def test_it_finds_the_curve_of_its_engine() -> None:
    meter, curve = Speedometer(), Curve(0.002, 1e-7)
    assert meter.speed(64, nothing) == Speed(), "nothing was measured"
    for start in range(0, 20_000, 500):
        meter.prefilled(start, start + 500, curve.seconds(start, start + 500))
    meter.prefilled(0, 500, 0.0)  # a clock that stands still says nothing
    found = meter.speed(64, nothing).prefill
    assert found.per_token == pytest.approx(curve.per_token, rel=1e-3)
    assert found.per_depth == pytest.approx(curve.per_depth, rel=1e-3)


def test_it_tells_memory_from_disk() -> None:
    meter = Speedometer()
    for _ in range(40):
        meter.restored({"memory": 1000, "disk": 0}, 0.02)
        meter.restored({"memory": 500, "disk": 500}, 0.06)
        meter.restored({}, 0.1)
    speed = meter.speed(64, nothing)
    assert speed.memory == pytest.approx(2e-5, rel=1e-3)
    assert speed.disk == pytest.approx(1e-4, rel=1e-3)
    assert speed.fetch is None


def test_fetching_is_what_the_store_says() -> None:
    speed = Speedometer().speed(64, lambda size: 0.003 + size / 1e8)
    assert speed.fetch == pytest.approx(64 / 1e8)
    assert speed.round_trip == pytest.approx(0.003)


def test_a_step_is_smoothed() -> None:
    meter = Speedometer()
    meter.decoded(0.1)
    assert meter.step == 0.1
    meter.decoded(0.2)
    assert meter.step == pytest.approx(0.13)
