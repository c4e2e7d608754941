"""Responses' store: keeps responses, so that later requests can continue them by id. In memory, bounded, separate by salt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.api.openai_responses.items import ResponsesItem
from headstart.errors import NotFound
from headstart.lru import Lru

PREFIX = "resp_"


class UnknownResponse(NotFound):
    code = "response_not_found"


@dataclass(eq=False, slots=True)
class ResponseLine:
    """A conversation up to one response. Responses that continue the same one share its line.

    Attributes:
        items: the items that this response added.
        size: the approximate characters of these items.
        before: the line that it continues, or None.
        total: the size of all items of the conversation.
        users: how many stored responses end here, plus how many held lines continue this one.
    """

    items: tuple[ResponsesItem, ...]
    size: int
    before: ResponseLine | None = None
    total: int = field(init=False)
    users: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = self.size + (self.before.total if self.before is not None else 0)

    @classmethod
    def of(cls, items: tuple[ResponsesItem, ...], before: ResponseLine | None) -> ResponseLine:
        """A line that goes on with these items."""
        return cls(items, sum(len(str(item)) for item in items), before)

    def parts(self) -> Iterator[ResponseLine]:
        """From the last to the first."""
        part: ResponseLine | None = self
        while part is not None:
            yield part
            part = part.before

    def hold(self) -> int:
        """Adds a user to the line. Returns the characters that no one held before."""
        new = 0
        for part in self.parts():
            part.users += 1
            if part.users > 1:
                break
            new += part.size
        return new

    def release(self) -> int:
        """Undoes `hold`. Returns the characters that no one holds any more."""
        gone = 0
        for part in self.parts():
            part.users -= 1
            if part.users:
                break
            gone += part.size
        return gone


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answered response.

    Attributes:
        response: the response's object, without what its explanation quotes.
        size: its approximate characters.
        input: the items of its own body.
        line: the conversation up to and including this response.
        written: when the conversation's first response was stored, in seconds since 1970.
    """

    response: dict[str, Any]
    size: int
    input: tuple[ResponsesItem, ...]
    line: ResponseLine
    written: float = 0.0

    @classmethod
    def of(
        cls, response: dict[str, Any], input: tuple[ResponsesItem, ...], before: StoredResponse | None, now: float
    ) -> StoredResponse:
        """The entry for a response that continues `before`, stored at the time `now`."""
        line = ResponseLine.of((*input, *response["output"]), before.line if before is not None else None)
        response = _unquoted(response)
        return cls(response, len(str(response)), input, line, now if before is None else before.written)

    @property
    def context(self) -> tuple[ResponsesItem, ...]:
        """All items of the conversation, including this response's input and output."""
        return tuple(item for part in reversed([*self.line.parts()]) for item in part.items)


def _unquoted(response: dict[str, Any]) -> dict[str, Any]:
    """A response whose explanation does not quote an earlier request, which may be deleted before it."""
    account = response.get("headstart") or {}
    if (place := account.get("diverged_at")) is None:
        return response
    return {**response, "headstart": {**account, "diverged_at": {**place, "previous": None}}}


class _Lines(Lru[tuple[str, str], StoredResponse]):
    """Stored responses. Shared items are counted once."""

    def _enter(self, value: StoredResponse) -> int:
        return value.size + value.line.hold()

    def _leave(self, value: StoredResponse) -> int:
        return value.size + value.line.release()


class Responses:
    """The most recently used responses.

    Args:
        limit: most responses.
        size: most characters of all responses together. Shared items are counted once.
    """

    def __init__(self, limit: int = 4096, size: int = 64_000_000) -> None:
        self._stored = _Lines(limit, size, lambda stored: stored.size + stored.line.total)
        self._met: Lru[tuple[str, str], bool] = Lru(limit, limit)

    def meet(self, salt: str, id: str) -> None:
        """Remembers the id of a response, and none of its content."""
        self._met.put((salt, id), True)

    def met(self, salt: str, id: str) -> bool:
        """Whether this server made such a response lately, stored or not."""
        return self._met.get((salt, id)) is not None

    def put(self, salt: str, stored: StoredResponse) -> None:
        self._stored.put((salt, stored.response["id"]), stored)

    def get(self, salt: str, id: str, param: str | None = None) -> StoredResponse:
        """A stored response. Raises UnknownResponse, with `param`."""
        found = self._stored.get((salt, id))
        if found is None:
            raise UnknownResponse(
                f"Response with id '{id[:100]}' not found: it was not stored, or it was removed.",
                param=param,
                code="previous_response_not_found" if param == "previous_response_id" else None,
            )
        return found

    def all(self) -> list[tuple[str, StoredResponse]]:
        """All stored responses with their salts, the least recently used first. This does not count as a use."""
        return [(salt, stored) for (salt, _), stored in self._stored.items()]

    def drop(self, salt: str, id: str) -> None:
        """Forgets a response. Raises UnknownResponse."""
        self.get(salt, id)
        self._stored.drop((salt, id))

    def forget(self, gone: Callable[[str, str, float], bool], *, hints: bool) -> None:
        """Forgets the responses for which `gone(salt, id, time)` is true; with `hints` also all remembered ids."""
        self._stored.forget(lambda key, stored: gone(*key, stored.written))
        if hints:
            self._met.forget(lambda *_: True)

    def item(self, salt: str, id: str) -> ResponsesItem:
        """An item of a stored response. Raises UnknownResponse."""
        stored = self._stored.get((salt, PREFIX + id.partition("_")[2][:_DIGITS]))
        items: tuple[ResponsesItem, ...] = (*stored.input, *stored.response["output"]) if stored is not None else ()
        for item in items:
            if item.get("id") == id:
                return item
        raise UnknownResponse(f"Item with id '{id[:100]}' not found.", param="input", code="item_not_found")


_DIGITS = 32
"""Characters of a response's id with which the ids of its items begin."""

_NAMES = {"function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs", "message": "msg"}


def item_id(kind: str, response: str, place: str) -> str:
    """The id of an item of a response; `place` is unique in the response."""
    return f"{_NAMES.get(kind, 'item')}_{response.removeprefix(PREFIX)}{place}"


def identified(items: Sequence[ResponsesItem], response: str) -> tuple[ResponsesItem, ...]:
    """A body's items, each with an id under which it can be referred to."""
    return tuple(
        {**item, "id": item_id(item.get("type", "message"), response, f"i{number:x}")} for number, item in enumerate(items)
    )


def listed(item: ResponsesItem) -> ResponsesItem:
    """An item in the format of the list of input items: with all fields, and its text in parts."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return {"summary": [], **item}
    item = {"status": "completed", **item, "type": kind}
    if kind == "message" and isinstance(item["content"], str):
        part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
        if item["role"] == "assistant":
            part |= {"type": "output_text", "annotations": []}
        item["content"] = [part]
    return item
