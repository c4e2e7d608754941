"""The simulation of a trace with a fleet, and its bound."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from headstart.fleet.router.chains import PromptChain
from headstart.fleet.simulator.machine import FleetPlan
from headstart.fleet.simulator.replica import Replica, SimulatedRequest
from headstart.fleet.simulator.routings import ROUTINGS, Routing
from headstart.fleet.simulator.tiers import BlockLru
from headstart.traces import Trace, TracedRequest

BOUND = "bound"


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request of the trace: its replica (-1 for the bound), the seconds to its first token, and the tokens computed."""

    replica: int
    first_token: float
    computed: int


@dataclass(frozen=True, slots=True)
class FleetResult:
    """What a fleet did with a trace.

    Attributes:
        prompt: tokens of all prompts.
        computed: tokens that were computed.
        fetched: tokens that came from the shared tier.
        mean, p50, p90, p99: seconds to the first token.
        busy: share of its time in which a replica prefills, as the mean over the replicas.
        busiest: prefill seconds of the busiest replica, in means.
        requests: each request, in the trace's order.
    """

    router: str
    shared: bool
    prompt: int
    computed: int
    fetched: int
    mean: float
    p50: float
    p90: float
    p99: float
    busy: float
    busiest: float
    requests: tuple[ServedRequest, ...] = field(repr=False)


def simulate(trace: Trace, router: str | Routing, plan: FleetPlan) -> FleetResult:
    """Replays a trace with a fleet. `router`: a name in `ROUTINGS`, or a rule."""
    rule = ROUTINGS[router](plan.replicas, random.Random(plan.seed)) if isinstance(router, str) else router
    simulation = _Simulation(trace, rule, plan)
    simulation.run()
    jobs, replicas = [simulation.jobs[number] for number in range(len(trace.requests))], simulation.replicas
    span = max(1e-9, simulation.end - trace.requests[0].at) if trace.requests else 1.0
    served = [ServedRequest(simulation.places[job.number], job.first_token - job.arrived, job.computed) for job in jobs]
    work = [replica.busy for replica in replicas]
    mean = sum(work) / len(work)
    fetched = sum(job.fetched for job in jobs)
    name = router if isinstance(router, str) else type(router).__name__
    return _result(name, trace, plan, served, fetched, mean / span, max(work) / mean if mean else 1.0)


def bound(trace: Trace, plan: FleetPlan) -> FleetResult:
    """What no fleet of these machines can beat: an infinite cache that is everywhere at once, and no request waits."""
    known: set[int] = set()
    served, seconds = [], 0.0
    for request in trace.requests:
        blocks = request.blocks.tolist()
        start = next((depth for depth, block in enumerate(blocks) if block not in known), len(blocks)) * trace.block_size
        known.update(blocks)
        first_token = plan.machine.speed.prefill.seconds(start, request.prompt) + start * plan.machine.speed.memory
        seconds += first_token
        served.append(ServedRequest(-1, first_token, request.prompt - start))
    span = max(1e-9, trace.requests[-1].at - trace.requests[0].at) if trace.requests else 1.0
    return _result(BOUND, trace, plan, served, 0, seconds / plan.replicas / span, 1.0)


def _result(
    router: str, trace: Trace, plan: FleetPlan, served: list[ServedRequest], fetched: int, busy: float, busiest: float
) -> FleetResult:
    times = np.array([one.first_token for one in served] or [0.0])
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    computed = sum(one.computed for one in served)
    mean, shared = float(times.mean()), plan.shared > 0
    return FleetResult(router, shared, trace.tokens, computed, fetched, mean, p50, p90, p99, busy, busiest, tuple(served))


class _Simulation:
    """Events in the order of time; those of one time in the order in which they were scheduled.

    A session sends a request when the reply to its last one is complete, and not before its recorded pause is over.
    """

    def __init__(self, trace: Trace, rule: Routing, plan: FleetPlan) -> None:
        shared = BlockLru(plan.shared // trace.block_size)
        self.now = self.end = trace.requests[0].at if trace.requests else 0.0
        self.jobs: dict[int, SimulatedRequest] = {}
        self.places: dict[int, int] = {}
        self.replicas = [Replica(str(one), plan.machine, shared, trace.block_size) for one in range(plan.replicas)]
        self._trace, self._rule, self._plan = trace, rule, plan
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._wakes = [0] * plan.replicas
        self._reporting = [False] * plan.replicas
        self._reported = [-plan.interval] * plan.replicas
        self._sessions: dict[int, deque[int]] = {}

    def run(self) -> None:
        for one in range(len(self.replicas)):
            self.replicas[one].advance(self.now)
            if self._rule.listens:
                self._rule.report(self.replicas[one].report(), self.now)
        for number, request in enumerate(self._trace.requests):
            if request.session < 0:
                self._send(number, request.at)
            else:
                self._sessions.setdefault(request.session, deque()).append(number)
        for numbers in self._sessions.values():
            self._send(numbers[0], self._trace.requests[numbers[0]].at)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _send(self, number: int, time: float) -> None:
        self._at(time, lambda: self._arrive(number, self._trace.requests[number]))

    def _continue(self, job: SimulatedRequest) -> None:
        """A reply is complete: its session goes on."""
        self.end = self.now
        requests = self._trace.requests
        following = self._sessions.get(requests[job.number].session)
        if following is not None:
            following.popleft()
            if following:
                pause = requests[following[0]].at - requests[job.number].at
                self._send(following[0], max(self.now, job.arrived + pause))

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def _arrive(self, number: int, request: TracedRequest) -> None:
        keys = (request.blocks.astype(np.int64) << 1).tolist()
        chain = PromptChain(keys, request.prompt, self._trace.block_size)
        place = self._rule.choose(number, request, chain, [one.ongoing for one in self.replicas], self.now)
        job = SimulatedRequest(number, chain, self.now, float(max(0, request.reply - 1)))
        self.jobs[number], self.places[number] = job, place
        self._at(self.now + self._plan.passage_least + self._plan.passage * request.prompt, lambda: self._reach(place, job))

    def _reach(self, place: int, job: SimulatedRequest) -> None:
        self.replicas[place].advance(self.now)
        self.replicas[place].arrive(job)
        self._step(place)

    def _wake(self, one: int, wake: int) -> None:
        if wake == self._wakes[one]:
            self.replicas[one].advance(self.now)
            self._step(one)

    def _step(self, one: int) -> None:
        """Lets a replica do what is due, and schedules what follows."""
        replica = self.replicas[one]
        stepped = replica.step()
        for _ in stepped.prefilled if self._plan.shared else ():
            self._at(self.now + self._plan.publish, lambda: self._publish(one))
        for job in stepped.replied:
            self._continue(job)
        self._wakes[one] += 1
        following, wake = replica.next_event(), self._wakes[one]
        if following < float("inf"):
            self._at(following, lambda: self._wake(one, wake))
        self._report_soon(one)

    def _publish(self, one: int) -> None:
        self.replicas[one].publish()
        self._report_soon(one)

    def _report_soon(self, one: int) -> None:
        if self._rule.listens and not self._reporting[one]:
            self._reporting[one] = True
            self._at(max(self.now, self._reported[one] + self._plan.interval), lambda: self._report(one))

    def _report(self, one: int) -> None:
        self._reporting[one], self._reported[one] = False, self.now
        # A replica's own events are due at this time at the latest; those at this very time may come after it.
        self.replicas[one].advance(self.now)
        report = self.replicas[one].report()
        self._at(self.now + self._plan.delay, lambda: self._rule.report(report, self.now))
