"""Landmarks: where in a prompt's tokens its conversation may part from others, or from what is sent back of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from headstart.interfaces.conversation import Message
from headstart.interfaces.landmarks import Landmarks
from headstart.interfaces.tokens import Tokens, common_prefix

_HEAD = 200
"""Characters by which a message's content is found in the rendered text."""


class Places:
    """Characters of a rendered text → its tokens.

    Args:
        starts: where each piece between control tokens begins in the text.
        offsets: where it begins in the tokens.
        spell: tokens of a text as the beginning of a piece.
    """

    def __init__(
        self,
        rendered: str,
        starts: Sequence[int],
        offsets: Sequence[int],
        tokens: Tokens,
        spell: Callable[[str], Tokens],
    ) -> None:
        self._rendered = rendered
        self._starts = starts
        self._offsets = offsets
        self._tokens = tokens
        self._spell = spell

    def position(self, offset: int) -> int:
        """Tokens before a character: never more than all texts with that beginning have in common."""
        number = bisect_right(self._starts, offset) - 1
        if number < 0:
            return 0
        begin = self._offsets[number]
        return begin + common_prefix(self._spell(self._rendered[self._starts[number] : offset]), self._tokens[begin:])


def contents(messages: Sequence[Message], rendered: str) -> Iterator[int]:
    """For each message, where its content begins in the rendered text; -1 if it is not there as it was given."""
    # Offsets are in the rendered text; escapes before them are rare and shift them by a character each.
    cursor = 0
    for message in messages:
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else ""
        at = rendered.find(said[:_HEAD], cursor) if said else -1
        if at >= 0 and isinstance(content, str):
            cursor = at + len(said[:_HEAD])
            # Blanks before it count, whether the template keeps them or not.
            at = max(0, at - len(content) + len(content.lstrip()))
        yield at


def landmarks(
    messages: Sequence[Message], marks: Sequence[int], places: Places, breakpoints: Sequence[tuple[int, int]] = ()
) -> Landmarks:
    """The landmarks of a conversation. Where a content is not found in the text, the one before it stands in.

    Args:
        marks: for each message, where its content begins in the rendered text; -1 if it is not there.
        breakpoints: what the caller marked: (number of a message, characters of its content).
    """

    def end(number: int) -> int:
        while number >= 0 and marks[number] < 0:
            number -= 1
        return places.position(marks[number] + len(messages[number]["content"])) if number >= 0 else 0

    roles = [message.get("role") for message in messages]
    first = next((number for number, role in enumerate(roles) if role not in ("system", "developer")), -1)
    turn = max((number for number, role in enumerate(roles) if role == "user"), default=-1)
    while 0 <= turn < len(roles) - 1 and roles[turn + 1] in ("system", "developer"):
        turn += 1  # clients also say things behind the user, before the reply
    anchor = places.position(marks[first]) if first >= 0 and marks[first] >= 0 else 0
    header = end(len(roles) - 1)
    marked = (places.position(marks[number] + at) for number, at in breakpoints if number < len(marks) and marks[number] >= 0)
    return Landmarks(anchor, header if turn == len(roles) - 1 else end(turn), header, tuple(marked))
