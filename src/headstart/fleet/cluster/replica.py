"""Replica: a member of the fleet as a deployment of Ray Serve.

In handle mode a front calls `serve`. In direct mode HAProxy sends requests to the app, on the replica's own port.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from starlette.types import ASGIApp, Message

from headstart.fleet.cluster import bridge
from headstart.fleet.cluster.member import Member
from headstart.fleet.cluster.setup import APPLICATION, FRONT, REPLICA, FleetSetup
from headstart.fleet.model_card import ModelCard

PATIENCE = 3.0
"""Seconds to wait for the processes of a fleet that are asked for their figures."""


class RayReplica:
    """One replica. Ray calls its methods."""

    async def __init__(self, setup: FleetSetup) -> None:  # type: ignore[misc]  # Ray awaits it
        name = serve.get_replica_context().replica_id.to_full_id_str()
        self._member = Member(setup, name)
        await self._member.start(RayFleet())

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

    async def check_health(self) -> None:
        self._member.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"waiting": self._member.waiting()}

    async def __del__(self) -> None:
        member = getattr(self, "_member", None)
        if member is not None:  # else the constructor failed
            await member.close()


class RayFleet:
    """The other processes of the fleet, reached through Ray: `member.Fleet`."""

    async def send(self, report: bytes, card: ModelCard) -> Sequence[bool]:
        answers = await _handle(FRONT).broadcast("report", report, card).results_async(return_exceptions=True)
        return [answer is True for answer in answers]

    async def status(self) -> dict[str, Any]:
        fronts, replicas = _handle(FRONT).broadcast("status"), _handle(REPLICA).broadcast("figures")
        return {"fronts": await _in_time(fronts), "replicas": await _in_time(replicas)}

    async def metrics(self) -> dict[str, bytes]:
        return dict(await _in_time(_handle(REPLICA).broadcast("metrics")))


def _handle(name: str) -> DeploymentHandle:
    return serve.get_deployment_handle(name, APPLICATION)


async def _in_time(asked: DeploymentBroadcastResponse) -> list[Any]:
    """The answers of the processes that are well; none if one does not answer in time."""
    with suppress(TimeoutError):
        answers = await asked.results_async(timeout_s=PATIENCE, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]
    return []
