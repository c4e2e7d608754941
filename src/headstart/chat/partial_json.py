"""Partial JSON: the arguments of tool calls as valid JSON objects, also if the model's text is incomplete or invalid."""

from __future__ import annotations

import json
from typing import Any

from headstart.output.json_values import json_text, json_value


def is_object(arguments: str) -> bool:
    """Whether the arguments of a call are a complete JSON object."""
    return _object(arguments) is not None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json_value(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class Members:
    """Streamed arguments → the same as valid JSON, member by member, up to the first error.

    A value is passed on only when it is complete, so that nobody takes half of a file for all of it.
    """

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._depth = 0
        self._quoted = self._escaped = False
        self._count = 0
        self._over = False

    def feed(self, text: str) -> str:
        """The JSON of the members that `text` completes."""
        out: list[str] = []
        for char in text:
            if not self._over:
                self._take(char, out)
        return "".join(out)

    def end(self) -> str:
        """The JSON that is missing for a complete object."""
        closing = "" if self._depth < 0 else "}" if self._count else "{}"
        self._over, self._depth = True, -1
        return closing

    def _take(self, char: str, out: list[str]) -> None:
        if self._depth == 0:
            self._over = char != "{" and not char.isspace()
            self._depth = int(char == "{")
            return
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        ends = not self._quoted and (not self._depth or (self._depth == 1 and char == ","))
        if not ends:
            self._waiting.append(char)
            return
        member = _object("{" + "".join(self._waiting) + "}")
        self._waiting.clear()
        last = not self._depth
        self._over = last or not member
        self._depth = max(self._depth, 1)
        if member:
            out.append(("{" if not self._count else ", ") + json_text(member)[1:-1])
            self._count += 1
        if last and (member or (member is not None and not self._count)):
            out.append(self.end())


def input_of(arguments: str) -> dict[str, Any]:
    """The input of a call. If the arguments break off or become invalid, only the complete members before that."""
    members = Members()
    value = json.loads(members.feed(arguments) + members.end())
    assert isinstance(value, dict)
    return value
