"""Text memo: the tokens of segments of text that were tokenised before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from headstart.interfaces.tokens import Tokens, as_tokens
from headstart.lru import Lru

ENTRY = 512
"""Bytes that an entry takes beside its text and tokens."""


@dataclass(frozen=True, slots=True)
class TokenisedSegment:
    """The tokens of a segment, and the bytes that it takes here."""

    tokens: Tokens
    size: int

    @classmethod
    def of(cls, salt: str, text: str, tokens: Tokens) -> TokenisedSegment:
        """Of the segment `text`."""
        return cls(tokens, ENTRY + sys.getsizeof(salt) + sys.getsizeof(text) + tokens.nbytes)


class TextMemo(Lru[tuple[str, str], TokenisedSegment]):
    """Tokens of segments of text, by salt and text. Bounded in bytes. Thread-safe.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int) -> None:
        super().__init__(1 + budget // ENTRY, budget, lambda segment: segment.size)

    def tokens(self, salt: str, text: str, compute: Callable[[str], list[int]]) -> Tokens:
        """The tokens of a segment; `compute` makes them if they are not known."""
        return self.first((salt, text), lambda: TokenisedSegment.of(salt, text, as_tokens(compute(text)))).tokens
