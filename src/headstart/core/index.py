"""Index: which pieces are known, and in which tier they lie. It answers without touching a tier.

A *piece* is a block (`grid` tokens) or an open tail (fewer); both hang on the block before them. A piece has at most one
copy in each tier, and each copy is canonical or derived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headstart.core.blocks import BlockId, Chain, Tokens, common_prefix


@dataclass(slots=True, eq=False)
class Entry:
    """One known piece.

    Attributes:
        start: position of its first token.
        copies: tier name → whether that copy is canonical.
        pins: requests that need the piece right now; a pinned piece is never evicted.
    """

    id: BlockId
    parent: BlockId
    tokens: Tokens
    start: int
    copies: dict[str, bool] = field(default_factory=dict)
    pins: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def usable(self, *, canonical_only: bool) -> bool:
        return any(self.copies.values()) if canonical_only else bool(self.copies)

    @property
    def canonical(self) -> bool:
        return any(self.copies.values())


@dataclass(frozen=True, slots=True)
class Match:
    """What is restorable of a chain.

    Attributes:
        blocks: entries of its first blocks, without a gap.
        tail: a piece behind them, of which the first `take` tokens fit; None if `take` is 0.
    """

    blocks: tuple[Entry, ...]
    tail: Entry | None = None
    take: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(entry.tokens) for entry in self.blocks) + self.take

    @property
    def canonical(self) -> int:
        """Leading tokens whose rows are canonical."""
        total = 0
        for entry in self.blocks:
            if not entry.canonical:
                return total
            total = entry.stop
        return total


class Index:
    """All known pieces of one engine. Invariants: `check`."""

    def __init__(self, grid: int) -> None:
        self.grid = grid
        self._entries: dict[BlockId, Entry] = {}
        self._children: dict[tuple[BlockId, int], dict[BlockId, Entry]] = {}  # by parent and first token

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, piece: BlockId) -> Entry | None:
        return self._entries.get(piece)

    def _siblings(self, parent: BlockId, tokens: Tokens) -> Iterable[Entry]:
        """The pieces under `parent` that begin with the first of `tokens`."""
        return self._children.get((parent, int(tokens[0])), {}).values() if len(tokens) else ()

    def match(self, chain: Chain, limit: int, *, canonical_only: bool, partial: bool) -> Match:
        """The longest restorable prefix of at most `limit` tokens. Changes nothing.

        With `partial`, the piece that follows the last whole block may be used in part. Tokens are compared after the id
        is found: a collision cannot serve another text's rows.
        """
        blocks: list[Entry] = []
        for number, piece in enumerate(chain.ids[: limit // self.grid]):
            entry = self._entries.get(piece)
            if entry is None or not entry.usable(canonical_only=canonical_only):
                break
            if entry.tokens.tobytes() != chain.block(number).tobytes():
                break
            blocks.append(entry)
        if not partial:
            return Match(tuple(blocks))
        done = len(blocks) * self.grid
        rest = chain.tokens[done : min(limit, done + self.grid)]
        best, take = None, 0
        for entry in self._siblings(chain.parent_of(len(blocks)), rest):
            if entry.usable(canonical_only=canonical_only):
                shared = common_prefix(entry.tokens, rest)
                if shared > take:
                    best, take = entry, shared
        return Match(tuple(blocks), best, take)

    def add(self, entry: Entry, tier: str, *, canonical: bool) -> bool:
        """Records a copy of `entry` in `tier`; says whether the tier should hold these rows.

        False, and nothing changes, if the tier already has a copy at least as good: derived never replaces canonical.
        """
        known = self._entries.get(entry.id)
        if known is None:
            self._entries[entry.id] = known = entry
            self._children.setdefault(_place(entry), {})[entry.id] = entry
        elif tier in known.copies and known.copies[tier] >= canonical:
            return False
        known.copies[tier] = canonical
        return True

    def wants(self, piece: BlockId, tier: str, *, canonical: bool) -> bool:
        """Whether `add` would accept such a copy."""
        known = self._entries.get(piece)
        return known is None or tier not in known.copies or known.copies[tier] < canonical

    def covered(self, parent: BlockId, tokens: Tokens) -> list[Entry]:
        """The open tails under `parent` that a piece of `tokens` makes superfluous: its proper prefixes."""
        return [
            entry
            for entry in self._siblings(parent, tokens)
            if len(entry.tokens) < len(tokens) and common_prefix(entry.tokens, tokens) == len(entry.tokens)
        ]

    def covers(self, parent: BlockId, tokens: Tokens) -> bool:
        """Whether some piece under `parent` begins with all of `tokens`."""
        return any(common_prefix(entry.tokens, tokens) == len(tokens) for entry in self._siblings(parent, tokens))

    def remove(self, piece: BlockId, tier: str) -> None:
        """Forgets the copy in `tier`, and the piece with its last copy."""
        entry = self._entries[piece]
        del entry.copies[tier]
        if not entry.copies:
            del self._entries[piece]
            siblings = self._children[_place(entry)]
            del siblings[piece]
            if not siblings:
                del self._children[_place(entry)]

    def check(self) -> None:
        """Raises AssertionError if the index contradicts itself. Cheap enough to run when idle."""
        for piece, entry in self._entries.items():
            assert entry.id == piece
            assert entry.copies, "an entry without a copy"
            assert 1 <= len(entry.tokens) <= self.grid
            assert entry.start % self.grid == 0
            assert self._children[_place(entry)][piece] is entry
        assert sum(map(len, self._children.values())) == len(self._entries)


def _place(entry: Entry) -> tuple[BlockId, int]:
    return entry.parent, int(entry.tokens[0])
