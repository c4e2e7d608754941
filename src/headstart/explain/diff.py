"""Difference: where a prompt leaves an earlier one, and which part of the request that is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headstart.explain.causes import Cause, Where
from headstart.explain.overlap import characters, overlap
from headstart.explain.record import Record, key_of, nameless
from headstart.interfaces.conversation import Message
from headstart.prompt.builder import Prompt
from headstart.prompt.overflow import exchanges

WINDOW = 40
"""Characters of both texts that a difference shows."""
BEFORE = 20
"""Characters of common text that it shows before them."""
_TAG = 24
"""Characters before a difference within which the tag that it cuts in two begins."""
_QUOTE = 40
"""Characters of a message that are no coincidence in another one."""

_REASONING = re.compile(r"[<\[|]/?(?:\w+:)?(?:think|thinking|thought|reasoning|reflection|analysis)\b", re.IGNORECASE)
_SUMMARY = re.compile(r"\bsummar|\bcompact|continued from a previous", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two prompts.

    Attributes:
        message: index of the message that differs, as it was sent; None outside of messages.
        offset: of the difference in our rendered text.
        character: the same within the message's content, where `message` is known.
        before, current, previous: the common text right before it, and both texts from there on.
        summary: where in our rendered text a message stands that replaces others: from, to. It is new, whatever it quotes.
        fresh: whether all text from there on is new: the earlier prompt seems to contain none of it.
        begins: whether no reply stands before it.
    """

    cause: Cause
    where: Where
    message: int | None
    offset: int
    character: int
    before: str
    current: str
    previous: str
    summary: tuple[int, int] = (0, 0)
    fresh: bool = False
    begins: bool = False


def common_text(a: str, b: str) -> int:
    """Length of the common prefix, by bisection over slices (each compared in C)."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def difference(current: Prompt, previous: Record, recent: Sequence[Record] = ()) -> Difference | None:
    """The first difference to the earlier prompt and its reply. None if `current` only continues or shortens that.

    Args:
        recent: other requests. The reply to one of them may be a summary that has replaced the history.
    """
    at = common_text(current.text, previous.text)
    if at in (len(current.text), len(previous.text)):
        return None
    if current.source is None or previous.source is None:
        return _Pair(current, previous, at, ()).found(Cause.MESSAGE, "messages", None, at)  # a raw text has no parts
    return _Pair(current, previous, at, recent).difference()


def _kept(a: Message, b: Message) -> bool:
    """Whether at least half of what a message says is in the other one: its beginning, its end, and no coincidence between."""
    one, other = _content(a), _content(b)
    begin = common_text(one, other)
    end = common_text(one[begin:][::-1], other[begin:][::-1])
    shared = overlap(characters(one[begin : len(one) - end]), characters(other[begin : len(other) - end]), _QUOTE)
    return 2 * (begin + end + int(np.count_nonzero(shared))) >= len(one)


class _Pair:
    """Two prompts whose texts part at `at`. Messages are counted as the template saw them: without dropped ones."""

    def __init__(self, current: Prompt, previous: Record, at: int, recent: Sequence[Record]) -> None:
        self.current, self.previous, self.at, self.recent = current, previous, at, recent
        self.a: Sequence[Message] = current.source.messages if current.source else ()
        self.b: Sequence[Message] = previous.source.messages if previous.source else ()
        self._head = len(exchanges(self.a)[0]) if current.dropped else 0
        starts = current.content_starts
        self.starts = (*starts[: self._head], *starts[self._head + current.dropped :]) if current.dropped else starts

    @property
    def _options(self) -> tuple[object, dict[str, object]]:
        assert self.current.source is not None
        return self.current.source.tools or None, dict(self.current.source.template_kwargs)

    @property
    def _their_options(self) -> tuple[object, dict[str, object]]:
        assert self.previous.source is not None
        return self.previous.source.tools or None, dict(self.previous.source.template_kwargs)

    def found(
        self,
        cause: Cause,
        where: Where,
        number: int | None,
        character: int,
        *,
        summary: tuple[int, int] = (0, 0),
        fresh: bool = False,
        begins: bool = False,
    ) -> Difference:
        at, current, previous = self.at, self.current.text, self.previous.text
        message = number if number is None or number < self._head else number + self.current.dropped
        texts = current[max(0, at - BEFORE) : at], current[at : at + WINDOW], previous[at : at + WINDOW]
        return Difference(cause, where, message, at, character, *texts, summary=summary, fresh=fresh, begins=begins)

    def difference(self) -> Difference | None:
        number = self._message()
        if number is None:
            return self._around()
        a, b = self.a[number], self.b[number] if number < len(self.b) else self.previous.answer
        system = all(message.get("role") in ("system", "developer") for message in self.a[: number + 1])
        if not system and b.get("role") in ("system", "developer"):
            system = number == 0
        where: Where = "system" if system else "messages"
        if system:
            cause = Cause.SYSTEM
        elif self._reasoning_left(a, b):
            cause = Cause.REASONING
        elif self._compacted(number, a, b):
            cause = Cause.COMPACTED
        else:
            cause = Cause.MESSAGE
        start = self.starts[number] if number < len(self.starts) else -1
        # In the header of a message, or in one whose content is not in the text, nothing of it is common.
        character = min(max(0, self.at - start), len(_content(a))) if start >= 0 else 0
        if cause is Cause.COMPACTED:
            new = start >= 0 and a.get("role") != "tool" and key_of(a) not in self.previous.known
            summary = (start, start + len(_content(a))) if new else (0, 0)
            return self.found(cause, where, number, character, summary=summary)
        begins = not any(message.get("role") == "assistant" for message in self.a[: number + 1])
        return self.found(cause, where, number, character, fresh=self._fresh(number), begins=begins)

    def _fresh(self, first: int) -> bool:
        """Whether no message from this one on is one of the earlier prompt's, or half of it."""
        if not self.previous.known.isdisjoint(map(key_of, self.a[first:])):
            return False
        return not any(map(_kept, self.a[first:], (*self.b, self.previous.answer)[first:]))

    def _message(self) -> int | None:
        """The message that differs, if the texts part in its content or in its header."""
        first = max((number for number, start in enumerate(self.starts) if 0 <= start <= self.at), default=-1)
        for number in range(max(first, 0), len(self.a)):
            if not self._same(number):
                # Between two contents it may also be the tools or the template's options that differ.
                return number if number == first or self._options == self._their_options else None
            if number > first and self.starts[number] >= 0:
                break
        return None

    def _same(self, number: int) -> bool:
        if number < len(self.b):
            return nameless(self.a[number]) == nameless(self.b[number])
        if number > len(self.b) or self.a[number].get("role") != "assistant" or not self.previous.reply:
            return True  # they had not got so far
        return key_of(self.a[number]) == key_of(self.previous.answer)

    def _around(self) -> Difference | None:
        """The messages at that place are the same, but not what is written around them."""
        (tools, extra), (their_tools, their_extra) = self._options, self._their_options
        fresh = self._fresh(0)
        if tools != their_tools:
            return self.found(Cause.TOOLS, "tools", None, self.at, fresh=fresh, begins=True)
        if extra != their_extra:
            return self.found(Cause.TEMPLATE, "template", None, self.at, fresh=fresh, begins=True)
        if self._cut_out():
            number = max((number for number, start in enumerate(self.starts) if 0 <= start <= self.at), default=0)
            while number + 1 < len(self.a) and self.a[number].get("role") != "assistant":
                number += 1
            return self.found(Cause.REASONING, "messages", number, 0)
        if self.at >= self._end(min(len(self.a), len(self.b)) - 1):
            return None  # behind all that both have: one has more messages than the other
        pairs = enumerate(zip(self.a, self.b, strict=False))
        if (named := next((number for number, (a, b) in pairs if a != b), None)) is not None:
            return self.found(Cause.MESSAGE, "messages", named, 0)  # in the id of a call
        return self.found(Cause.TEMPLATE, "template", None, self.at)

    def _end(self, number: int) -> int:
        """Where the content of a message ends in our text. If it is not there, the last message before it counts."""
        while number >= 0 and self.starts[number] < 0:
            number -= 1
        return self.starts[number] + len(_content(self.a[number]).rstrip()) if number >= 0 else 0

    def _reasoning_left(self, a: Message, b: Message) -> bool:
        """Whether a message has all of the earlier one but its reasoning."""
        if a.get("role") != "assistant" or b.get("role") != "assistant":
            return False
        if b.get("reasoning_content") and not a.get("reasoning_content") and _content(a) == _content(b):
            return True
        return self._cut_out()

    def _cut_out(self) -> bool:
        """Whether our text continues like the earlier one after a part that looks like reasoning."""
        start = max(0, self.at - _TAG)
        current, previous = self.current.text, self.previous.text
        # The first tag may be common to both in part: `<` of `<think>` and of `<tool_call>`.
        tag = _REASONING.search(previous, start)
        if tag is None or tag.start() > self.at + 2 or tag.end() <= self.at:
            return False
        rest = current[tag.start() : tag.start() + WINDOW].strip().split("<|")[0][: WINDOW // 2].strip()
        return not _REASONING.match(current, tag.start()) and (not rest or previous.find(rest, tag.end()) >= 0)

    def _compacted(self, number: int, a: Message, b: Message) -> bool:
        """Whether history was taken away there."""
        if a.get("role") == b.get("role") == "tool":
            return number + 1 < len(self.a) and 2 * len(_content(a)) < len(_content(b))
        known = {key: place for place, key in enumerate(self.previous.keys)}
        for place in range(number, len(self.a)):
            there = known.get(key_of(self.a[place]))
            if there is not None:
                return there > place  # what follows was further back
        if len(self.a) > len(self.b):
            return False
        content = _content(a)
        for reply in (record.reply.strip() for record in (self.previous, *self.recent)):
            if len(reply) >= _QUOTE and reply in content:
                return True
        return len(self.b) - len(self.a) >= 2 and bool(_SUMMARY.search(content))


def _content(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
