"""Landmarks: positions in a prompt's tokens that later prompts are likely to share.

Example: the end of the system prompt, the end of the last user message, a position that the client marked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from headstart.interfaces.conversation import Message
from headstart.interfaces.landmarks import Landmarks
from headstart.interfaces.tokens import Tokens, common_prefix

_HEAD = 200
"""Characters of a message's content that are searched in the rendered text."""


class Places:
    """Converts positions in a rendered text to positions in its tokens.

    Args:
        starts: where each segment between control tokens begins in the text.
        offsets: where each segment begins in the tokens.
        tokenize: tokens of the beginning of a segment.
    """

    def __init__(
        self,
        rendered: str,
        starts: Sequence[int],
        offsets: Sequence[int],
        tokens: Tokens,
        tokenize: Callable[[str], Tokens],
    ) -> None:
        self._rendered = rendered
        self._starts = starts
        self._offsets = offsets
        self._tokens = tokens
        self._tokenize = tokenize

    def position(self, offset: int) -> int:
        """Tokens before a character. Only tokens that all texts with the same beginning share are counted."""
        number = bisect_right(self._starts, offset) - 1
        if number < 0:
            return 0
        begin = self._offsets[number]
        return begin + common_prefix(self._tokenize(self._rendered[self._starts[number] : offset]), self._tokens[begin:])


def contents(messages: Sequence[Message], rendered: str) -> Iterator[int]:
    """For each message, where its content begins in the rendered text; -1 if the text does not contain it unchanged."""
    # Offsets are those of the rendered text. Escapes before them are rare, and each shifts them by one character.
    cursor = 0
    for message in messages:
        content = message.get("content")
        text = content.strip() if isinstance(content, str) else ""
        at = rendered.find(text[:_HEAD], cursor) if text else -1
        if at >= 0 and isinstance(content, str):
            cursor = at + len(text[:_HEAD])
            # Blanks before it count, whether the template keeps them or not.
            at = max(0, at - len(content) + len(content.lstrip()))
        yield at


def landmarks(
    messages: Sequence[Message], starts: Sequence[int], places: Places, breakpoints: Sequence[tuple[int, int]] = ()
) -> Landmarks:
    """The landmarks of a conversation. If a content is not found in the text, the one before it is used.

    Args:
        starts: for each message, where its content begins in the rendered text; -1 if it is not there.
        breakpoints: marked by the caller: (number of a message, characters of its content).
    """

    def end(number: int) -> int:
        while number >= 0 and starts[number] < 0:
            number -= 1
        return places.position(starts[number] + len(messages[number]["content"])) if number >= 0 else 0

    roles = [message.get("role") for message in messages]
    first = next((number for number, role in enumerate(roles) if role not in ("system", "developer")), -1)
    turn = max((number for number, role in enumerate(roles) if role == "user"), default=-1)
    while 0 <= turn < len(roles) - 1 and roles[turn + 1] in ("system", "developer"):
        turn += 1  # clients also put system messages between the user's message and the reply
    anchor = places.position(starts[first]) if first >= 0 and starts[first] >= 0 else 0
    header = end(len(roles) - 1)
    there = ((number, at) for number, at in breakpoints if number < len(starts) and starts[number] >= 0)
    marked = (places.position(starts[number] + at) for number, at in there)
    return Landmarks(anchor, header if turn == len(roles) - 1 else end(turn), header, tuple(marked))
