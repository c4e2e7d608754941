"""Recall: what replies held that callers may not send back, when conversations began, and tools in their canonical form.

Bounded, per salt, thread-safe.
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
from headstart.output.canonical_json import canonical_tool
from headstart.output.json_values import bytes_of


@dataclass(frozen=True, slots=True)
class Moment:
    """When something came: `time`, in seconds since 1970, and behind how many deletions of single chains (`wipes`)."""

    time: float
    wipes: int


@dataclass(frozen=True)
class Clock:
    """A moment that stays, as templates ask for it (`strftime_now`)."""

    now: datetime

    def __call__(self, pattern: str) -> str:
        return self.now.strftime(pattern)


@dataclass(frozen=True, slots=True)
class _Tools:
    """Canonical tools. `size`: bytes that they take."""

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
        self._told: Lru[bytes, bool] = Lru(limit, limit)

    @property
    def replies(self) -> int:
        """How many replies are remembered."""
        return len(self._reasoning)

    def reply(self, salt: str, messages: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> None:
        """Remembers a reply to a canonical conversation."""
        if reasoning := message.get("reasoning_content"):
            line = ConversationDigest(salt)
            for before in messages:
                line.add(before)
            self._reasoning.put(line.name(message), reasoning)

    def reasoning(self, line: ConversationDigest, message: Mapping[str, Any]) -> str | None:
        """The reasoning of a reply that came back without it: known by a call's id, or by all that was said before."""
        return self._reasoning.get(line.name(message))

    def told(self, salt: str, message_id: str) -> None:
        """Remembers that an answer was given."""
        self._told.put(_digest("told", salt, message_id), True)

    def has_told(self, salt: str, message_id: str) -> bool:
        """Whether an answer with this id was given lately."""
        return self._told.get(_digest("told", salt, message_id)) is not None

    def clear(self) -> None:
        """Forgets everything."""
        for known in (self._tools, self._reasoning, self._began, self._told):
            known.forget(lambda *_: True)

    def tools(self, salt: str, tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Tools in their canonical form, made once: agents send the same ones with every request. Not to be changed."""
        try:
            # Unlike equality it tells 1, 1.0 and True apart; from version 3 on it depends on what is shared in memory.
            given = marshal.dumps(list(tools), 2)
        except ValueError:  # not JSON
            return tuple(map(canonical_tool, tools))
        key = blake3(given + salt.encode("utf-8", "surrogatepass")).digest()
        return self._tools.first(key, lambda: _Tools.of(tools)).canonical

    def clock(self, salt: str, beginning: str, *, begins: bool) -> Clock:
        """The moment at which a conversation with this beginning was seen first. `begins`: it is only beginning."""
        key, now = _digest("clock", salt, beginning), self._now()
        found = self._began.first(key, lambda: Clock(now))
        if begins and found.now.date() != now.date():  # another conversation that begins like that one
            found = Clock(now)
            self._began.put(key, found)
        return found


class ConversationDigest:
    """A conversation as it goes on, by a digest of what was said; reasoning is no part of it."""

    def __init__(self, salt: str) -> None:
        self._salt = salt
        self._said = blake3()

    def add(self, message: Mapping[str, Any]) -> None:
        """The next message, in its canonical form."""
        parts = [message.get("role"), message.get("content"), message.get("tool_calls")]
        self._said.update(json.dumps(parts, default=str).encode())

    def name(self, reply: Mapping[str, Any]) -> bytes:
        """What a reply at this place is found by."""
        said = (reply.get("content") or "").strip()
        ids = [call["id"] for call in reply.get("tool_calls") or () if call.get("id")]
        return _digest("call", self._salt, ids[0], said) if ids else _digest("said", self._salt, self._said.hexdigest(), said)


def _digest(*parts: str) -> bytes:
    hasher = blake3()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()
