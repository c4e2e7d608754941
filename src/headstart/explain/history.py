"""History: the latest requests, in memory only. It serves explanations only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from headstart.explain.explain import CacheView, Explanation, RequestView, explain
from headstart.explain.fingerprint import ConversationFingerprint
from headstart.explain.record import Record
from headstart.interfaces.conversation import Message
from headstart.prompt.builder import Prompt


class History(Protocol):
    """What remembers requests so that later ones can be explained.

    Attributes:
        explains: whether `explain` looks for a cause at all.
    """

    explains: bool

    def explain(self, asked: RequestView, cached: CacheView) -> Explanation | None:
        """Why a request computed tokens again; None if unknown, or if it did not."""

    def remember(self, record: Record) -> None:
        """A request has ended."""

    def returned(self, record: Record, message: Message) -> None:
        """The client is expected to send back this message for the reply of a record."""

    def conversation_fingerprint(self, prompt: Prompt, template: str) -> ConversationFingerprint | None:
        """The fingerprint that recognises a conversation after a restart; None if there is none."""

    def last(self, seen: Callable[[Record], bool]) -> Record | None:
        """The latest of those for which `seen` is true. Thread-safe."""

    def beside(self, record: Record) -> list[Record]:
        """The records of one request: of all its prompts and choices, the earliest first. Thread-safe."""

    def latest(self) -> list[Record]:
        """All of them, the earliest first. Thread-safe."""

    def forget(self, gone: Callable[[Record], bool]) -> None:
        """Forgets those for which `gone` is true."""

    def __iter__(self) -> Iterator[Record]:
        """All of them, the earliest first."""


class NoHistory:
    """Explaining switched off."""

    explains = False

    def explain(self, asked: RequestView, cached: CacheView) -> Explanation | None:
        return None

    def remember(self, record: Record) -> None:
        pass

    def returned(self, record: Record, message: Message) -> None:
        pass

    def conversation_fingerprint(self, prompt: Prompt, template: str) -> ConversationFingerprint | None:
        return None

    def last(self, seen: Callable[[Record], bool]) -> Record | None:
        return None

    def beside(self, record: Record) -> list[Record]:
        return [record]

    def latest(self) -> list[Record]:
        return []

    def forget(self, gone: Callable[[Record], bool]) -> None:
        pass

    def __iter__(self) -> Iterator[Record]:
        return iter(())


class RecentHistory:
    """Recent prompts with their replies. Used from one thread, but for `last`, `beside` and `latest`.

    Args:
        records: most of them.
        size: most bytes of all together.
    """

    explains = True

    def __init__(self, records: int = 256, size: int = 64 << 20) -> None:
        self._limit = records
        self._left = size
        self._records: deque[Record] = deque()

    def explain(self, asked: RequestView, cached: CacheView) -> Explanation | None:
        return explain(asked, self._records, cached)

    def remember(self, record: Record) -> None:
        self._records.append(record)
        self._left -= record.size
        while self._left < 0 or len(self._records) > self._limit:
            self._left += self._records.popleft().size

    def returned(self, record: Record, message: Message) -> None:
        for number in reversed(range(len(self._records))):
            if self._records[number] is record:
                self._records[number] = replace(record, returned=message)
                return

    def conversation_fingerprint(self, prompt: Prompt, template: str) -> ConversationFingerprint | None:
        return ConversationFingerprint.of(prompt, template)

    def last(self, seen: Callable[[Record], bool]) -> Record | None:
        # A copy is made in one step; to walk the deque itself while another thread appends is an error.
        return next((record for record in reversed(self._records.copy()) if seen(record)), None)

    def beside(self, record: Record) -> list[Record]:
        same = record.id, record.tenant, record.salt
        return [one for one in self._records.copy() if one is record or (record.id and (one.id, one.tenant, one.salt) == same)]

    def latest(self) -> list[Record]:
        return [*self._records.copy()]

    def forget(self, gone: Callable[[Record], bool]) -> None:
        forgotten = [record for record in self._records if gone(record)]
        self._left += sum(record.size for record in forgotten)
        self._records = deque(record for record in self._records if not any(record is one for one in forgotten))

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)
