"""Scanner: reads a text that arrives in parts as if it were complete.

Readers are generators. If the text so far is not enough for a decision, they yield until more text has arrived. So no decision
depends on how the text was cut.

Example: the reader looks for `<tool_call>`, and the text so far ends with `<tool`. It waits for more text. If ` box` follows,
the whole text is passed on; if `_call>` follows, a call begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

from headstart.longest_match import longest_of

T = TypeVar("T")
Incremental = Generator[None, None, T]
"""A reader: it waits by yielding, and returns a T."""

TextSink = Callable[[str], None]

_PLAIN = re.compile(r'["{}\[\]]')
_QUOTED = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_PYTHON = re.compile(r"""["'(){}\[\]]""")
_SCALAR_END = re.compile(r"[,}\]\s]")
_OPENING, _CLOSING = "([{", ")]}"


class Scanner:
    """A cursor in a growing text.

    Attributes:
        at: position of the next character.
        kept: position to which a reader may go back; None if the text before `at` is no longer needed.
        over: whether the text is complete.
        starved: whether a reader needed more text than there was, since the last `keep`.
    """

    def __init__(self) -> None:
        self._text = ""
        self.over = self.starved = False
        self.at = 0
        self.kept: int | None = None

    def add(self, text: str) -> None:
        cut = self.at if self.kept is None else self.kept
        self._text = self._text[cut:] + text
        self.at -= cut
        if self.kept is not None:
            self.kept = 0

    def finish(self) -> None:
        """No more text will come."""
        self.over = True

    @property
    def spent(self) -> bool:
        """Whether all text was read, and no more will come."""
        return self.over and self.at == len(self._text)

    def drop(self) -> None:
        """Leaves out the rest."""
        self.at, self.kept = len(self._text), None

    @property
    def unread(self) -> str:
        return self._text[self.at :]

    def keep(self, back: int = 0) -> None:
        """Keeps the text from `back` characters before here on. `rewind` goes there."""
        self.kept = self.at - back
        self.starved = False

    def rewind(self, ahead: int = 0) -> None:
        self.at = (self.at if self.kept is None else self.kept) + ahead
        self.kept = None

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def more(self) -> Incremental[bool]:
        """Waits for text; False if no more comes."""
        known = len(self._text) - self.at
        while len(self._text) - self.at == known and not self.over:
            yield
        self.starved |= len(self._text) - self.at == known
        return len(self._text) - self.at > known

    def peek(self) -> Incremental[str]:
        """The next character; nothing at the end."""
        while self.at >= len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self.at]

    def take(self, marker: str) -> Incremental[bool]:
        """Whether `marker` comes next; if so, behind it."""
        while True:
            rest = self._text[self.at : self.at + len(marker)]
            if rest == marker:
                self.at += len(marker)
                return True
            if not marker.startswith(rest) or not (yield from self.more()):
                return False

    def ends(self, marker: str) -> Incremental[bool]:
        """As `take`; also if the text breaks off within the marker."""
        if (yield from self.take(marker)):
            return True
        if self.over and marker.startswith(self._text[self.at :]):
            self.drop()
            return True
        return False

    def blanks(self, which: str | None = None) -> Incremental[None]:
        """Behind white space, or behind the characters of `which`."""
        while (char := (yield from self.peek())) and (char.isspace() if which is None else char in which):
            self.at += 1

    def word(self, pattern: re.Pattern[str], limit: int) -> Incremental[str]:
        """As much of `limit` characters as matches `pattern`, which must match nothing, or what can be prolonged."""
        while True:
            known = min(len(self._text), self.at + limit)
            found = pattern.match(self._text, self.at, known)
            if found is None or found.end() < known or known == self.at + limit or not (yield from self.more()):
                word = found[0] if found else ""
                self.at += len(word)
                return word

    def within(self, limit: int, *markers: str) -> Incremental[tuple[str, str] | None]:
        """The text before the first of `markers`, and that marker, which stays unread. None if it is not within `limit`
        characters.
        """
        pattern = _any(markers)
        while True:
            found = pattern.search(self._text, self.at, self.at + limit)
            if found is not None:
                text = self._text[self.at : found.start()]
                self.at = found.start()
                return text, found[0]
            if len(self._text) - self.at >= limit or not (yield from self.more()):
                return None

    def until(self, markers: tuple[str, ...], sink: TextSink) -> Incremental[str]:
        """Gives `sink` the text before the first of `markers` as it comes. Returns that marker, and reads it.

        At the end of the reply it returns an empty text. What may be the beginning of a marker then stays unread.
        """
        pattern = _any(markers)
        while True:
            found = pattern.search(self._text, self.at)
            if found is not None:
                self._give(found.start(), sink)
                self.at = found.end()
                return found[0]
            self._give(len(self._text) - self._beginning(markers), sink)
            if not (yield from self.more()):
                return ""

    def _give(self, end: int, sink: TextSink) -> None:
        if end > self.at:
            sink(self._text[self.at : end])
            self.at = end

    def _beginning(self, markers: tuple[str, ...]) -> int:
        """Length of the longest end of the text that one of `markers` may begin with."""
        most = min(len(self._text) - self.at, max(map(len, markers), default=1) - 1)
        ends = (self._text[len(self._text) - length :] for length in range(most, 0, -1))
        return next((len(end) for end in ends if any(marker.startswith(end) for marker in markers)), 0)

    def value(self, sink: TextSink) -> Incremental[bool]:
        """Gives `sink` the text of a JSON value as it comes, up to its balanced end; False if the text ends before."""
        first = yield from self.peek()
        if first in ("{", "["):
            return (yield from self._balanced(_PLAIN, sink))
        if first == '"':
            self._give(self.at + 1, sink)
            return (yield from self._quoted('"', sink))
        while (found := _SCALAR_END.search(self._text, self.at)) is None:
            self._give(len(self._text), sink)
            if not (yield from self.more()):
                return False
        self._give(found.start(), sink)
        return True

    def bracketed(self, sink: TextSink) -> Incremental[bool]:
        """Gives `sink` a Python expression in brackets up to its balanced end; False if the text ends before."""
        return (yield from self._balanced(_PYTHON, sink))

    def _balanced(self, pattern: re.Pattern[str], sink: TextSink) -> Incremental[bool]:
        depth = 0
        while True:
            found = pattern.search(self._text, self.at)
            if found is None:
                self._give(len(self._text), sink)
                if not (yield from self.more()):
                    return False
                continue
            self._give(found.end(), sink)
            if found[0] in _OPENING:
                depth += 1
            elif found[0] in _CLOSING:
                depth -= 1
                if depth <= 0:
                    return True
            elif not (yield from self._quoted(found[0], sink)):
                return False

    def _quoted(self, quote: str, sink: TextSink) -> Incremental[bool]:
        """The rest of a string, whose opening quote was read."""
        while True:
            found = _QUOTED[quote].search(self._text, self.at)
            if found is None:
                self._give(len(self._text), sink)
                if not (yield from self.more()):
                    return False
            elif found[0] == quote:
                self._give(found.end(), sink)
                return True
            else:
                self._give(found.end(), sink)
                if not (yield from self.peek()):
                    return False
                self._give(self.at + 1, sink)


@cache
def _any(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(longest_of(markers))
