"""Direct mode: HAProxy asks the front where a request should go, and sends it to the replica's own port.

client ──▶ HAProxy ──▶ the chosen replica's port          nothing of ours is between them, for any token
              └──▶ POST /internal/route (the body) ──▶ front

HAProxy's rules are in Ray Serve. They pass on the body, the request's id and one more header: `authorization` here, because the
key decides whose cache a request may use. The replica gets the header that the front answers with. This depends on an internal
hook of Ray Serve, which `tests/fleet/cluster` pins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from headstart.fleet.cluster.booked import BOOKING
from headstart.fleet.cluster.fronting import FrontProcess
from headstart.fleet.cluster.running import Running, watch
from headstart.fleet.cluster.setup import FleetSetup
from headstart.fleet.cluster.starting import reasoned
from headstart.fleet.front.hot import HotStretch
from headstart.fleet.model_card import ModelCard


class DirectFront:
    """The front as Ray Serve's ingress request router."""

    async def __init__(self, setup: FleetSetup) -> None:  # type: ignore[misc]  # Ray awaits it
        with reasoned():
            self._process = FrontProcess(setup)
        self._forgetting = asyncio.create_task(self._process.forget())
        self._watching = asyncio.create_task(watch())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/internal/route", self._route, methods=["POST"])
        return app

    async def report(self, report: bytes, card: ModelCard) -> bool:
        return await self._process.report(report, card)

    async def hottest(self, fingerprint: bytes, tokens: int) -> Sequence[HotStretch]:
        return await self._process.hottest(fingerprint, tokens)

    async def status(self) -> list[dict[str, Any]]:
        return self._process.status()

    async def _route(self, request: Request) -> Response:
        body = await request.body()
        if "x-body-truncated" in request.headers:
            body = b""
        front, headers = self._process.front, request.headers
        chosen = await front.route("", headers, body, running=Running.names)
        if chosen is None:
            return JSONResponse({"detail": "no replica runs"}, 503)
        answer = {"host": "", "port": 0, "replica_id": chosen.replica, "request_headers": {BOOKING: chosen.booking}}
        return JSONResponse(answer)
