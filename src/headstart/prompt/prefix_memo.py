"""Beginnings: what rendered texts were made into, up to a place that nothing behind it can change.

The next request of a conversation repeats the last one but for its end. The memo would find its pieces again one by one; this
finds all of them at once.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from headstart.interfaces.engine import Control
from headstart.interfaces.tokens import Tokens, as_tokens
from headstart.prompt.reply_tokens import Spelled

_TAIL = 64
"""Characters by whose comparison most texts are told apart."""

_SPELLED = 512
"""Bytes of a reply's spelling beside its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The beginning of a rendered text, split and tokenised as in all texts that begin so.

    Attributes:
        text: it; ends with a control token.
        control: that token; None at the very beginning.
        tokens: its tokens.
        starts: where its pieces begin in `text`.
        offsets: where they begin in `tokens`.
        heads: under which replies in it may have been spelled otherwise.
        spelled: those that were.
        version: of the spellings.
    """

    text: str = ""
    control: Control | None = None
    tokens: Tokens = field(default_factory=lambda: as_tokens([]))
    starts: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    heads: frozenset[bytes] = frozenset()
    spelled: tuple[Spelled, ...] = ()
    version: int = 0

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        held = (self.text, self.starts, self.offsets, self.heads, *self.heads)
        spelled = sum(_SPELLED + one.spelling.tokens.nbytes for one in self.spelled)
        return self.tokens.nbytes + sum(map(sys.getsizeof, held)) + spelled


class Beginnings:
    """The beginnings that were used last, by what they depend on beside their text. Thread-safe.

    Args:
        budget: most bytes of all together.
        most: most of them.
    """

    def __init__(self, budget: int, most: int = 64) -> None:
        self._most = most
        self._budget = self._room = budget
        self._known: OrderedDict[Beginning, Hashable] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, under: Hashable, text: str) -> Beginning | None:
        """The longest one that `text` begins with."""
        with self._lock:
            known = [one for one, of in self._known.items() if of == under and len(one.text) <= len(text)]
        for one in sorted(known, key=lambda one: -len(one.text)):
            if text.startswith(one.text[-_TAIL:], max(0, len(one.text) - _TAIL)) and text.startswith(one.text):
                with self._lock:
                    if one in self._known:
                        self._known.move_to_end(one)
                return one
        return None

    def add(self, under: Hashable, one: Beginning, *, instead: Beginning | None = None) -> None:
        """Remembers one, `instead` of one that it goes on. What alone outweighs the budget is not kept."""
        if one.size > self._budget:
            return
        with self._lock:
            self._drop(instead)
            self._known[one] = under
            self._room -= one.size
            while self._known and (self._room < 0 or len(self._known) > self._most):
                self._drop(next(iter(self._known)))

    def drop(self, one: Beginning) -> None:
        """Forgets one."""
        with self._lock:
            self._drop(one)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._known.clear()
            self._room = self._budget

    def _drop(self, one: Beginning | None) -> None:
        if one is not None and self._known.pop(one, None) is not None:
            self._room += one.size
