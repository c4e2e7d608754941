"""Explain: why a request computed what it computed. Callers see their own requests only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.body import parse
from headstart.api.diagnostics import anthropic, responses
from headstart.api.dialects import conversation_of
from headstart.api.openapi import ERRORS
from headstart.api.route import Salt
from headstart.api.service import Service, service_of
from headstart.api.usage import rounded
from headstart.chat import tenancy
from headstart.chat.validation import Strict
from headstart.errors import InvalidRequest, NotFound
from headstart.explain.causes import Cause
from headstart.explain.explain import Explanation
from headstart.explain.record import Record
from headstart.interfaces.tokens import common_prefix
from headstart.names import option
from headstart.observe.report import summarise
from headstart.prompt.builder import Prompt
from headstart.serving.request import Report
from headstart.serving.runtime import Runtime

router = APIRouter()


class Pair(Strict):
    """Body of POST /headstart/explain: two request bodies, the earlier one first."""

    a: dict[str, Any]
    b: dict[str, Any]


@router.get("/headstart/explain", responses=ERRORS)
async def explain_last(request: HttpRequest, cache_salt: Salt = "", user: Salt = "") -> Response:
    """Why the latest request computed what it computed."""
    return await _answer(request, None, cache_salt, user)


@router.get("/headstart/explain/{request_id}", responses=ERRORS)
async def explain_one(request: HttpRequest, request_id: str, cache_salt: Salt = "", user: Salt = "") -> Response:
    """Why a request computed what it computed; its id is in the header `x-request-id` of its answer."""
    return await _answer(request, request_id, cache_salt, user)


@router.post(
    "/headstart/explain",
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": Pair.model_json_schema()}}}},
    responses=ERRORS,
)
async def explain_pair(request: HttpRequest) -> Response:
    """What the second of two request bodies would compute again right after the first, and why. Nothing is computed."""
    service = service_of(request)
    runtime = service.ready()
    data = await service.body(request)
    return JSONResponse(await asyncio.to_thread(_compared, service, runtime, request, data))


async def _answer(request: HttpRequest, request_id: str | None, cache_salt: str, user: str) -> Response:
    service = service_of(request)
    runtime = service.ready()
    salt = service.salt(request, user or None, cache_salt or None)
    tenant = tenancy.viewer_of(request.scope.get("tenant", tenancy.OPEN), salt)
    own = account(runtime, tenant, salt, request_id)
    found = [one for one in (own, *await service.elsewhere.explain(tenant, salt, request_id)) if one is not None]
    if not found:
        which = f"request '{request_id[:200]}'" if request_id is not None else "request of yours"
        why = "" if cache_salt else " A request with a cache_salt is found only with the same cache_salt."
        if runtime.settings.explain == "off":
            why = f" This server keeps none: it was started with {option('explain', 'off')}."
        raise NotFound(f"No {which} is among the latest ones.{why}", param="request_id", code="request_not_found")
    latest = min(found, key=lambda one: one["seconds_ago"])
    return JSONResponse({**latest, "seconds_ago": round(latest["seconds_ago"], 1)})


def account(runtime: Runtime, tenant: str, salt: str, request_id: str | None) -> dict[str, Any] | None:
    """The answer about a tenant's latest request, or the latest one with an id; None if this server does not know it."""
    history = runtime.scheduler.history

    def seen(record: Record) -> bool:
        # Without keys only the salt separates tenants.
        mine = record.tenant == tenant and (tenant != "" or record.salt == salt)
        return mine and request_id in (None, record.id)

    record = history.last(seen)
    if record is None:
        return None
    prompts = {id(other.reports): [*other.reports.values()] for other in history.beside(record)}.values()
    summary = summarise([[report for report in reports if isinstance(report, Report)] for reports in prompts])
    return {
        "id": record.id,
        "state": "cancelled" if summary.cancelled else "ended",
        "seconds_ago": time.monotonic() - record.time,
        "prompt": summary.prompt,
        "cached": summary.cached,
        "live": summary.live,
        "tiers": summary.tiers,
        "computed": summary.computed,
        "completion": summary.completion,
        "mode": summary.mode,
        "ttft": round(summary.ttft, 5) if summary.completion or not summary.cancelled else None,
        **_explanation(summary.explanation),
    }


def _explanation(found: Explanation | None) -> dict[str, Any]:
    if found is None:
        return {"explanation": None, "anthropic": None, "responses": responses(None)}
    return {
        "explanation": {
            "cause": found.cause.value,
            "what": found.meaning.what,
            "hint": found.meaning.hint.with_flags,
            "where": found.where,
            "message": found.message,
            "character": found.character,
            "token": found.token,
            "before": found.before,
            "current": found.current,
            "previous": found.previous,
            "recomputed": found.recomputed,
            "seconds": rounded(found.seconds),
        },
        "anthropic": anthropic(found),
        "responses": responses(found),
    }


# ── two bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _compared(service: Service, runtime: Runtime, request: HttpRequest, data: bytes) -> dict[str, Any]:
    pair = parse(Pair, data)
    earlier, later = (_prompt(service, runtime, request, body, name) for name, body in (("a", pair.a), ("b", pair.b)))
    shared = common_prefix(earlier.tokens, later.tokens)
    names = {str(body["model"]).casefold() for body in (pair.a, pair.b) if body.get("model") is not None}
    models = {model.id if model is not None else None for model in map(service.models.named, names)}
    if len(names) > 1 and (len(models) > 1 or None in models):
        found: Explanation | None = Explanation(Cause.MODEL, recomputed=shared)
    elif pair.b.get("cache_prompt") is False:
        found = Explanation(Cause.DISABLED, recomputed=shared)
    else:
        found = runtime.compare(later, earlier)
    return {"prompt": len(later), "shared": shared, **_explanation(found)}


def _prompt(service: Service, runtime: Runtime, request: HttpRequest, body: Mapping[str, Any], name: str) -> Prompt:
    if not isinstance(body.get("model"), str | None):
        raise InvalidRequest(f"In '{name}': Invalid 'model': must be a valid string.", param=name)
    try:
        conversation = conversation_of(body, service.salting(request), service.responses)
        return service.chat.prompt(conversation, use_reply_tokens=False)[1]
    except InvalidRequest as error:
        raise InvalidRequest(f"In '{name}': {error.with_flags}", param=name, code=error.code) from None
