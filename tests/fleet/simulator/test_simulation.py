"""A simulated fleet: what must hold for every router and trace."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import Speed
from headstart.fleet.simulator.machine import FleetPlan, Machine
from headstart.fleet.simulator.routings import ROUTINGS
from headstart.fleet.simulator.simulation import FleetResult, bound, simulate
from headstart.interfaces.tokens import as_tokens
from headstart.traces import Trace, TracedRequest, sample

MACHINE = Machine(Speed(Curve(0.01, 1e-6), fetch=0.001), slots=3, memory=2000, stall=0.1)
PROMPTS = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=5), st.floats(0, 20), st.integers(0, 30), st.integers(-1, 3)), max_size=25
)


def trace(prompts: list[tuple[str, float, int, int]], *, block_size: int = 100) -> Trace:
    """Each letter is a block, which stands for all letters before it too."""
    numbers: dict[str, int] = {}
    requests, at = [], 0.0
    for text, pause, reply, session in prompts:
        at += pause
        blocks = [numbers.setdefault(text[:end], len(numbers)) for end in range(1, len(text) + 1)]
        requests.append(TracedRequest(at, as_tokens(blocks), block_size * len(blocks) + 7, reply, session=session))
    return Trace("test", block_size, tuple(requests))


@pytest.mark.parametrize("router", ROUTINGS)
@given(PROMPTS, st.integers(1, 4), st.booleans())
@examples(60)
def test_every_request_is_served_and_not_faster_than_the_bound(
    router: str, prompts: list[tuple[str, float, int, int]], replicas: int, shared: bool
) -> None:
    found = trace(prompts)
    plan = FleetPlan(replicas, MACHINE, math.inf if shared else 0.0)
    result, best = simulate(found, router, plan), bound(found, plan)
    assert len(result.requests) == len(found.requests)
    assert result.prompt == found.tokens
    assert result.computed == sum(one.computed for one in result.requests)
    assert {one.replica for one in result.requests} <= set(range(replicas))
    for one, request in zip(result.requests, found.requests, strict=True):
        assert request.prompt % 100 <= one.computed <= request.prompt
    if all(request.session < 0 for request in found.requests):
        for one, other in zip(result.requests, best.requests, strict=True):
            assert one.computed >= other.computed
            assert one.first_token >= other.first_token - 1e-6


@given(PROMPTS)
@examples(40)
def test_with_one_replica_all_routers_are_equal(prompts: list[tuple[str, float, int, int]]) -> None:
    plan = FleetPlan(1, MACHINE)
    first, *others = (simulate(trace(prompts), router, plan) for router in ROUTINGS)
    for one in others:
        assert [served.computed for served in one.requests] == [served.computed for served in first.requests]
        assert (one.mean, one.p99, one.busy) == pytest.approx((first.mean, first.p99, first.busy))


def test_one_large_replica_computes_what_an_infinite_cache_computes() -> None:
    found = sample(3, seconds=300)
    plan = FleetPlan(1, replace(MACHINE, memory=math.inf, speed=Speed(Curve(1e-5))))
    assert simulate(found, "exact", plan).computed == pytest.approx(bound(found, plan).computed, rel=0.02)


def test_with_a_shared_tier_no_replica_computes_what_another_has_computed() -> None:
    found = sample(3, seconds=300)
    plan = FleetPlan(4, Machine.of(1e-4, 30_000), math.inf)
    best = bound(found, plan).computed
    for router in ROUTINGS:
        with_shared, without = simulate(found, router, plan), simulate(found, router, replace(plan, shared=0.0))
        assert best <= with_shared.computed < 1.1 * best, router
        assert with_shared.computed <= without.computed, router
        assert with_shared.fetched > without.fetched == 0, router


def test_the_exact_router_is_the_best_on_the_generated_trace() -> None:
    """On so short a beginning of it, others come close by chance."""
    found = sample(0, seconds=600)
    plan = FleetPlan(4, Machine.of(0.004, 60_000), math.inf)
    results = {router: simulate(found, router, plan) for router in ROUTINGS}
    exact = results.pop("exact")
    assert exact.mean < 1.03 * min(one.mean for one in results.values())


def test_late_reports_make_the_exact_router_worse_but_not_wrong() -> None:
    found = sample(0, seconds=600)
    plan = FleetPlan(4, Machine.of(0.004, 60_000))
    fresh, late = (simulate(found, "exact", replace(plan, delay=delay)) for delay in (0.0, 60.0))
    assert fresh.mean < late.mean < simulate(found, "round-robin", plan).mean


def test_a_session_waits_for_its_reply() -> None:
    slow = FleetPlan(2, replace(MACHINE, speed=Speed(Curve(1.0))))
    apart = simulate(trace([("a", 0, 5, -1), ("b", 1, 5, -1)]), "round-robin", slow)
    session = simulate(trace([("a", 0, 5, 0), ("b", 1, 5, 0)]), "round-robin", slow)
    assert [one.first_token for one in apart.requests] == [pytest.approx(107), pytest.approx(107)]
    assert [one.first_token for one in session.requests] == [pytest.approx(107), pytest.approx(107)]
    assert session.busy < apart.busy, "the second one began later"


def test_an_empty_trace() -> None:
    result: FleetResult = simulate(Trace("none", 64, ()), "exact", FleetPlan(2, MACHINE))
    assert (result.prompt, result.computed, result.p99) == (0, 0, 0.0)
    assert bound(Trace("none", 64, ()), FleetPlan(2, MACHINE)).requests == ()


def test_a_request_passes_http_before_it_reaches_its_replica() -> None:
    found = trace([("ab", 0.0, 3, -1), ("ab", 100.0, 3, -1)])
    plan = FleetPlan(1, MACHINE)
    longer = replace(plan, passage_least=0.5, passage=1e-3)
    for one, other in zip(simulate(found, "exact", longer).requests, simulate(found, "exact", plan).requests, strict=True):
        assert one.first_token == pytest.approx(other.first_token + 0.5 + 1e-3 * 207)
        assert one.computed == other.computed
