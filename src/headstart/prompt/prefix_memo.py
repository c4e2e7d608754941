"""Prefix memo: tokenised beginnings of rendered texts.

The next request of a conversation repeats the last one, except for its end. `text_memo` would find the repeated text segment by
segment; this memo finds all of it at once. A prefix ends at a control token, so no text after it can change its tokens.
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
from headstart.prompt.reply_tokens import ReplyTokensRecord

_TAIL = 64
"""Characters at the end of a prefix that are compared first: most texts already differ there."""

_REPLY_SIZE = 512
"""Bytes of a record of reply tokens, without its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenisedPrefix:
    """The beginning of a rendered text with its tokens, which are the same in every text that begins so.

    Attributes:
        text: ends with a control token.
        control: that control token; None in an empty prefix.
        tokens: the tokens of `text`.
        starts: where each segment between control tokens starts in `text`.
        offsets: where each segment starts in `tokens`.
        heads: the heads (`reply_tokens`) under which replies were looked up.
        replies: the reply tokens that were found and used.
        version: of the memo of reply tokens at that time.
    """

    text: str = ""
    control: Control | None = None
    tokens: Tokens = field(default_factory=lambda: as_tokens([]))
    starts: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    heads: frozenset[bytes] = frozenset()
    replies: tuple[ReplyTokensRecord, ...] = ()
    version: int = 0

    @property
    def size(self) -> int:
        """Bytes in memory."""
        held = (self.text, self.starts, self.offsets, self.heads, *self.heads)
        replies = sum(_REPLY_SIZE + record.reply.tokens.nbytes for record in self.replies)
        return self.tokens.nbytes + sum(map(sys.getsizeof, held)) + replies


class PrefixMemo:
    """The most recently used tokenised prefixes. Thread-safe.

    Args:
        budget: most bytes of all prefixes together.
        most: most prefixes.
    """

    def __init__(self, budget: int, most: int = 64) -> None:
        self._most = most
        self._budget = self._left = budget
        self._known: OrderedDict[TokenisedPrefix, Hashable] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable, text: str) -> TokenisedPrefix | None:
        """The longest prefix of `text` that was added under `key` (such as the salt)."""
        with self._lock:
            known = [prefix for prefix, of in self._known.items() if of == key and len(prefix.text) <= len(text)]
        for prefix in sorted(known, key=lambda prefix: -len(prefix.text)):
            tail = max(0, len(prefix.text) - _TAIL)
            if text.startswith(prefix.text[-_TAIL:], tail) and text.startswith(prefix.text):
                with self._lock:
                    if prefix in self._known:
                        self._known.move_to_end(prefix)
                return prefix
        return None

    def add(self, key: Hashable, prefix: TokenisedPrefix, *, instead: TokenisedPrefix | None = None) -> None:
        """Adds a prefix under `key`, in place of the shorter one that it continues. One larger than the budget is not kept."""
        if prefix.size > self._budget:
            return
        with self._lock:
            self._drop(instead)
            self._known[prefix] = key
            self._left -= prefix.size
            while self._known and (self._left < 0 or len(self._known) > self._most):
                self._drop(next(iter(self._known)))

    def drop(self, prefix: TokenisedPrefix) -> None:
        """Drops one prefix."""
        with self._lock:
            self._drop(prefix)

    def clear(self) -> None:
        """Drops all prefixes."""
        with self._lock:
            self._known.clear()
            self._left = self._budget

    def _drop(self, prefix: TokenisedPrefix | None) -> None:
        if prefix is not None and self._known.pop(prefix, None) is not None:
            self._left += prefix.size
