"""What a replica asks of the other processes of its fleet, some of which hang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, when it is imported
    pytest.importorskip("ray.serve")
    from ray.serve._private.replica_result import ReplicaResult
    from ray.serve.config import RequestRouterConfig
    from ray.serve.handle import DeploymentBroadcastResponse

    from headstart.fleet.cluster import named_replica, replica, running

pytestmark = pytest.mark.slow  # Ray is an extra of the slow tests


class Call:
    """A process that answers, fails, or hangs (`None`)."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.Event().wait()
        return self._answer


def broadcast(*answers: Any) -> DeploymentBroadcastResponse:
    async def calls() -> list[Call]:
        return [Call(answer) for answer in answers]

    return DeploymentBroadcastResponse(calls(), None)


def test_ray_still_has_what_is_used_of_it() -> None:
    assert asyncio.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)
    assert "get_async" in ReplicaResult.__abstractmethods__


def test_those_that_answer_are_heard_and_the_others_counted() -> None:
    answers, others = asyncio.run(replica._in_time(broadcast("a", None, ValueError(), "b"), 0.05))
    assert (sorted(answers), others) == (["a", "b"], 2)


class Handle:
    def __init__(self, *answers: Any) -> None:
        self._answers = answers

    def broadcast(self, method: str, *arguments: Any) -> DeploymentBroadcastResponse:
        return broadcast(*self._answers)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> dict[str, Handle]:
    """The handles of the fleet's deployments, by name."""
    handles: dict[str, Handle] = {}
    monkeypatch.setattr(replica, "_handle", handles.__getitem__)
    monkeypatch.setattr(replica, "LATE", 0.05)
    monkeypatch.setattr(replica._in_time, "__defaults__", (0.05,))
    monkeypatch.setattr(running.Running, "names", frozenset({"a", "b"}))
    return handles


def test_a_status_names_who_does_not_answer(fleet: dict[str, Handle]) -> None:
    fleet[replica.FRONT], fleet[replica.REPLICA] = Handle([], None), Handle({"replica": "a"}, None)
    found = asyncio.run(replica.RayFleet().status())
    assert found["fronts"] == [[]]
    assert found["replicas"] == [{"replica": "a"}]
    assert found["silent"] == {"fronts": 1, "replicas": [replica.replica_tag("b")]}


def test_metrics_name_who_does_not_answer(fleet: dict[str, Handle]) -> None:
    fleet[replica.REPLICA] = Handle((replica.replica_tag("a"), b"page"), None)
    found = asyncio.run(replica.RayFleet().metrics())
    assert found == {replica.replica_tag("a"): b"page", replica.replica_tag("b"): b""}


def test_a_front_that_hangs_does_not_keep_reports_from_the_others(fleet: dict[str, Handle]) -> None:
    card = replica.ModelCard(b"f" * 32, 64, False, 1024)
    fleet[replica.FRONT] = Handle(None, True, False)
    assert sorted(asyncio.run(replica.RayFleet().send(b"", card))) == [False, True]
    fleet[replica.FRONT] = Handle(None)
    with pytest.raises(TimeoutError):
        asyncio.run(replica.RayFleet().send(b"", card))


def test_a_replica_learns_that_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "WATCH", 0.001)

    async def run() -> list[bool]:
        waiting, seen = asyncio.ensure_future(running.stopped("a", 0.05)), []
        for names in ((), ("a", "b"), ("b",), ("a",)):  # it is not known yet; it runs; Ray's list is short of it for a moment
            monkeypatch.setattr(running.Running, "names", frozenset(names))
            await asyncio.sleep(0.2 if names != ("b",) else 0.01)
            seen.append(waiting.done())
        monkeypatch.setattr(running.Running, "names", frozenset())
        await asyncio.wait_for(waiting, 5)
        return seen

    assert not any(asyncio.run(run()))


COPIED = """
import asyncio, pickle, sys
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from headstart.fleet.cluster import named_replica, running

async def run():
    router = copied(DeploymentID("Replica", "headstart"), DeploymentHandleSource.UNKNOWN, self_actor_id="x")
    router.update_replicas([])

copied = pickle.loads(sys.stdin.buffer.read())
assert copied is not named_replica.NamedReplica
running.Running.names = frozenset({"a"})
asyncio.run(run())
assert not running.Running.names
"""


def test_a_router_that_ray_has_copied_says_which_replicas_run() -> None:
    """Fault: Ray pickles the module of a router by value, and nobody read what the copy wrote down in it."""
    path = f"{named_replica.NamedReplica.__module__}:{named_replica.NamedReplica.__name__}"
    copy = RequestRouterConfig(request_router_class=path).get_serialized_request_router_cls()
    subprocess.run([sys.executable, "-W", "ignore", "-c", COPIED], input=copy, check=True, timeout=120)
