"""Explain: why a request computed what it computed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from headstart.core.blocks import BlockId, Tokens, common_prefix
from headstart.core.prompt import Prompt

WINDOW = 40
"""Characters of both texts that a divergence shows."""


class Reason(StrEnum):
    """Why tokens that could have been reused were not; the most telling one."""

    COLD = "cold"  # nothing like it was seen recently
    FINGERPRINT = "fingerprint"  # known only as computed by other weights, another engine or other settings
    DIVERGED = "diverged"  # the text differs from the nearest earlier one: see diverged_at
    EVICTED = "evicted"  # seen before, but its rows had to go
    DERIVED = "derived"  # exact mode does not use rows born in decoding
    STATE = "state"  # this model's state cannot be cut at that point
    DISABLED = "disabled"  # the request asked not to reuse


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference from the nearest earlier prompt + reply.

    Attributes:
        message: index of the message that differs; None in what the template adds around messages.
        character: offset in the rendered text (in that message's content, where `message` is known).
        ours, theirs: 40 characters from there, of this prompt and of the earlier one.
    """

    message: int | None
    character: int
    ours: str
    theirs: str


def _common_text(a: str, b: str) -> int:
    """Length of the common prefix, by bisection over slices (each compared in C)."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def diverge(ours: Prompt, theirs: str) -> Divergence | None:
    """Where `ours` leaves the earlier text; None where it only continues or shortens it."""
    at = _common_text(ours.text, theirs)
    if at in (len(ours.text), len(theirs)):
        return None
    message, character = ours.locate(at)
    return Divergence(message, character, ours.text[at : at + WINDOW], theirs[at : at + WINDOW])


@dataclass(frozen=True, slots=True)
class Record:
    """An earlier prompt with its reply. `canonical`: leading tokens whose rows were canonical when it ended."""

    root: BlockId
    text: str
    tokens: Tokens
    canonical: int

    @property
    def size(self) -> int:
        return len(self.text) + len(self.tokens)


class History:
    """Recent prompts with their replies, for explanations only.

    Args:
        records: most of them.
        size: most characters and tokens of all together.
    """

    def __init__(self, records: int = 256, size: int = 32_000_000) -> None:
        self._limit = records
        self._room = size
        self._records: deque[Record] = deque()

    def remember(self, record: Record) -> None:
        self._records.append(record)
        self._room -= record.size
        while self._room < 0 or len(self._records) > self._limit:
            self._room += self._records.popleft().size

    def nearest(self, root: BlockId, tokens: Tokens) -> tuple[Record | None, int]:
        """Of the records with this root, the one that shares the most leading tokens, and how many."""
        best, shared = None, 0
        for record in reversed(self._records):
            other = record.tokens
            if record.root != root or len(other) <= shared or shared >= len(tokens) or other[shared] != tokens[shared]:
                continue  # cannot share more than the best so far
            length = common_prefix(other, tokens)
            if length > shared:
                best, shared = record, length
        return best, shared
