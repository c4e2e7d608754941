"""Framing: how the objects of a stream become bytes: as server-sent events, or as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def comment(text: str) -> bytes:
    """An SSE comment, which keeps the connection alive. Every client skips it."""
    return f": {text}\n\n".encode()


def frame(value: dict[str, Any], event: str | None = None) -> bytes:
    """An SSE message with its data, and with the name of its event if it has one."""
    name = f"event: {event}\n".encode() if event is not None else b""
    return name + b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def json_line(value: dict[str, Any]) -> bytes:
    """A line of a stream of JSON."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """A form of streams.

    Attributes:
        media_type: of the answer.
        frame: the bytes of an object.
        silence: bytes that mean nothing, which keep the connection alive. They get a word for people who look at the stream.
    """

    media_type: str
    frame: Callable[[dict[str, Any]], bytes]
    silence: Callable[[str], bytes]


SSE = Framing("text/event-stream", frame, comment)

NDJSON = Framing("application/x-ndjson", json_line, lambda _: b" ")
"""Its silence is a blank at the beginning of the next line. An empty line would be an error to clients that parse each one."""
