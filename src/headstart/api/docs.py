"""Docs: a page that shows /openapi.json to people. It comes with the package and asks no other host for anything."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, RedirectResponse, Response

router = APIRouter()

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@router.head("/docs", include_in_schema=False)
@router.get("/docs", include_in_schema=False)
async def docs(request: HttpRequest) -> Response:
    """The page. Needs no key: what it shows does, and it asks for one."""
    text, policy = page()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)


@router.get("/redoc", include_in_schema=False)
async def redoc(request: HttpRequest) -> Response:
    """Where FastAPI's servers have a second page."""
    return RedirectResponse("docs", 308)


@cache
def page() -> tuple[str, str]:
    """The page, and the policy that lets a browser run what is in it, ask this server, and nothing else."""
    text = (files("headstart") / "data" / "docs.html").read_text("utf-8")
    hashes = {kind: base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for kind, body in _INLINE.findall(text)}
    allowed = f"script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; connect-src 'self'"
    return text, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
