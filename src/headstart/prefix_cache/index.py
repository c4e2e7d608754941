"""Index: which pieces are known, and in which tier they lie. It answers without touching a tier.

A *piece* is a block (`block_size` tokens) or an open tail (fewer); both hang on the block before them. In models with state a
*checkpoint* is a piece too: it hangs on the block or tail whose end it is at, and has that one's tokens. A piece has at most
one copy in each tier, and each copy is canonical or derived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from headstart.interfaces.tokens import BlockId, Tokens, common_prefix
from headstart.prefix_cache.blocks import Chain, checkpoint_id
from headstart.prefix_cache.quota import owner_of


@dataclass(slots=True, eq=False)
class Entry:
    """One known piece.

    Attributes:
        start: position of its first token.
        copies: tier name → whether that copy is canonical.
        pins: requests that need the piece right now; a pinned piece is never evicted.
        state: whether it is a checkpoint, at `stop`; otherwise it is rows.
        gap: tokens of prefill that a checkpoint saves, back to the one before it on its line; 0 if that is not known.
        protected: whether somebody is expected to go on from this checkpoint (`prefix_cache/checkpoints`).
        owner: whose it is; empty until the index knows it.
        written: when its tokens were first kept, in seconds since 1970; of a checkpoint, the first of all before it.
    """

    id: BlockId
    parent: BlockId
    tokens: Tokens
    start: int
    copies: dict[str, bool] = field(default_factory=dict)
    pins: int = 0
    state: bool = False
    gap: int = 0
    protected: bool = True
    owner: bytes = b""
    written: float = 0.0

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
        state: the checkpoint at their end, where one is needed.
    """

    blocks: tuple[Entry, ...]
    tail: Entry | None = None
    take: int = 0
    state: Entry | None = None

    @property
    def pieces(self) -> tuple[Entry, ...]:
        return self.blocks if self.tail is None else (*self.blocks, self.tail)

    @property
    def tokens(self) -> int:
        return sum(len(entry.tokens) for entry in self.blocks) + self.take

    @property
    def canonical(self) -> int:
        """Leading tokens whose rows are canonical; not up to a checkpoint that is not."""
        total = 0
        for entry in self.blocks:
            if not entry.canonical:
                return total
            total = entry.stop
        if self.state is not None and not self.state.canonical and total == self.state.stop:
            return self.state.start
        return total


class Index:
    """All known pieces of one engine. Invariants: `check`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._entries: dict[BlockId, Entry] = {}
        self._children: dict[tuple[BlockId, int], dict[BlockId, Entry]] = {}  # rows, by parent and first token
        self._following: dict[BlockId, dict[BlockId, Entry]] = {}  # rows, by parent

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
        for number, piece in enumerate(chain.ids[: limit // self.block_size]):
            entry = self._entries.get(piece)
            if entry is None or not entry.usable(canonical_only=canonical_only):
                break
            if entry.tokens.tobytes() != chain.block(number).tobytes():
                break
            blocks.append(entry)
        if not partial:
            return Match(tuple(blocks))
        done = len(blocks) * self.block_size
        rest = chain.tokens[done : min(limit, done + self.block_size)]
        best, take = None, 0
        for entry in self._siblings(chain.parent_of(len(blocks)), rest):
            if entry.usable(canonical_only=canonical_only):
                shared = common_prefix(entry.tokens, rest)
                if shared > take:
                    best, take = entry, shared
        return Match(tuple(blocks), best, take)

    def resume(self, chain: Chain, limit: int, *, canonical_only: bool) -> Match:
        """The longest prefix of at most `limit` tokens at whose end there is a checkpoint. Changes nothing.

        A tail must fit as a whole: its checkpoint is at its end.
        """
        blocks = self.match(chain, limit, canonical_only=canonical_only, partial=False).blocks
        done = len(blocks) * self.block_size
        rest = chain.tokens[done:limit]
        best: Match | None = None
        for entry in self._siblings(chain.parent_of(len(blocks)), rest):
            length = len(entry.tokens)
            if length == self.block_size or not entry.usable(canonical_only=canonical_only):
                continue
            state = self.checkpoint(entry.id, canonical_only=canonical_only)
            if state is not None and common_prefix(entry.tokens, rest) == length > (0 if best is None else best.take):
                best = Match(blocks, entry, length, state)
        if best is not None:
            return best
        for count in range(len(blocks), 0, -1):
            state = self.checkpoint(chain.ids[count - 1], canonical_only=canonical_only)
            if state is not None:
                return Match(blocks[:count], state=state)
        return Match(())

    def checkpoint(self, piece: BlockId, *, canonical_only: bool) -> Entry | None:
        """The usable checkpoint at the end of a piece."""
        found = self._entries.get(checkpoint_id(piece))
        return found if found is not None and found.usable(canonical_only=canonical_only) else None

    def parts(self, piece: BlockId) -> bool:
        """Whether canonical chains part behind a piece. Derived ones do not count: each reply that settles leaves one."""
        return len(list(islice((entry for entry in self.following(piece) if entry.canonical), 2))) == 2

    def following(self, piece: BlockId) -> Iterable[Entry]:
        """The rows that hang on a piece."""
        return self._following.get(piece, {}).values()

    def add(self, entry: Entry, tier: str, *, canonical: bool) -> bool:
        """Records a copy of `entry` in `tier`; says whether the tier should hold these rows.

        False, and nothing changes, if the tier already has a copy at least as good: derived never replaces canonical.
        """
        known = self._entries.get(entry.id)
        if known is None:
            self._entries[entry.id] = known = entry
            above = self._entries.get(entry.parent)
            entry.owner = entry.owner or (owner_of(entry.parent) if above is None else above.owner)
            if not entry.state:
                self._children.setdefault(_place(entry), {})[entry.id] = entry
                self._following.setdefault(entry.parent, {})[entry.id] = entry
        elif tier in known.copies and known.copies[tier] >= canonical:
            return False
        known.copies[tier] = canonical
        known.written = min(known.written, entry.written)
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
            if not entry.state:
                siblings = self._children[_place(entry)]
                del siblings[piece]
                if not siblings:
                    del self._children[_place(entry)]
                del self._following[entry.parent][piece]
                if not self._following[entry.parent]:
                    del self._following[entry.parent]

    def check(self) -> None:
        """Raises AssertionError if the index contradicts itself. Cheap enough to run when idle."""
        for piece, entry in self._entries.items():
            assert entry.id == piece
            assert entry.copies, "an entry without a copy"
            assert 1 <= len(entry.tokens) <= self.block_size
            assert entry.start % self.block_size == 0
            if entry.state:
                assert piece == checkpoint_id(entry.parent)
            else:
                assert self._children[_place(entry)][piece] is entry
        rows = sum(not entry.state for entry in self)
        assert sum(map(len, self._children.values())) == sum(map(len, self._following.values())) == rows


def _place(entry: Entry) -> tuple[BlockId, int]:
    return entry.parent, int(entry.tokens[0])
