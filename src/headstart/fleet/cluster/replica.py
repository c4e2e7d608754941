"""Replica: a member of the fleet as a deployment of Ray Serve.

In handle mode a front calls `serve`. In direct mode HAProxy sends requests to the app, on the replica's own port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from starlette.types import ASGIApp, Message

from headstart.api.cache.actions import ChainAnswer, ChainRequest
from headstart.api.garbage import Garbage
from headstart.fleet.cluster import bridge
from headstart.fleet.cluster.member import LATE, Member
from headstart.fleet.cluster.running import Running, stopped, watch
from headstart.fleet.cluster.setup import APPLICATION, FRONT, REPLICA, FleetSetup
from headstart.fleet.cluster.starting import reasoned
from headstart.fleet.front.affinity import replica_tag
from headstart.fleet.front.hot import HotStretch
from headstart.fleet.model_card import ModelCard

PATIENCE = 3.0
"""Seconds to wait for the processes of a fleet that are asked for their figures."""


CHAIN_PATIENCE = 30.0
"""Seconds to wait for those that do something with a chain: they wait for their engine and disk."""
_SILENT = "Some servers of the fleet did not answer ({}). Try again, so that they do it too."


class RayReplica:
    """One replica. Ray calls its methods."""

    async def __init__(self, setup: FleetSetup) -> None:  # type: ignore[misc]  # Ray awaits it
        name = serve.get_replica_context().replica_id.to_full_id_str()
        self._member = Member(setup, name)
        with reasoned():
            await self._member.start(RayFleet())
        self._garbage = Garbage(self._member.idle)
        self._ending = asyncio.create_task(self._end(name, setup.grace))

    async def _end(self, name: str, grace: float) -> None:
        await watch()
        await stopped(name, grace)
        self._member.end_replies()

    async def serve(self, scope: Mapping[str, Any], body: bytes, *, replica: str = "") -> AsyncIterator[list[Message]]:
        """Serves one HTTP call. `replica` is for the router (`named_replica`). First comes an empty batch: it has arrived."""
        yield []
        async for messages in bridge.call(self._member.app, scope, body):
            yield messages

    def __serve_build_asgi_app__(self) -> ASGIApp:  # in direct mode
        return self._member.app

    async def figures(self) -> dict[str, Any]:
        return asdict(self._member.figures())

    async def metrics(self) -> tuple[str, bytes]:
        return self._member.metrics()

    async def explain(self, tenant: str, salt: str, request_id: str | None) -> dict[str, Any] | None:
        return self._member.explain(tenant, salt, request_id)

    async def chain(self, asked: ChainRequest) -> ChainAnswer:
        return await self._member.chain(asked)

    async def check_health(self) -> None:
        self._member.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"waiting": self._member.waiting()}

    async def __del__(self) -> None:
        member = getattr(self, "_member", None)
        if member is not None:  # else the constructor failed
            await member.close()
        garbage = getattr(self, "_garbage", None)
        if garbage is not None:
            garbage.close()


class RayFleet:
    """The other processes of the fleet, reached through Ray: `member.Fleet`."""

    async def send(self, report: bytes, card: ModelCard) -> Sequence[bool]:
        answers, _ = await _in_time(_handle(FRONT).broadcast("report", report, card), LATE)
        if not answers:
            raise TimeoutError
        return answers

    async def hottest(self, fingerprint: bytes, tokens: int) -> Sequence[HotStretch]:
        with suppress(DeploymentUnavailableError):  # no front runs yet
            lists, _ = await _in_time(_handle(FRONT).broadcast("hottest", fingerprint, tokens))
            return max(lists, key=len, default=())  # a front that has just started knows little
        return ()

    async def status(self) -> dict[str, Any]:
        asked = _handle(FRONT).broadcast("status"), _handle(REPLICA).broadcast("figures")
        (fronts, silent), (replicas, _) = await asyncio.gather(*map(_in_time, asked))
        unheard = (Running.names or frozenset()) - {one["replica"] for one in replicas}
        return {
            "fronts": fronts,
            "replicas": replicas,
            "silent": {"fronts": silent, "replicas": sorted(map(replica_tag, unheard))},
        }

    async def metrics(self) -> dict[str, bytes]:
        answers, _ = await _in_time(_handle(REPLICA).broadcast("metrics"))
        return {replica_tag(name): b"" for name in Running.names or ()} | dict(answers)

    async def explain(self, tenant: str, salt: str, request_id: str | None) -> Sequence[dict[str, Any] | None]:
        answers, _ = await _in_time(_handle(REPLICA).broadcast("explain", tenant, salt, request_id))
        return answers

    async def chain(self, asked: ChainRequest) -> Sequence[ChainAnswer]:
        answers, silent = await _in_time(_handle(REPLICA).broadcast("chain", asked), CHAIN_PATIENCE)
        unasked = max(0, len(Running.names or ()) - len(answers) - silent)
        missing = max(silent + unasked, int(not answers))
        return [*answers, *([ChainAnswer(message=_SILENT.format(missing))] if missing else [])]


def _handle(name: str) -> DeploymentHandle:
    return serve.get_deployment_handle(name, APPLICATION)


async def _in_time(asked: DeploymentBroadcastResponse, seconds: float = PATIENCE) -> tuple[list[Any], int]:
    """The answers of the processes that are well, and how many others there are."""
    try:
        async with asyncio.timeout(seconds):
            # Ray's public `results_async` has the answers of all or of none. `tests/fleet/cluster` pins this one.
            called = await asked._fetch_replica_results_async()
    except (TimeoutError, DeploymentUnavailableError):  # Ray knows none of them yet, or no more
        return [], 0
    calls = [asyncio.ensure_future(one.get_async()) for one in called]
    answered, late = await asyncio.wait(calls, timeout=seconds)
    for call in late:
        call.cancel()
    answers = [call.result() for call in answered if not call.cancelled() and call.exception() is None]
    return answers, len(calls) - len(answers)
