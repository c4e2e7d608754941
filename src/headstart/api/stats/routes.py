"""Stats: what reuse has saved since the server started, and how full each tier is. A tenant sees its own requests only."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.caller import caller_of
from headstart.api.openapi import ERRORS
from headstart.api.service import service_of

router = APIRouter()


@router.get("/headstart/stats", responses=ERRORS)
async def stats(request: HttpRequest) -> Response:
    """What reuse has saved since the server started, in total and over time, and how full each tier is.

    With isolation on, a key that is not the operator's gets the figures of its own requests, since its first one.
    """
    service = service_of(request)
    now = service.ready().snapshot()
    if not request.scope["operator"]:
        own = service.tenant_stats.of(caller_of(request.scope).tenant)
        return JSONResponse({"model": service.model_id, **own.view(), "stored": {}})
    return JSONResponse(
        {
            "model": service.model_id,
            **service.stats.view(),
            "running": now["running"],
            "waiting": now["waiting"],
            "slots": len(now["slots"]),
            "stored": now["tiers"],
        }
    )
