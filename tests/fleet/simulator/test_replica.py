"""A simulated replica, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headstart.fleet.router.chains import PromptChain
from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import RUMOUR, Speed, Tier
from headstart.fleet.simulator.machine import Machine
from headstart.fleet.simulator.replica import Replica, SimulatedRequest
from headstart.fleet.simulator.tiers import BlockLru
from headstart.serving.prefill import AGEING

SPEED = Speed(Curve(0.01), memory=0.0, disk=0.0, fetch=0.001, round_trip=0.5)


def machine(*, slots: int = 4, memory: float = 10_000, disk: float = 0.0) -> Machine:
    return Machine(SPEED, step=0.05, step_reply=0.0, stall=0.05, slots=slots, memory=memory, disk=disk)


def replica(*, shared: BlockLru | None = None, slots: int = 4, memory: float = 10_000, disk: float = 0.0) -> Replica:
    return Replica("a", machine(slots=slots, memory=memory, disk=disk), BlockLru(0) if shared is None else shared, 100)


def job(number: int, *blocks: int, reply: float = 0.0, arrived: float = 0.0) -> SimulatedRequest:
    return SimulatedRequest(number, PromptChain([2 * one for one in blocks], 100 * len(blocks) + 100, 100), arrived, reply)


def run(served: Replica, *jobs: SimulatedRequest) -> list[SimulatedRequest]:
    """Serves requests to the end."""
    for one in sorted(jobs, key=lambda one: one.arrived):
        while served.next_event() < one.arrived:
            served.advance(served.next_event())
            served.step()
        served.advance(one.arrived)
        served.arrive(one)
        served.step()
    while served.next_event() < math.inf:
        served.advance(served.next_event())
        served.step()
    return list(jobs)


def test_a_prompt_alone() -> None:
    (only,) = run(replica(), job(0, 1, 2))
    assert (only.first_token, only.computed) == (pytest.approx(3.0), 300)


def test_the_shortest_prompt_is_computed_first() -> None:
    long, short, alike = run(replica(), job(0, *range(1, 10)), job(1, 20, arrived=1.0), job(2, *range(1, 8), arrived=1.0))
    assert short.first_token == pytest.approx(1.0 + 2.0)
    assert (long.first_token, alike.first_token) == (pytest.approx(12.0 + 1.0), pytest.approx(1.0 + 2.0 + 6.0 + 1.0))
    assert alike.computed == 100


def test_a_prompt_that_has_waited_is_not_overtaken_any_longer() -> None:
    short = [job(number, 10 + number, arrived=1.9 * number) for number in range(1, 60)]
    long, *_ = run(replica(slots=64), job(0, *range(100, 109)), *short)
    assert 50.0 < long.first_token < 110.0, "ten seconds, and in 100 seconds nine of ten seconds for the others"
    assert Machine().ageing == AGEING


def test_or_prompts_take_turns() -> None:
    served = Replica("a", replace(machine(), ageing=None), BlockLru(0), 100)
    long, short = run(served, job(0, *range(1, 10)), job(1, 20, arrived=1.0))
    assert short.first_token == pytest.approx(1.0 + 4.0)
    assert long.first_token == pytest.approx(12.0)


def test_a_call_that_runs_is_not_interrupted() -> None:
    served = Replica("a", replace(machine(), call=4.0), BlockLru(0), 100)
    _, short = run(served, job(0, *range(1, 20)), job(1, 20, arrived=1.0))
    assert short.first_token == pytest.approx(1.0 + 2.0 + 2.0)


def test_replies_and_prefill_slow_each_other_down() -> None:
    reply, prompt = run(replica(), job(0, 1, reply=10), job(1, 20, arrived=2.0))
    assert reply.first_token == pytest.approx(2.0)
    assert prompt.first_token == pytest.approx(2.0 + 1.0 + 1.5), "half of the time while ten tokens are decoded, then all"


def test_requests_wait_for_a_slot_in_order() -> None:
    served = run(replica(slots=1), job(0, 1, reply=20), job(1, 20), job(2, 30))
    assert [one.first_token for one in served] == [pytest.approx(2.0), pytest.approx(5.0), pytest.approx(7.0)]


def test_a_prompt_waits_for_another_that_computes_its_prefix() -> None:
    first, second = run(replica(), job(0, 1, 2, 3, 4), job(1, 1, 2, 3, 9, arrived=1.0))
    assert (first.computed, second.computed) == (500, 200)
    assert first.first_token == pytest.approx(5.0), "it has less left than the one that waited"
    assert second.first_token == pytest.approx(7.0)


def test_what_a_running_reply_has_can_be_used() -> None:
    served = replica(memory=0.0)
    first, second = run(served, job(0, 1, 2, 3, reply=1000), job(1, 1, 2, 3, 4, arrived=5.0))
    assert (first.computed, second.computed) == (400, 200)


def test_memory_and_disk_keep_blocks() -> None:
    served = replica(memory=300, disk=500)
    run(served, job(0, 1, 2, 3), job(1, 11, 12, 13, arrived=10), job(2, 1, 2, 3, 4, arrived=20))
    report = served.report()
    assert report.done == report.arrived == ("0", "1", "2")
    assert set(report.added[Tier.MEMORY]) == {2, 4, 6}
    assert set(report.added[Tier.DISK]) == {2, 4, 6, 8, 22}
    assert served.report().added == {}
    (third,) = run(served, job(3, 1, 2, 3, 4, arrived=30))
    assert third.computed == 100


def test_a_fetch_is_over_before_the_slot() -> None:
    shared = BlockLru(100)
    shared.use([2, 4, 6, 8, 10, 12])
    fetching, other = run(replica(shared=shared), job(0, 1, 2, 3, 4, 5, 6), job(1, 20))
    assert (fetching.computed, fetching.fetched) == (100, 600)
    assert fetching.first_token == pytest.approx(0.5 + 0.6 + 1.0 + 0.9), "others compute while it is fetched"
    assert other.first_token == pytest.approx(2.0)


def test_what_was_evicted_while_it_waited_is_fetched_once_more() -> None:
    """Fault: it was computed, though the shared tier has it. The replica asks again (`serving.late_fetch`)."""
    shared = BlockLru(100)
    shared.use([2, 4, 6, 8])
    served = replica(shared=shared, slots=1, memory=500)
    _, _, waited = run(served, job(0, 20, reply=100), job(1, 31, 32, 33, 34, 35, arrived=1.0), job(2, 1, 2, 3, 4, arrived=2.0))
    assert waited.first_token > 10.0, "it waited for a slot, and another prompt filled the memory"
    assert (waited.computed, waited.fetched) == (100, 800)


def test_what_is_computed_faster_is_not_fetched() -> None:
    shared = BlockLru(100)
    shared.use([2])
    slow = Machine(Speed(Curve(0.001), fetch=0.001, round_trip=0.5), slots=1)
    (only,) = run(Replica("a", slow, shared, 100), job(0, 1))
    assert (only.computed, only.fetched) == (200, 0)


def test_rumours_are_withdrawn_when_they_are_old_or_wrong() -> None:
    shared = BlockLru(2)
    served = replica(shared=shared, memory=0.0)
    run(served, job(0, 1, 2))
    served.publish()
    assert served.report().added[Tier.SHARED] == [2, 4]
    shared.use([98, 100])
    run(served, job(1, 1, 2, arrived=10.0))
    assert served.report().removed[Tier.SHARED] == [2]
    served.advance(RUMOUR + 10.0)
    assert served.report().removed[Tier.SHARED] == [4]


def test_a_report_has_the_load() -> None:
    served = replica(slots=2)
    served.arrive(job(0, 1, reply=100))
    served.step()
    served.advance(2.0)
    served.step()
    served.arrive(job(1, 20, 21))
    served.arrive(job(2, 30))
    served.step()
    load = served.report().load
    assert (load.prefills, load.queued, load.drag) == (pytest.approx((3.0,)), pytest.approx(2.0), pytest.approx(1.0))
    assert served.report().sequence == 1
