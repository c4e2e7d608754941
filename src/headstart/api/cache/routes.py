"""Cache: lists, shows, pins and deletes what is stored, beside running requests.

Callers reach their own chains only; the operator reaches all, but reads the text of none but its own.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.openapi import ERRORS
from headstart.api.route import Salt
from headstart.api.service import service_of
from headstart.interfaces.tokens import BlockId
from headstart.serving.runtime import Runtime
from headstart.serving.stored import CachedChain

router = APIRouter()

Limit = Annotated[int, Query(ge=1, le=10_000)]
Start = Annotated[int, Query(ge=0)]
Most = Annotated[int | None, Query(ge=1)]


@router.get("/headstart/cache", responses=ERRORS)
async def chains(request: HttpRequest, limit: Limit = 100, cache_salt: Salt = "", user: Salt = "") -> Response:
    """The stored chains, the latest used first. A chain is a prompt from its beginning."""
    service = service_of(request)
    runtime, mine = service.ready(), service.owner(request, user, cache_salt)
    operator = request.scope["operator"]

    def found() -> dict[str, Any]:
        everything = runtime.stored.all()
        shown = [chain for chain in everything if operator or chain.owner == mine]
        distinct = {entry.id: entry for chain in everything for entry in chain.entries}.values()
        others = [entry for entry in distinct if entry.owner != mine]
        return {
            "object": "list",
            "data": [_figures(chain, mine) for chain in shown[:limit]],
            "has_more": len(shown) > limit,
            "others": {"entries": len(others), "tokens": sum(len(entry.tokens) for entry in others)},
        }

    return JSONResponse(await asyncio.to_thread(found))


@router.get("/headstart/cache/{id}", responses=ERRORS)
async def chain(request: HttpRequest, id: str, cache_salt: Salt = "", user: Salt = "") -> Response:
    """One chain, entry by entry."""
    runtime, mine, owner = _caller(request, cache_salt, user)
    found = await asyncio.to_thread(runtime.stored.get, _key(id), owner)
    ends = {state.parent: state for state in found.checkpoints}
    entries = [
        {
            "id": entry.id.hex(),
            "start": entry.start,
            "tokens": len(entry.tokens),
            "tiers": dict(entry.copies),
            "checkpoint": dict(ends[entry.id].copies) if entry.id in ends else None,
        }
        for entry in found.entries
    ]
    return JSONResponse({**_figures(found, mine), "entries": entries})


@router.get("/headstart/cache/{id}/text", responses=ERRORS)
async def text(
    request: HttpRequest, id: str, start: Start = 0, tokens: Most = None, cache_salt: Salt = "", user: Salt = ""
) -> Response:
    """The text of a chain, from the token `start` on, at most `tokens` of them. For its owner only, not for the operator."""
    runtime, mine, _ = _caller(request, cache_salt, user)

    def read() -> str:
        found = runtime.stored.get(_key(id), mine)
        every = [token for entry in found.entries for token in entry.tokens.tolist()]
        wanted = every[start:] if tokens is None else every[start : start + tokens]
        with runtime.prompts.tokenizer_open() as tokenizer:
            return b"".join(map(tokenizer.token_bytes, wanted)).decode("utf-8", "replace")

    return JSONResponse({"id": id, "start": start, "text": await asyncio.to_thread(read)})


@router.post("/headstart/cache/{id}/pin", responses=ERRORS)
async def pin(request: HttpRequest, id: str, cache_salt: Salt = "", user: Salt = "") -> Response:
    """Protects a chain and its present checkpoints from eviction, in memory and on disk."""
    runtime, mine, owner = _caller(request, cache_salt, user)
    return JSONResponse(_figures(await asyncio.to_thread(runtime.stored.pin, _key(id), owner), mine))


@router.post("/headstart/cache/{id}/unpin", responses=ERRORS)
async def unpin(request: HttpRequest, id: str, cache_salt: Salt = "", user: Salt = "") -> Response:
    """Removes the protection of a chain, except for entries that other pinned chains need."""
    runtime, mine, owner = _caller(request, cache_salt, user)
    return JSONResponse(_figures(await asyncio.to_thread(runtime.stored.unpin, _key(id), owner), mine))


@router.delete("/headstart/cache/{id}", responses=ERRORS)
async def delete(request: HttpRequest, id: str, cache_salt: Salt = "", user: Salt = "") -> Response:
    """Deletes what only this chain has, with every trace of it here and on disk. 409 if it is pinned or others continue it."""
    runtime, _, owner = _caller(request, cache_salt, user)
    gone = await asyncio.to_thread(runtime.stored.delete, _key(id), owner)
    return JSONResponse(
        {"id": id, "deleted": True, "entries": gone.entries, "tokens": gone.tokens, "disk_bytes": gone.disk_bytes}
    )


def _caller(request: HttpRequest, cache_salt: str, user: str) -> tuple[Runtime, bytes, bytes | None]:
    """The runtime, the caller as an owner, and whose chains it may reach: None for all."""
    service = service_of(request)
    mine = service.owner(request, user, cache_salt)
    return service.ready(), mine, None if request.scope["operator"] else mine


def _key(id: str) -> BlockId:
    """The id of an entry; an impossible one if these are not hexadecimal digits."""
    try:
        return bytes.fromhex(id)
    except ValueError:
        return b""


def _figures(chain: CachedChain, mine: bytes) -> dict[str, Any]:
    return {
        "id": chain.id.hex(),
        "tokens": chain.tokens,
        "blocks": len(chain.entries),
        "checkpoints": len(chain.checkpoints),
        "tiers": dict(chain.tiers),
        "pinned": chain.pinned,
        "complete": not chain.entries[0].start,
        "seconds_ago": None if chain.used is None else round(chain.used, 1),
        "uses": chain.uses,
        "saves_seconds": None if chain.saves is None else round(chain.saves, 3),
        "yours": chain.owner == mine,
    }
