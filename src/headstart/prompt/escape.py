"""Escape: spellings of control tokens inside the caller's strings end as plain text: nobody forges a turn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headstart.interfaces.engine import Control

# A noncharacter that marks an escaped control spelling. Its own occurrences in a text are doubled, and a spelling never
# begins with it, so that unescaping is unambiguous.
MARK = "\ufdd0"
_UNMARK = re.compile(MARK + "(" + MARK + "?)")


class Escaper:
    """Escapes control spellings in callers' strings, and undoes it in rendered text."""

    def __init__(self, controls: Iterable[Control]) -> None:
        reply_tokens = sorted((re.escape(control.text) for control in controls if control.text), key=len, reverse=True)
        self._risky = re.compile("|".join([MARK, *reply_tokens]))
        # Without the mark all begin with the same character in most models, and are searched for by that.
        self._spelled = re.compile("|".join(reply_tokens) or "(?!)")

    def escape(self, value: Any) -> Any:
        """The same value, in dicts and lists, with all its strings escaped, keys included; itself if there is nothing to do."""
        texts = _texts(value)
        if texts is not None:
            said = "\0".join(texts)
            if MARK not in said and self._spelled.search(said) is None:
                return value
        return self._escaped(value)

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._risky.sub(lambda m: MARK * 2 if m[0] == MARK else m[0][0] + MARK + m[0][1:], value)
        if isinstance(value, Mapping):
            return {self._escaped(key): self._escaped(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._escaped(item) for item in value]
        return value

    @staticmethod
    def unescape(text: str) -> str:
        return _UNMARK.sub(r"\1", text) if MARK in text else text


def _texts(value: Any) -> list[str] | None:
    """All strings in a value, keys included, in no order; None if it holds other containers than dicts and lists."""
    inside, texts, keys = [value], [], set[Any]()
    for one in inside:  # which grows by what is in it
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, dict):
            keys.update(one)
            inside += one.values()
        elif isinstance(one, list):
            inside += one
        elif isinstance(one, (tuple, Mapping)):
            return None
    return [*filter(lambda key: isinstance(key, str), keys), *texts]
