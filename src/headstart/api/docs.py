"""Docs: a page that shows /openapi.json to people. It is part of the package and loads nothing from other hosts."""

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


@router.get("/docs", include_in_schema=False)
async def docs(request: HttpRequest) -> Response:
    """The page. It needs no key; /openapi.json does, and the page asks the user for it."""
    text, policy = page()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)


@router.get("/redoc", include_in_schema=False)
async def redoc(request: HttpRequest) -> Response:
    """Redirects to /docs: FastAPI's servers have a second page here."""
    return RedirectResponse("docs", 308)


@cache
def page() -> tuple[str, str]:
    """The page, and the content security policy: a browser runs its inline script and connects to this server only."""
    text = (files("headstart") / "data" / "docs.html").read_text("utf-8")
    hashes = {kind: base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for kind, body in _INLINE.findall(text)}
    allowed = f"script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; connect-src 'self'"
    return text, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
