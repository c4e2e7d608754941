"""Cache: lists, shows, pins and deletes what is stored, beside running requests.

Callers reach their own chains only; the operator reaches all, but reads the text of none but its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.cache.actions import Action, ChainRequest, figures
from headstart.api.cache.everywhere import act_everywhere
from headstart.api.openapi import ERRORS
from headstart.api.route import Salt
from headstart.api.service import service_of
from headstart.errors import NotFound
from headstart.interfaces.tokens import BlockId
from headstart.serving.stored import CHAINS

router = APIRouter()

DIGITS = 64
"""Hexadecimal digits of an id."""

Limit = Annotated[int, Query(ge=1, le=CHAINS)]
Start = Annotated[int, Query(ge=0)]
Most = Annotated[int | None, Query(ge=1)]


@router.get("/headstart/cache", responses=ERRORS)
async def chains(request: HttpRequest, limit: Limit = 100, cache_salt: Salt = "", user: Salt = "") -> Response:
    """The stored chains, the latest used first. A chain is a prompt from its beginning."""
    service = service_of(request)
    runtime, mine = service.ready(), service.owner(request, user, cache_salt)
    owner = None if request.scope["operator"] else mine

    def others(held: Counter[bytes]) -> int:
        return held.total() - held[mine]

    def found() -> dict[str, Any]:
        stored = runtime.stored.survey(owner, limit + 1)
        shown = stored.chains
        return {
            "object": "list",
            "data": [figures(chain, mine) for chain in shown[:limit]],
            "has_more": len(shown) > limit,
            "others": {"entries": others(stored.entries), "tokens": others(stored.tokens)},
        }

    return JSONResponse(await asyncio.to_thread(found))


@router.get("/headstart/cache/{id}", responses=ERRORS)
async def chain(request: HttpRequest, id: str, cache_salt: Salt = "", user: Salt = "") -> Response:
    """One chain, entry by entry."""
    return await _answer(request, "show", id, cache_salt, user)


@router.get("/headstart/cache/{id}/text", responses=ERRORS)
async def text(
    request: HttpRequest, id: str, start: Start = 0, tokens: Most = None, cache_salt: Salt = "", user: Salt = ""
) -> Response:
    """The text of a chain, from the token `start` on, at most `tokens` of them. For its owner only, not for the operator."""
    return await _answer(request, "text", id, cache_salt, user, start, tokens)


@router.post("/headstart/cache/{id}/pin", responses=ERRORS)
async def pin(request: HttpRequest, id: str, cache_salt: Salt = "", user: Salt = "") -> Response:
    """Protects a chain and its present checkpoints from eviction, in memory and on disk."""
    return await _answer(request, "pin", id, cache_salt, user)


@router.post("/headstart/cache/{id}/unpin", responses=ERRORS)
async def unpin(request: HttpRequest, id: str, cache_salt: Salt = "", user: Salt = "") -> Response:
    """Removes the protection of a chain, except for entries that other pinned chains need."""
    return await _answer(request, "unpin", id, cache_salt, user)


@router.delete("/headstart/cache/{id}", responses=ERRORS)
async def delete(request: HttpRequest, id: str, cache_salt: Salt = "", user: Salt = "") -> Response:
    """Deletes what only this chain has, in memory, on disk, in a shared store and on all servers of a fleet.

    409 if it is pinned, or if others continue it."""
    return await _answer(request, "delete", id, cache_salt, user)


async def _answer(
    request: HttpRequest, action: Action, id: str, cache_salt: str, user: str, start: int = 0, tokens: int | None = None
) -> Response:
    service = service_of(request)
    runtime, caller = service.ready(), service.owner(request, user, cache_salt)
    asked = ChainRequest(action, _key(id), caller, request.scope["operator"], start, tokens)
    return JSONResponse(await act_everywhere(runtime, service.elsewhere, asked))


def _key(id: str) -> BlockId:
    """The id of an entry. Raises NotFound if this cannot be one, as the first digits alone that `headstart cache ls` shows."""
    with suppress(ValueError):
        if len(id) == DIGITS:
            return bytes.fromhex(id)
    why = f"An id has {DIGITS} hexadecimal digits: GET /headstart/cache lists them."
    raise NotFound(why, param="id", code="chain_not_found")
