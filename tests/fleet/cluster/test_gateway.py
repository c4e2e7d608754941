"""The gateway: a request and its answer, with replicas that die. Ray itself is not needed for that, its errors are."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from headstart.fleet.front.front import Front
from headstart.fleet.model_card import ModelCard
from headstart.fleet.router.chains import PromptChain
from headstart.fleet.router.reports import Load, ReplicaReport

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, when it is imported
    pytest.importorskip("ray.serve")
    from ray.exceptions import ActorDiedError, ActorUnavailableError
    from ray.serve.exceptions import BackPressureError

    from headstart.fleet.cluster import gateway, running
    from headstart.fleet.cluster.booked import BOOKING

pytestmark = pytest.mark.slow  # Ray is an extra of the slow tests

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


class Unread:
    def chain(self, card: ModelCard, path: str, headers: Headers, body: bytes) -> PromptChain | None:
        return None


class Scripted:
    """The answer of a replica: messages, or errors. `None` waits for ever; at the beginning, the call does not arrive."""

    def __init__(self, script: list[Message | BaseException | None]) -> None:
        self._script = script
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        if self._script[0] is not None:
            yield []
        for one in self._script:
            if isinstance(one, BaseException):
                raise one
            if one is None:
                await asyncio.Event().wait()
            assert one is not None
            yield [one]

    def cancel(self) -> None:
        self.cancelled = True


class Fleet:
    """A gateway before replicas with scripts."""

    def __init__(self, **scripts: list[Message | BaseException | None]) -> None:
        self.front = Front(Unread())
        self.asked: list[str] = []
        self.answers: list[Scripted] = []
        self.headers: list[Headers] = []
        self._scripts = scripts
        for name in scripts:
            self.front.report(ReplicaReport(name, 1, 0), ModelCard(b"f" * 32, 64, False, 1024))
        self.app = gateway.GatewayApp(self.front, self._ask)

    def _ask(self, replica: str, scope: Mapping[str, Any], body: bytes) -> Scripted:
        self.asked.append(replica)
        self.headers.append(Headers(raw=scope["headers"]))
        self.answers.append(Scripted(self._scripts[replica]))
        return self.answers[-1]

    def post(self, content: bytes = b"{}", timeout: float = 30.0, **headers: str) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client, asyncio.timeout(timeout):
                return await client.post("/v1/chat/completions", content=content, headers=headers)

        return asyncio.run(run())


def body(text: bytes) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": False}


def test_an_answer_is_passed_on() -> None:
    fleet = Fleet(a=[START, body(b"hello")])
    assert fleet.post().text == "hello"
    assert all(answer.cancelled for answer in fleet.answers), "nothing is left running"


def test_requests_with_one_id_are_passed_on_with_bookings_of_the_fronts_own() -> None:
    fleet = Fleet(a=[START, body(b"hello")])
    for _ in range(2):
        fleet.post(**{"x-request-id": "mine", BOOKING: "f" * 32})
    assert [headers.getlist("x-request-id") for headers in fleet.headers] == [["mine"]] * 2
    one, other = (headers.getlist(BOOKING) for headers in fleet.headers)
    assert len(one) == len(other) == 1
    assert len({*one, *other, "f" * 32}) == 3


ENDS = [ActorDiedError(), ActorUnavailableError("gone", None), BackPressureError(1, 0), None]


@pytest.mark.parametrize("end", ENDS, ids=type)
def test_a_replica_that_is_gone_before_its_answer_is_replaced(end: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "ARRIVES", 0.2)
    fleet = Fleet(a=[end], b=[START, body(b"hello")])
    fleet.front.report(ReplicaReport("b", 1, 1, Load(queued=100.0)), ModelCard(b"f" * 32, 64, False, 1024))
    assert fleet.post().text == "hello"
    assert fleet.asked == ["a", "b"]


def test_a_replica_that_dies_in_its_answer_breaks_the_stream() -> None:
    fleet = Fleet(a=[START, {**body(b"hel"), "more_body": True}, ActorDiedError()], b=[ActorDiedError()])
    fleet.front.leave("b")
    with pytest.raises(ActorDiedError):
        fleet.post()


def test_a_prompt_that_kills_its_replica_does_not_kill_them_all() -> None:
    fleet = Fleet(a=[ActorDiedError()], b=[ActorDiedError()], c=[ActorDiedError()])
    answer = fleet.post()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert len(fleet.asked) == gateway.TRIES == 2


def test_no_replica() -> None:
    assert Fleet().post().status_code == 503


def test_a_request_does_not_wait_without_limit_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "ARRIVES", 0.2)
    fleet = Fleet(a=[None], b=[None])
    answer = fleet.post()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert all(answer.cancelled for answer in fleet.answers)


def test_a_body_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_BODY", 10)
    fleet = Fleet(a=[START, body(b"hello")])
    assert fleet.post(b"x" * 11).status_code == 413
    assert not fleet.asked


def test_a_client_that_hangs_up_before_its_body_is_there_reaches_no_replica() -> None:
    fleet = Fleet(a=[START, body(b"hello")])
    received = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Message] = []

    async def receive() -> Message:
        return next(received)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    asyncio.run(fleet.app(scope, receive, send))
    assert sent[0]["status"] == 499
    assert not fleet.asked


def test_a_client_that_has_gone_ends_the_call() -> None:
    fleet = Fleet(a=[START, None])
    with pytest.raises(TimeoutError):
        fleet.post(timeout=0.1)
    assert fleet.answers[0].cancelled


def test_replicas_that_ray_stops_get_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(a=[START, body(b"hello")], b=[START, body(b"hello")])
    monkeypatch.setattr(running.Running, "names", frozenset({"b"}))
    for _ in range(4):
        fleet.post()
    assert set(fleet.asked) == {"b"}


def test_replicas_that_run_get_requests_though_none_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(a=[ActorDiedError()], b=[START, body(b"hello")])
    for name in "ab":
        fleet.front.leave(name)
    monkeypatch.setattr(running.Running, "names", frozenset({"a", "b"}))
    assert {fleet.post().text for _ in range(8)} == {"hello"}


def test_no_replica_runs_though_all_have_reported_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(a=[START, body(b"hello")])
    monkeypatch.setattr(running.Running, "names", frozenset())
    assert fleet.post().status_code == 503
    assert not fleet.asked
