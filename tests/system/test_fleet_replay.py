"""Recorded traffic on a real fleet, as `benchmarks.fleet_replay` sends it: no replica computes what another one has."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from benchmarks.fleet import FleetWorkload
from benchmarks.fleet_replay import ROUTERS, beginning, real

from headstart.fleet.simulator.simulation import bound, simulate
from headstart.traces import sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("router", ROUTERS)
def test_a_fleet_computes_about_what_an_infinite_cache_computes(router: str) -> None:
    work = FleetWorkload(beginning(sample(), 60, 20.0), 0.5, 8, 0.25)
    plan = work.plan(2, 0.4, shared=True)
    served, measured, _ = real(work, plan, router)
    assert len(served) == len(work.trace.requests)
    best = bound(work.trace, plan).computed
    chance = len(served)  # the bound has whole blocks; what is behind them may begin with the same token by chance
    assert best - chance <= sum(one.computed for one in served) <= 1.2 * best
    assert simulate(work.trace, router, measured).computed <= 1.2 * best
