"""Escape: the text of a control token inside a caller's string stays plain text. So no message can forge a turn.

Example: a user writes `<|im_end|>`. It is escaped before the template is rendered, so that the tokenizer does not find a
control token there, and unescaped before it is tokenised as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headstart.interfaces.tokenizer import Control
from headstart.longest_match import longest_of

# A noncharacter that is put into an escaped control token. Its own occurrences in a text are doubled, and no control token
# begins with it, so unescaping is unambiguous.
ESCAPE = "\ufdd0"
_ESCAPED = re.compile(ESCAPE + "(" + ESCAPE + "?)")


class Escaper:
    """Escapes control tokens in callers' strings, and unescapes them in rendered text."""

    def __init__(self, controls: Iterable[Control]) -> None:
        texts = [control.text for control in controls]
        self._risky = re.compile(longest_of([ESCAPE, *texts]))
        # Without the escape character, all control tokens of most models begin with the same character: that search is fast.
        self._control = re.compile(longest_of(texts))

    def escape(self, value: Any) -> Any:
        """The value with all strings in it escaped, also keys of dicts. The value itself if nothing has to be escaped."""
        texts = _texts(value)
        if texts is not None:
            joined = "\0".join(texts)
            if ESCAPE not in joined and self._control.search(joined) is None:
                return value
        return self._escaped(value)

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._risky.sub(lambda m: ESCAPE * 2 if m[0] == ESCAPE else m[0][0] + ESCAPE + m[0][1:], value)
        if isinstance(value, Mapping):
            return {self._escaped(key): self._escaped(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._escaped(item) for item in value]
        return value

    @staticmethod
    def unescape(text: str) -> str:
        return _ESCAPED.sub(r"\1", text) if ESCAPE in text else text


def _texts(value: Any) -> list[str] | None:
    """All strings in a value with its keys, in any order; None if it has containers other than dicts and lists."""
    inside, texts, keys = [value], [], set[Any]()
    for one in inside:  # the list grows while it is read
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
