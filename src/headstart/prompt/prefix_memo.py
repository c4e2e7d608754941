"""Prefix memo: tokenised beginnings of rendered texts.

The next request of a conversation repeats the last one, except for its end. `text_memo` would find the repeated text segment by
segment; this memo finds all of it at once. A prefix ends at a control token, so no text after it can change its tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from headstart.interfaces.tokenizer import Control
from headstart.interfaces.tokens import Tokens, as_tokens
from headstart.lru import Lru
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


class _Kept(NamedTuple):
    key: Hashable
    size: int


class PrefixMemo:
    """The most recently used tokenised prefixes. Thread-safe.

    Args:
        budget: most bytes of all prefixes together.
        most: most prefixes.
    """

    def __init__(self, budget: int, most: int = 64) -> None:
        self._budget = budget
        self._known: Lru[TokenisedPrefix, _Kept] = Lru(most, budget, lambda kept: kept.size)

    def find(self, key: Hashable, text: str) -> TokenisedPrefix | None:
        """The longest prefix of `text` that was added under `key` (such as the salt)."""
        known = [prefix for prefix, kept in self._known.items() if kept.key == key and len(prefix.text) <= len(text)]
        for prefix in sorted(known, key=lambda prefix: -len(prefix.text)):
            tail = max(0, len(prefix.text) - _TAIL)
            if text.startswith(prefix.text[-_TAIL:], tail) and text.startswith(prefix.text):
                self._known.get(prefix)  # it counts as used
                return prefix
        return None

    def add(self, key: Hashable, prefix: TokenisedPrefix, *, instead: TokenisedPrefix | None = None) -> None:
        """Adds a prefix under `key`, in place of the shorter one that it continues. One larger than the budget is not kept."""
        kept = _Kept(key, prefix.size)
        if kept.size > self._budget:
            return
        if instead is not None:
            self._known.drop(instead)
        self._known.put(prefix, kept)

    def drop(self, prefix: TokenisedPrefix) -> None:
        """Drops one prefix."""
        self._known.drop(prefix)

    def clear(self) -> None:
        """Drops all prefixes."""
        self._known.clear()
