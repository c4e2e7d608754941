"""Gateway: the front in handle mode. It reads each request, chooses a replica, and passes its answer on.

client ──▶ Ray's proxy ──▶ gateway ──(handle)──▶ the chosen replica
                              └── reads the body, tokenises the prompt, asks the router

If the replica dies or cannot be reached before its answer has begun, the request goes to another one. Afterwards the client's
stream breaks, as it does when a single server is killed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.api.errors import CLIENT_CLOSED, answer
from headstart.api.incoming import MAX_BODY, given_id, whole_body
from headstart.errors import RequestError, Unavailable
from headstart.fleet.cluster import bridge
from headstart.fleet.cluster.booked import BOOKING
from headstart.fleet.cluster.fronting import FrontProcess
from headstart.fleet.cluster.named_replica import ARGUMENT
from headstart.fleet.cluster.running import Running
from headstart.fleet.cluster.setup import FleetSetup
from headstart.fleet.cluster.starting import reasoned
from headstart.fleet.front.front import Front
from headstart.fleet.front.hot import HotStretch
from headstart.fleet.model_card import ModelCard

TRIES = 2
"""Replicas that a request is sent to before it fails. A prompt that kills its process must not kill them all."""
ARRIVES = 5.0
"""Seconds until a call must have reached its replica. A machine that is gone refuses no connection."""
GONE = (RayActorError, DeploymentUnavailableError, BackPressureError, TimeoutError)
"""Ends of a call whose replica is dead or cannot be reached."""

log = structlog.get_logger("headstart.fleet")


class ReplicaAnswer(Protocol):
    """Batches of the ASGI messages of an answer; an empty one first. `cancel` ends the call, if it is not over."""

    def __aiter__(self) -> AsyncIterator[list[Message]]: ...

    def cancel(self) -> None: ...


class Gateway:
    """The front as the ingress deployment. Ray calls its methods."""

    async def __init__(self, setup: FleetSetup, replicas: DeploymentHandle) -> None:  # type: ignore[misc]  # Ray awaits it
        with reasoned():
            self._process = FrontProcess(setup)
        self._forgetting = asyncio.create_task(self._process.forget())
        self._replicas = replicas.options(stream=True)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return GatewayApp(self._process.front, self._ask)

    async def report(self, report: bytes, card: ModelCard) -> bool:
        return await self._process.report(report, card)

    async def hottest(self, fingerprint: bytes, tokens: int) -> Sequence[HotStretch]:
        return await self._process.hottest(fingerprint, tokens)

    async def status(self) -> list[dict[str, Any]]:
        return self._process.status()

    def _ask(self, replica: str, scope: Mapping[str, Any], body: bytes) -> ReplicaAnswer:
        answer: ReplicaAnswer = self._replicas.serve.remote(scope, body, **{ARGUMENT: replica})
        return answer


class GatewayApp:
    """The ASGI app of a gateway.

    Args:
        ask: sends a request to a replica.
    """

    def __init__(self, front: Front, ask: Callable[[str, Mapping[str, Any], bytes], ReplicaAnswer]) -> None:
        self._front = front
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await lifespan(receive, send)
            return
        headers = MutableHeaders(scope=scope)
        request = scope["request_id"] = headers["x-request-id"] = given_id(headers) or f"req_{uuid.uuid4().hex}"
        try:
            body = await whole_body(Request(scope, receive), MAX_BODY)
            await self._pass_on(request, scope, body, send)
        except RequestError as error:
            await answer(error, scope)(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=CLIENT_CLOSED)(scope, receive, send)

    async def _pass_on(self, request: str, scope: Scope, body: bytes, send: Send) -> None:
        front, path, headers = self._front, scope["path"], MutableHeaders(scope=scope)
        tried: set[str] = set()
        for _ in range(TRIES):
            chosen = await front.route(path, headers, body, running=Running.names, without=tried)
            if chosen is None:
                break
            begun, replica = False, chosen.replica
            headers[BOOKING] = chosen.booking
            answer = self._ask(replica, bridge.carried(scope), body)
            try:
                batches = aiter(answer)
                async with asyncio.timeout(ARRIVES):
                    await anext(batches)
                async for messages in batches:
                    for message in messages:
                        begun = True
                        await send(message)
                return
            except GONE as error:
                tried.add(replica)
                front.leave(replica)  # if it is well, its next report brings it back
                log.warning("a replica failed", replica=replica, error=type(error).__name__, id=request, begun=begun)
                if begun:
                    raise
            finally:
                answer.cancel()
                front.close(chosen.booking)
        raise Unavailable("No replica of the fleet can serve this request now; try again in 5 s.", retry_after=5.0)


async def lifespan(receive: Receive, send: Send) -> None:
    """Answers what is not HTTP: the app's life. There are no web sockets."""
    while True:
        kind = (await receive())["type"]
        if not kind.startswith("lifespan"):
            await send({"type": "websocket.close"})
            return
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
