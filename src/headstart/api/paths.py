"""Paths: turns the paths that clients send into the paths of routes, before anything else reads them.

A base URL may lack `/v1`, have it twice, or have a slash too many. A path that can mean only one route is that route. Keys and
the operator's rights are checked on the resulting path, which is also routed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

WITHOUT_V1 = ("/chat/completions", "/models", "/responses", "/messages")
"""Paths (and all below them) that clients of both vendors request if their base URL lacks `/v1`.

`/completions` is not among them: without `/v1` it is llama-server's route, with another body.
"""
NOT_HERE = {
    "/embeddings": "This server has no embeddings",
    "/rerank": "This server does not rerank",
    "/infill": "This server does no infilling",
    "/audio": "This server reads and writes text only",
    "/images": "This server reads and writes text only",
}
"""Routes of other servers (and all below them), with `/v1` or without."""

_SLASHES = re.compile(r"/{2,}")
_TWICE = re.compile(r"^/v1(?:/v1)+(?=/|$)")
_MODEL = re.compile(r"^/+(?:v1/+)*models/(?P<id>.*[^/])/*$", re.DOTALL)
"""A model's id is not changed: it is any text, and may begin with a slash."""


def canonical(path: str) -> str:
    """The path of the route that `path` means. Idempotent."""
    if (model := _MODEL.match(path)) is not None:
        return f"/v1/models/{model['id']}"
    path = _SLASHES.sub("/", path)
    path = path.rstrip("/") or "/"
    path = _TWICE.sub("/v1", path)
    return f"/v1{path}" if _within(path, WITHOUT_V1) else path


def hint(path: str, known: Sequence[str]) -> str:
    """Help for a path without a route. `known`: the paths of all routes."""
    bare = path.removeprefix("/v1")
    for prefix, answer in NOT_HERE.items():
        if _within(bare, (prefix,)):
            return f"{answer}."
    plain = [route for route in known if "{" not in route]
    near = difflib.get_close_matches(path.lower(), plain, 1, 0.9)
    if not near:  # the longest route at its end
        near = sorted((route for route in plain if len(route) > 1 and path.endswith(route.removeprefix("/v1"))), key=len)[-1:]
    for written in (path.lower(), bare.lower()):
        near = near or difflib.get_close_matches(written, plain, 1, 0.7)
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"{meant}The base URL ends in /v1 for OpenAI's clients, and has no path for Anthropic's; /docs lists all routes."


def _within(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)
