"""Ollama's routing: `keep_alive`, and streams unless the body says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.api.framing import NDJSON
from headstart.api.ollama.encode import nothing_said
from headstart.api.ollama.model_list import tagged
from headstart.api.ollama.schema import keep_seconds
from headstart.api.routing import BodyRouting


def chat_routing(body: Mapping[str, Any]) -> BodyRouting:
    """The routing of POST /api/chat. The body may be wrong in any way."""
    return _routing(body, bool(body.get("messages")), chat=True)


def generate_routing(body: Mapping[str, Any]) -> BodyRouting:
    """The routing of POST /api/generate. The body may be wrong in any way."""
    return _routing(body, bool(body.get("prompt")), chat=False)


def _routing(body: Mapping[str, Any], asks: bool, *, chat: bool) -> BodyRouting:
    given = body.get("model")

    def unloaded(name: str) -> dict[str, Any]:
        return nothing_said(given if isinstance(given, str) and given else tagged(name), chat=chat, unload=True)

    keep = keep_seconds(body.get("keep_alive"))
    streams = body.get("stream") is not False
    return BodyRouting(NDJSON if streams else None, keep, unloaded if keep == 0 and not asks else None)
