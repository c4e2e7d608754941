"""Reply memory: reasoning that callers may not send back, start times of conversations, and canonical tools.

Bounded, separate by salt, thread-safe.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from blake3 import blake3

from headstart.lru import Lru
from headstart.output.canonical_json import canonical_arguments, canonical_tool
from headstart.output.json_values import bytes_of


@dataclass(frozen=True, slots=True)
class Moment:
    """When something arrived: `time`, in seconds since 1970, and how many chains had been deleted before (`deletion_count`)."""

    time: float
    deletion_count: int


@dataclass(frozen=True)
class Clock:
    """A fixed time, in the form that templates call (`strftime_now`)."""

    now: datetime

    def __call__(self, pattern: str) -> str:
        return self.now.strftime(pattern)


@dataclass(frozen=True, slots=True)
class _Tools:
    """Canonical tools. `size`: their bytes in memory."""

    canonical: tuple[dict[str, Any], ...]
    size: int

    @classmethod
    def of(cls, given: Sequence[Mapping[str, Any]]) -> _Tools:
        canonical = tuple(map(canonical_tool, given))
        return cls(canonical, bytes_of(canonical))


class ReplyMemory:
    """What the server remembers of its replies and requests.

    Args:
        limit: most replies, most conversations, and most lists of tools.
        size: most characters of reasoning, and most bytes of tools.
    """

    def __init__(self, limit: int = 16_384, size: int = 32_000_000, now: Callable[[], datetime] = datetime.now) -> None:
        self._now = now
        self._tools: Lru[bytes, _Tools] = Lru(limit, size, lambda tools: tools.size)
        self._reasoning: Lru[bytes, str] = Lru(limit, size, len)
        self._began: Lru[bytes, Clock] = Lru(limit, limit)
        self._sent: Lru[bytes, bool] = Lru(limit, limit)

    @property
    def replies(self) -> int:
        """How many replies are remembered."""
        return len(self._reasoning)

    def reply(self, salt: str, messages: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> None:
        """Remembers a reply to a canonical conversation."""
        if reasoning := message.get("reasoning_content"):
            digest = ConversationDigest(salt)
            for before in messages:
                digest.add(before)
            self._reasoning.put(digest.name(message), reasoning)

    def reasoning(self, digest: ConversationDigest, message: Mapping[str, Any]) -> str | None:
        """The reasoning of a reply that came back without it. The key has a call's id, or the conversation before the reply."""
        return self._reasoning.get(digest.name(message))

    def mark_sent(self, salt: str, message_id: str) -> None:
        """Remembers the id of an answer that was sent."""
        self._sent.put(_digest("sent", salt, message_id), True)

    def was_sent(self, salt: str, message_id: str) -> bool:
        """Whether an answer with this id was sent lately."""
        return self._sent.get(_digest("sent", salt, message_id)) is not None

    def clear(self) -> None:
        """Forgets everything."""
        for known in (self._tools, self._reasoning, self._began, self._sent):
            known.forget(lambda *_: True)

    def tools(self, salt: str, tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Tools in their canonical form, computed once: agents repeat them in every request. Do not change the result."""
        try:
            # Unlike ==, marshal distinguishes 1, 1.0 and True. From version 3 on its output depends on shared references.
            given = marshal.dumps(list(tools), 2)
        except ValueError:  # not JSON
            return tuple(map(canonical_tool, tools))
        key = blake3(given + salt.encode("utf-8", "surrogatepass")).digest()
        return self._tools.first(key, lambda: _Tools.of(tools)).canonical

    def clock(self, salt: str, beginning: str, *, begins: bool) -> Clock:
        """The time at which a conversation with this beginning was first seen. `begins`: this is its first request."""
        key, now = _digest("clock", salt, beginning), self._now()
        found = self._began.first(key, lambda: Clock(now))
        if begins and found.now.date() != now.date():  # another conversation with the same beginning
            found = Clock(now)
            self._began.put(key, found)
        return found


class ConversationDigest:
    """A digest of a growing conversation, without reasoning."""

    def __init__(self, salt: str) -> None:
        self._salt = salt
        self._hasher = blake3()

    def add(self, message: Mapping[str, Any]) -> None:
        """Adds the next message, in its canonical form."""
        parts = [message.get("role"), message.get("content"), message.get("tool_calls")]
        self._hasher.update(json.dumps(parts, default=str).encode())

    def name(self, reply: Mapping[str, Any]) -> bytes:
        """The key of a reply at this place."""
        text = (reply.get("content") or "").strip()
        calls = reply.get("tool_calls") or ()
        ids = [call["id"] for call in calls if call.get("id")]
        place = ("call", self._salt, ids[0]) if ids else ("said", self._salt, self._hasher.hexdigest())
        return _digest(*place, text, *map(_called, calls))


def _called(call: Mapping[str, Any]) -> str:
    """What a call says, without its id: ids that follow from the place of a reply are those of all replies at this place.

    Whole numbers are integers, because clients write 20.0 as 20.
    """
    function = call["function"]
    said = json.dumps([function["name"], canonical_arguments(function.get("arguments"), None)], default=str)
    return json.dumps(json.loads(said, parse_float=_number)) if ".0" in said else said


def _number(digits: str) -> int | float:
    value = float(digits)
    return int(value) if value.is_integer() else value


def _digest(*parts: str) -> bytes:
    hasher = blake3()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()
