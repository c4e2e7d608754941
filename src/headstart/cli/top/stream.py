"""Stream: the bytes of `/headstart/events` made into batches. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LONGEST = 64 << 20
"""Most bytes of a batch that is not complete. A server sends far less."""


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Events that belong together.

    Attributes:
        id: of the mark at its end, to go on from there; "" for the last words of a stream.
        time: of the mark.
    """

    events: Sequence[tuple[str, Any]]
    id: str = ""
    time: float = 0.0


class Decoder:
    """Takes the bytes of one stream in any parts.

    A batch is complete with its mark. What comes of one after a connection broke is forgotten, because the server repeats it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._events: list[tuple[str, Any]] = []
        self._size = 0

    def feed(self, data: bytes) -> list[ReadBatch]:
        """The batches that are complete now. Raises ValueError if it is no stream of such events."""
        *frames, self._rest = (self._rest + data).split(b"\n\n")
        found = []
        for frame in frames:
            self._size += len(frame)
            name, value, identity = _parsed(frame)
            if name == "mark":
                found.append(ReadBatch(tuple(self._events), identity, float(value["time"])))
                self._events, self._size = [], 0
            elif name in ("dropped", "end"):
                found.append(ReadBatch(((name, value),)))
            elif name:
                self._events.append((name, value))
        if self._size + len(self._rest) > LONGEST:
            raise ValueError("a batch without an end")
        return found


def _parsed(frame: bytes) -> tuple[str, Any, str]:
    """Name, data and id of an event; the name is "" for a comment."""
    fields = dict(line.split(": ", 1) for line in frame.decode().split("\n") if ": " in line)
    try:
        return fields.get("event", ""), json.loads(fields.get("data", "null")), fields.get("id", "")
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
