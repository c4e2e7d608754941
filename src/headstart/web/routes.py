"""Routes of the page: the page itself at `/`, for browsers, and its files. They hold no data, so they need no key."""

from __future__ import annotations

import asyncio
import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

ASSETS = "/headstart/web"
KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text becomes markup or code, whatever the page's own code does
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",  # ask each time; the answer is a 304
    "content-security-policy": POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept",
    "x-content-type-options": "nosniff",
}


def wants_page(accept: str) -> bool:
    """Whether a client with this Accept header is a browser: it names `text/html`, and does not like JSON better."""
    liked = {"text/html": 0.0, "application/json": 0.0}
    for part in accept.lower().split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        if kind in liked:
            weight = next((text[2:] for text in parameters if text.startswith("q=")), "1")
            try:
                liked[kind] = float(weight)
            except ValueError:
                liked[kind] = 0.0
    return 0.0 < liked["text/html"] >= liked["application/json"]


class PageRoute(Route):
    """A route for browsers. For other clients it does not exist, so that the next route with its path answers."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is Match.FULL and not wants_page(Request(scope).headers.get("accept", "")):
            return Match.NONE, {}
        return match, child


async def page(request: Request) -> Response:
    """The page."""
    return await _answer(request, "index.html")


async def asset(request: Request) -> Response:
    """A file of the page."""
    return await _answer(request, request.path_params["path"])


ROUTES = (
    PageRoute("/", page, methods=["GET"], include_in_schema=False),
    Route(ASSETS + "/{path:path}", asset, methods=["GET"], include_in_schema=False),
)
"""To be added before others at `/`. A router of FastAPI would make plain routes of them."""


@cache
def names() -> dict[str, Traversable]:
    """The page's files by their paths. No other path can be asked for."""

    def walk(folder: Traversable, at: str) -> dict[str, Traversable]:
        found: dict[str, Traversable] = {}
        for item in folder.iterdir():
            if item.is_dir():
                found |= walk(item, f"{at}{item.name}/")
            elif item.name.rpartition(".")[2] in KINDS:
                found[at + item.name] = item
        return found

    return walk(files("headstart.web") / "static", "")


async def _answer(request: Request, name: str) -> Response:
    if (file := names().get(name)) is None:
        raise HTTPException(404, f"The page has no file '{name:.200}'.")
    data = await asyncio.to_thread(file.read_bytes)
    tag = f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=KINDS[name.rpartition(".")[2]])
