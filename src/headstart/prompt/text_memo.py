"""Memo: tokens of pieces of text that were tokenised before."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable

from headstart.interfaces.tokens import Tokens, as_tokens


class TextMemo:
    """Tokens of pieces of text, per salt, bounded in bytes; the least recently used go first. Thread-safe."""

    ENTRY = 512
    """Bytes that an entry takes beside its text and tokens."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._known: OrderedDict[tuple[str, str], Tokens] = OrderedDict()
        self._lock = threading.Lock()
        self.used = 0

    def get(self, salt: str, text: str, compute: Callable[[str], list[int]]) -> Tokens:
        key = (salt, text)
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
        tokens = as_tokens(compute(text))
        size = self._size(key, tokens)
        with self._lock:
            if key not in self._known and size <= self._budget:
                self._known[key] = tokens
                self.used += size
                while self.used > self._budget:
                    self.used -= self._size(*self._known.popitem(last=False))
        return tokens

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._known.clear()
            self.used = 0

    @classmethod
    def _size(cls, key: tuple[str, str], tokens: Tokens) -> int:
        return cls.ENTRY + sum(map(sys.getsizeof, key)) + tokens.nbytes
