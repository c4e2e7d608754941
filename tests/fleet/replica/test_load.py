"""Tokens of a queue, and what they are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.fleet.replica.load import QueueState, QueueWatch, load_of
from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import Load, Speed
from headstart.fleet.router.slots import SlotTimes

SPEED = Speed(Curve(0.01), fetch=0.001)


@dataclass(eq=False)
class Waiting:
    """What the queue reads of a job, with a prompt of 100 tokens and blocks of 8."""

    choice: int = 0
    reuse: bool = True
    fetch: object = None
    follows: object = None
    held: Any = field(default_factory=lambda: SimpleNamespace(brought={}))
    slot: Any = None
    token: int | None = None

    chain = type("Chain", (), {"block_size": 8, "__len__": lambda self: 100})()

    @property
    def request(self) -> Any:
        return SimpleNamespace(params=SimpleNamespace(reuse=self.reuse))

    @property
    def parked(self) -> bool:
        return self.fetch is not None or self.follows is not None

    @property
    def prefilling(self) -> bool:
        return self.slot is not None and self.token is None


def test_a_job_waits_for_what_is_not_there() -> None:
    watch, looked = QueueWatch(), list[Any]()

    def available(chain: Any) -> int:
        looked.append(chain)
        return 40

    first, second, plain = Waiting(), Waiting(choice=1), Waiting(reuse=False)
    jobs: list[Any] = [first, second, plain]
    for job in jobs:
        watch.arrived(job, available)
    for _ in range(3):
        watch.stepped([], jobs)
    assert watch.state == QueueState(queued=((40, 100), (96, 100), (0, 100)))
    assert looked == [first.chain], "once, not at each step"
    first.slot = range(64)
    running: list[Any] = [first, Waiting(slot=range(7), token=5)]
    watch.stepped(running, jobs[1:])
    assert watch.state == QueueState(((64, 100),), ((96, 100), (0, 100)), 1)
    watch.stepped([], [])
    assert watch.state == QueueState()


def test_a_job_that_gave_its_slot_back_lacks_only_the_rest() -> None:
    """The router saw its whole prompt in the queue, and sent others elsewhere."""
    watch, job, there = QueueWatch(), Waiting(), 0
    known: Any = job
    watch.arrived(known, lambda _: there)
    job.slot, there = range(50), 48
    watch.stepped([known], [])
    job.slot, job.fetch = None, object()
    watch.stepped([], [known])
    assert watch.state == QueueState(queued=((48, 100),), fetching=48)
    job.fetch, there = None, 96
    watch.stepped([], [known])
    assert watch.state == QueueState(queued=((96, 100),))


def test_what_a_fetch_brings_shortens_the_queue() -> None:
    watch, there = QueueWatch(), 16
    job, follower = Waiting(fetch=object()), Waiting()
    follower.follows = job
    jobs: list[Any] = [job, follower]
    for one in jobs:
        watch.arrived(one, lambda _: there)
    watch.stepped([], jobs)
    assert watch.state == QueueState(queued=((16, 100), (16, 100)), fetching=80)
    job.held.brought = {b"block": SimpleNamespace(state=False), b"state": SimpleNamespace(state=True)}
    watch.stepped([], jobs)
    assert watch.state.fetching == 72
    job.fetch, there = None, 88
    watch.stepped([], jobs)
    assert watch.state == QueueState(queued=((88, 100), (16, 100)))
    jobs.pop()  # it was cancelled
    follower.follows = None
    watch.stepped([], jobs)
    assert watch.state == QueueState(queued=((88, 100),))


def test_tokens_become_seconds() -> None:
    times = SlotTimes(4)
    for _ in range(200):
        times.ended(8.0)
    state = QueueState(((0, 100), (50, 100)), ((0, 100), (80, 100)), 2, 500)
    load = load_of(state, SPEED, times, 4, 0.05, 0.25, 1.0)
    assert load.prefills == pytest.approx((1.0, 0.5))
    assert load.queued == pytest.approx(1.2)
    assert load.drag == pytest.approx(0.2)
    assert load.hold == pytest.approx(3 * 8.0 / 4, rel=1e-3), "two wait, and the new one"
    assert load.crowd == pytest.approx(times.crowd(6))
    assert load.fetching == pytest.approx(0.5)
    assert (load.call, load_of(QueueState(((0, 100),)), SPEED, times, 4, 0.05, 0.25, 1.0).call) == (0.25, 1.0)
    assert state.seconds(SPEED.prefill) == pytest.approx(2.7)
    assert load_of(QueueState(), SPEED, times, 4, 0.05, 0.25, 1.0) == Load()
    assert load_of(QueueState(((0, 1),)), Speed(), times, 4, 0.05, 0.25, 1.0).drag == 0.0, "nothing is decoded"
