"""Choice: which model a request is for, whether it may load it, and how it waits. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.api.dialects import routing_of
from headstart.api.routing import BodyRouting
from headstart.errors import InvalidRequest
from headstart.models.naming import ModelNames, NamedModel

BELOW = "/upstream/"
"""Paths that begin with this and the name of a model mean the rest of the path at that model."""
LOOKS = ("/slots", "/headstart/stats", "/headstart/events", "/headstart/explain")
"""Routes (and all below them) that look at a loaded model. Monitoring must not load one."""
_RESPONSE = re.compile(r"/v1/responses/(?P<id>[^/]+)")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What a request is for.

    Attributes:
        looks: whether it only looks at a model that is loaded.
        routing: what else its body says.
    """

    model: NamedModel
    looks: bool
    routing: BodyRouting


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
    return ModelChoice(below or _named(names, path, query, body), looks and not body, routing_of(path, body))


def _named(names: ModelNames, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> NamedModel:
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest("Invalid 'model': it must be a string.", param="model")
    if not name:
        name = query.get("model")
    if not name:
        inside = _RESPONSE.match(path)
        id = inside["id"] if inside is not None else body.get("previous_response_id")
        if isinstance(id, str) and (found := names.of_id(id)) is not None:
            return found
    return names.find(name)
