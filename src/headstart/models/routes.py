"""Routes: what a server of several models answers itself: health, the list of models, metrics, and loading and unloading."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.body import parse
from headstart.api.drain import RETRY_AFTER, STOPPING
from headstart.api.errors import Forbidden
from headstart.api.incoming import SMALL_BODY
from headstart.api.openapi import ERRORS
from headstart.chat.validation import Strict
from headstart.errors import HeadstartError
from headstart.models.front import ModelsFront
from headstart.models.passed import PassedKey
from headstart.models.passing import passed_headers
from headstart.models.pool import PooledModel
from headstart.models.state import Phase
from headstart.models.upstream import request_head
from headstart.observe.metrics import CONTENT_TYPE

router = APIRouter()

SCRAPE = 5.0
"""Most seconds to wait for the metrics of a model."""


class ModelRequest(Strict):
    """Body of POST /models/load and /models/unload."""

    model: str


_TAKES = {"requestBody": {"required": True, "content": {"application/json": {"schema": ModelRequest.model_json_schema()}}}}


def front_of(request: HttpRequest) -> ModelsFront:
    front: ModelsFront = request.app.state.service
    return front


@router.get("/health", responses=ERRORS)
@router.get("/v1/health", responses=ERRORS)
async def health(request: HttpRequest) -> Response:
    """Whether requests are served. Models are loaded when they are asked for, so none must be loaded. It needs no key."""
    if front_of(request).drain.begun:
        error = {"code": 503, "message": STOPPING, "type": "unavailable_error"}
        return JSONResponse({"error": error}, 503, {"retry-after": f"{RETRY_AFTER:.0f}"})
    return JSONResponse({"status": "ok"})


@router.post("/v1/models/load", openapi_extra=_TAKES, responses=ERRORS)
async def load(request: HttpRequest) -> Response:
    """Loads a model, as a request to it would. Waits until it is loaded. With isolation on, for the operator only."""
    front, pooled = await _named(request)
    lease = front.pool.lease(pooled.model)
    try:
        await lease.granted
    finally:
        lease.release()
    return JSONResponse({"success": True, **_running(pooled, operator=True)})


@router.post("/v1/models/unload", openapi_extra=_TAKES, responses=ERRORS)
async def unload(request: HttpRequest) -> Response:
    """Unloads a model when its running requests are over. Does not wait. With isolation on, for the operator only."""
    front, pooled = await _named(request)
    return JSONResponse({"success": front.pool.unload(pooled.model), **_running(pooled, operator=True)})


@router.get("/headstart/models", responses=ERRORS)
async def running(request: HttpRequest) -> Response:
    """Which models are loaded, what they may use and what they do. `headstart ps` shows it."""
    front, operator = front_of(request), request.scope["operator"]
    shares = front.pool.shares
    held = sum(pooled.need for pooled in front.pool.models if pooled.state.holds)
    return JSONResponse(
        {
            "default": front.names.default.name,
            "keep_loaded": shares.keep,
            "memory_bytes": shares.total,
            "memory_used_bytes": held,
            "models": [_running(pooled, operator=operator) for pooled in front.pool.models],
        }
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={**ERRORS, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics."}},
)
async def metrics(request: HttpRequest) -> Response:
    """Prometheus metrics, of the server and of all loaded models."""
    front = front_of(request)
    texts = await asyncio.gather(*(_scraped(front, pooled) for pooled in front.pool.models))
    return Response(front.metrics.render(text for text in texts if text), headers={"content-type": CONTENT_TYPE})


async def _scraped(front: ModelsFront, pooled: PooledModel) -> bytes:
    """The metrics of a model; empty if it is not loaded."""
    try:
        async with asyncio.timeout(SCRAPE):
            lease = front.pool.peek(pooled.model)
            process = await lease.granted
            connection = await process.connection()
            try:
                caller = bytes(PassedKey("", operator=True))
                headers = passed_headers((), caller=caller, request_id=front.new_id("req_"), client="", body=None)
                await connection.ask(request_head("GET", b"/metrics", headers), b"")
                return b"".join([part async for part in connection.parts()])
            finally:
                process.put_back(connection)
    except (HeadstartError, OSError, TimeoutError):
        return b""


async def _named(request: HttpRequest) -> tuple[ModelsFront, PooledModel]:
    """The model that a body names. Raises Forbidden, and NotFound."""
    front = front_of(request)
    if not request.scope["operator"]:
        raise Forbidden("Loading and unloading models needs the operator's key.")
    body = parse(ModelRequest, await front.body(request, SMALL_BODY))
    return front, front.pool.of(front.names.find(body.model))


def _running(pooled: PooledModel, *, operator: bool) -> dict[str, Any]:
    """A model's state. Only the operator may see the cause of a failure, which may name files, and what others do."""
    state, process = pooled.state, pooled.process
    found: dict[str, Any] = {"name": pooled.model.name, "state": state.phase.value, "size_bytes": pooled.model.size}
    if state.phase is Phase.LOADING and process is not None:
        found["progress"] = process.progress
    if not operator:
        return found
    found |= {"running": state.running, "waiting": len(pooled.waiting), "loads": state.run}
    if state.holds:
        found["memory_bytes"] = pooled.need
    if process is not None:
        found["pid"] = process.pid
    if state.phase in (Phase.READY, Phase.DRAINING):
        found |= {
            "load_seconds": round(pooled.load_seconds, 3),
            "loaded_seconds_ago": round(time.time() - pooled.loaded_at, 1),
            "idle_seconds": 0.0 if state.running else round(max(0.0, time.monotonic() - pooled.since), 1),
        }
    if state.cause:
        found["cause"] = state.cause
    return found
