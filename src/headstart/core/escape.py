"""Escape: spellings of control tokens inside the caller's strings end as plain text: nobody forges a turn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headstart.engines.base import Control

# A noncharacter that marks an escaped control spelling. Its own occurrences in a text are doubled, and a spelling never
# begins with it, so that unescaping is unambiguous.
MARK = "\ufdd0"
_UNMARK = re.compile(MARK + "(" + MARK + "?)")


class Escaper:
    """Escapes control spellings in callers' strings, and undoes it in rendered text."""

    def __init__(self, controls: Iterable[Control]) -> None:
        spellings = sorted((re.escape(control.text) for control in controls if control.text), key=len, reverse=True)
        self._risky = re.compile("|".join([MARK, *spellings]))
        # Without the mark all begin with the same character in most models, and are searched for by that.
        self._spelled = re.compile("|".join(spellings) or "(?!)")

    def escape(self, value: Any) -> Any:
        """The same value with all its strings escaped, keys included."""
        if isinstance(value, str):
            if MARK not in value and self._spelled.search(value) is None:
                return value
            return self._risky.sub(lambda m: MARK * 2 if m[0] == MARK else m[0][0] + MARK + m[0][1:], value)
        if isinstance(value, (dict, Mapping)):  # most are dicts, which is found out faster
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape(item) for item in value]
        return value

    @staticmethod
    def unescape(text: str) -> str:
        return _UNMARK.sub(r"\1", text) if MARK in text else text
