"""Choice: which model a request is for, whether it may load it, and how it waits. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.api.dialects import READERS
from headstart.api.ollama.schema import keep_seconds
from headstart.errors import InvalidRequest
from headstart.models.naming import ModelNames, NamedModel

BELOW = "/upstream/"
"""Paths that begin with this and the name of a model mean the rest of the path at that model."""
LOOKS = ("/slots", "/headstart/stats", "/headstart/events", "/headstart/explain")
"""Routes (and all below them) that look at a loaded model. Monitoring must not load one."""
_OLLAMA = {"/api/chat": "messages", "/api/generate": "prompt"}
"""Ollama's routes that use a model, and the field without which there is nothing to answer."""
_RESPONSE = re.compile(r"/v1/responses/(?P<id>[^/]+)")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What a request is for.

    Attributes:
        looks: whether it only looks at a model that is loaded.
        streams: whether its answer is a stream of server-sent events, so that comments may come before it. Ollama's streams
            are lines of JSON, which have no comments.
        keep: for how many seconds without a request the model is to be kept afterwards, by Ollama's `keep_alive`; None if the
            request does not say so.
        unloads: whether it asks for nothing but to unload the model.
    """

    model: NamedModel
    looks: bool
    streams: bool
    keep: float | None = None
    unloads: bool = False


def choose(
    names: ModelNames, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any], below: NamedModel | None
) -> ModelChoice:
    """Which model a request is for.

    The path decides first (`/upstream/NAME/…`), then `model` in the body, then `model` in the query, then the id of a response
    that the request continues or reads. Without any of them it is the default model.

    Args:
        path: canonical, without the name of the model.
        body: the JSON object of the body; empty without one.
        below: the model that the path names, or None.

    Raises:
        NotFound: no model has the name.
        InvalidRequest: the body's `model` is no text.
    """
    looks = method in ("GET", "HEAD", "POST") and any(path == route or path.startswith(f"{route}/") for route in LOOKS)
    streams = path in READERS and not path.startswith("/api/") and body.get("stream") is True
    text = _OLLAMA.get(path)
    keep = None if text is None else keep_seconds(body.get("keep_alive"))
    unloads = keep == 0 and text is not None and not body.get(text)
    return ModelChoice(below or _named(names, path, query, body), looks and not body, streams, keep, unloads)


def _named(names: ModelNames, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> NamedModel:
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest("Invalid 'model': it must be a string.", param="model")
    if name is None:
        name = query.get("model")
    if name is None:
        inside = _RESPONSE.match(path)
        id = inside["id"] if inside is not None else body.get("previous_response_id")
        if isinstance(id, str) and (found := names.of_id(id)) is not None:
            return found
    return names.find(name)
