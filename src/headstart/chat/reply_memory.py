"""Recall: what replies held that callers may not send back, when conversations began, and tools in their canonical form.

Bounded, per salt, thread-safe.
"""

from __future__ import annotations

import json
import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from blake3 import blake3

from headstart.output.canonical_json import canonical_tool
from headstart.output.json_values import bytes_of

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class BoundedMemory(Generic[KeyT, ValueT]):
    """The values that were used last. `limit`: most of them; `size`: most of what `weigh` sums up to.

    What alone outweighs `size` is not kept: it would put out all the others.
    """

    def __init__(self, limit: int, size: int, weigh: Callable[[ValueT], int] = lambda value: 1) -> None:
        self._limit = limit
        self._size = self._room = size
        self._weigh = weigh
        self._known: OrderedDict[KeyT, ValueT] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: KeyT) -> ValueT | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: KeyT, value: ValueT) -> None:
        with self._lock:
            self._remove(key)
            if self._weigh(value) > self._size:
                return
            self._known[key] = value
            self._room -= self._enter(value)
            while len(self._known) > self._limit or self._room < 0:
                self._remove(next(iter(self._known)))

    def drop(self, key: KeyT) -> None:
        """Forgets a key, if it is there."""
        with self._lock:
            self._remove(key)

    def forget(self, gone: Callable[[KeyT, ValueT], bool]) -> None:
        """Forgets all for which `gone` is true."""
        with self._lock:
            for key in [key for key, value in self._known.items() if gone(key, value)]:
                self._remove(key)

    def first(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """The value of a key, made if there is none."""
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found)
        return found

    def _remove(self, key: KeyT) -> None:
        if key in self._known:
            self._room += self._leave(self._known.pop(key))

    def _enter(self, value: ValueT) -> int:
        """What a value adds to what is held; less than it weighs where it shares something with others."""
        return self._weigh(value)

    def _leave(self, value: ValueT) -> int:
        """What is held no longer without it."""
        return self._weigh(value)


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
        self._tools: BoundedMemory[bytes, _Tools] = BoundedMemory(limit, size, lambda tools: tools.size)
        self._reasoning: BoundedMemory[bytes, str] = BoundedMemory(limit, size, len)
        self._began: BoundedMemory[bytes, Clock] = BoundedMemory(limit, limit)
        self._told: BoundedMemory[bytes, bool] = BoundedMemory(limit, limit)

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
