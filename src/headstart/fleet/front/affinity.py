"""Affinity: which replica keeps what a request refers to.

Stored responses are in the memory of one replica. So the ids that a replica of a fleet makes begin with its tag, 8 hexadecimal
digits:

    resp_3f9a0c71… of a response      msg_3f9a0c71…i0 of an item of it

A server without a tag makes ids of the same form, whose digits mean nothing. A tag that no replica has is therefore no error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from blake3 import blake3

from headstart.api.body import load
from headstart.api.paths import canonical
from headstart.errors import RequestError

_ID = re.compile(r"[a-z]+_(?P<tag>[0-9a-f]{8})[0-9a-f]{24}\w*")
_PATH = re.compile(r"/v1/responses/(?P<response>resp_[^/]+)(?:/.*)?", re.DOTALL)
_WORDS = (b"previous_response_id", b"item_reference")
"""What a body contains if it refers to something stored, unless it has a reference without a type. Others are not parsed."""
_ID_ALONE = re.compile(rb'\{\s*"id"\s*:\s*"[^"]*"\s*\}')


def replica_tag(name: str) -> str:
    """The tag of a replica, for `create_app(replica_tag=…)`.

    Of 100 replicas, two have the same tag once in a million fleets.
    """
    return blake3(f"headstart.replica.1\0{name}".encode()).digest(4).hex()


def tag_of(id: str) -> str | None:
    """The tag in an id that a replica has made; None if no replica makes such ids."""
    found = _ID.fullmatch(id)
    return found["tag"] if found is not None else None


def wanted_tag(path: str, body: bytes) -> str | None:
    """The tag of the replica that keeps what a request refers to; None if it refers to nothing. It never raises.

    Args:
        path: as the client wrote it; "" if it is not known.
    """
    found = _PATH.fullmatch(canonical(unquote(path.partition("?")[0]))) if path else None
    if found is not None:
        return tag_of(found["response"])
    if not any(word in body for word in _WORDS) and (b'"id"' not in body or _ID_ALONE.search(body) is None):
        return None
    try:
        value = load(body)
    except RequestError:
        return None
    return next((tag for id in _named(value) if (tag := tag_of(id)) is not None), None)


def _named(body: Any) -> Iterator[str]:
    """The ids of stored things that a body names, the most important first."""
    if not isinstance(body, dict):
        return
    items = body.get("input")
    references = [item for item in items if isinstance(item, dict) and _is_reference(item)] if isinstance(items, list) else []
    for id in (body.get("previous_response_id"), *(item.get("id") for item in references)):
        if isinstance(id, str):
            yield id
    for name in ("a", "b"):  # the two bodies of POST /headstart/explain
        yield from _named(body.get(name))


def _is_reference(item: dict[str, Any]) -> bool:
    return "role" not in item and item.get("type") in (None, "item_reference")
