"""A fleet behind Ray Serve's own prefix-aware router: the peer of headstart's router.

client ──▶ Ray's proxy ──▶ gateway ──(handle, with the prompt)──▶ the replica that Ray's `PrefixCacheAffinityRouter` chooses

Its replicas are headstart's, with the same tiers. The gateway passes requests on in the same way as headstart's front in handle
mode, and reads the prompt of `/v1/completions` only. Ray's router matches text, so each token of the prompt is a character.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.fleet.cluster import bridge
from headstart.fleet.cluster.application import front_options, replica_options
from headstart.fleet.cluster.gateway import lifespan
from headstart.fleet.cluster.replica import RayReplica
from headstart.fleet.cluster.setup import FRONT, REPLICA, FleetSetup
from headstart.fleet.front.hot import HotStretch
from headstart.fleet.model_card import ModelCard

ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"


@dataclass(frozen=True)
class RoutedPrompt:
    """What Ray's router reads of a request."""

    prompt: str


class RoutedReplica(RayReplica):
    """A replica whose calls begin with the prompt."""

    async def serve(self, prompt: RoutedPrompt, scope: Mapping[str, Any], body: bytes) -> AsyncIterator[list[Message]]:  # type: ignore[override]
        async for messages in bridge.call(self._member.app, scope, body):
            yield messages


class RayRoutedGateway:
    """The ingress. It leaves the choice to Ray, and needs no reports."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # a function, which uvicorn takes for what it is
            await self._serve(scope, receive, send)

        return app

    async def report(self, report: bytes, card: ModelCard) -> bool:
        return False

    async def hottest(self, fingerprint: bytes, tokens: int) -> Sequence[HotStretch]:
        return []

    async def status(self) -> list[dict[str, Any]]:
        return []

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await lifespan(receive, send)
            return
        MutableHeaders(scope=scope)["x-request-id"] = f"req_{uuid.uuid4().hex}"
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        prompt = "".join(map(chr, from_json(body)["prompt"])) if scope["path"] == "/v1/completions" else " "
        # Ray's router divides by the prompt's length.
        answer = self._replicas.serve.remote(RoutedPrompt(prompt), bridge.carried(scope), body)
        async for messages in answer:
            for message in messages:
                await send(message)


def application(setup: FleetSetup) -> Application:
    """The application, for `launch.fleet`."""
    routed = RequestRouterConfig(request_router_class=ROUTER)
    replica = serve.deployment(RoutedReplica, name=REPLICA).options(**replica_options(setup), request_router_config=routed)
    front = serve.deployment(serve.ingress()(RayRoutedGateway), name=FRONT).options(**front_options(setup))
    return front.bind(replica.bind(setup))
