"""Paths as people and clients write them: each becomes the one under which a route is known, before anything looks at it.

A base URL with or without `/v1`, with it twice, with a slash too many: what can mean only one route is that route. Keys and the
operator's rights are checked on what comes out of here, which is also what is routed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

WITHOUT_V1 = ("/chat/completions", "/models", "/responses", "/messages")
"""What both vendors' clients ask for, with all below it, if their base URL lacks its `/v1`.

`/completions` is not among them: without `/v1` it is llama-server's own route, with another form.
"""
NOT_HERE = {
    "/embeddings": "This server has no embeddings",
    "/rerank": "This server does not rerank",
    "/infill": "This server does no infilling",
    "/audio": "This server reads and writes text only",
    "/images": "This server reads and writes text only",
    "/api/chat": "This server does not speak Ollama's API; give the client an OpenAI base URL",
    "/api/generate": "This server does not speak Ollama's API; give the client an OpenAI base URL",
    "/api/tags": "This server does not speak Ollama's API; give the client an OpenAI base URL",
}
"""What other servers have, with all below it, with `/v1` in front or without."""

_SLASHES = re.compile(r"/{2,}")
_TWICE = re.compile(r"^/v1(?:/v1)+(?=/|$)")
_MODEL = re.compile(r"^/+(?:v1/+)*models/(?P<id>.*[^/])/*$", re.DOTALL)
"""A model's id is the caller's own text, and may begin with a slash: it stays as it is."""


def canonical(path: str) -> str:
    """The path of a route that `path` means; applied twice it changes nothing more."""
    if (model := _MODEL.match(path)) is not None:
        return f"/v1/models/{model['id']}"
    path = _SLASHES.sub("/", path)
    path = path.rstrip("/") or "/"
    path = _TWICE.sub("/v1", path)
    return f"/v1{path}" if _within(path, WITHOUT_V1) else path


def hint(path: str, known: Sequence[str]) -> str:
    """What to say of a path that is no route's. `known`: the paths of all routes."""
    bare = path.removeprefix("/v1")
    for prefix, told in NOT_HERE.items():
        if _within(bare, (prefix,)):
            return f"{told}."
    plain = [one for one in known if "{" not in one]
    near = difflib.get_close_matches(path.lower(), plain, 1, 0.9)
    if not near:  # the longest that stands at its end
        near = sorted((one for one in plain if len(one) > 1 and path.endswith(one.removeprefix("/v1"))), key=len)[-1:]
    for written in (path.lower(), bare.lower()):
        near = near or difflib.get_close_matches(written, plain, 1, 0.7)
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"{meant}The base URL ends in /v1 for OpenAI's clients, and has no path for Anthropic's; /docs lists all routes."


def _within(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)
