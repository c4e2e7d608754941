"""Index: which entries are stored, and in which tier. It answers without touching a tier.

An *entry* is one stored unit: a block, an open tail, or a checkpoint.

* A block or open tail has the KV of its own tokens. Its parent is the block before it.
* A *checkpoint* is a copy of the state that cannot be truncated (recurrent layers, sliding windows) at one position. Its parent
  is the block or open tail at whose end it was taken, and it has the same tokens.

An entry has at most one copy in each tier (`memory`, `disk`). Each copy is canonical (from prefill calls of full blocks) or
derived (from decoding, from the last call of a prompt, or computed behind derived KV). Exact mode uses canonical copies only.

Example: after two chats with one system prompt of two blocks, the index has a tree. The system prompt is stored once:

    root ─▶ block 0 ─▶ block 1 ─┬─▶ block 2 ─▶ open tail      (first chat)
                                └─▶ block 2'                  (second chat)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from headstart.interfaces.tokens import BlockId, Tokens, common_prefix
from headstart.prefix_cache.blocks import Chain, checkpoint_id
from headstart.prefix_cache.quota import owner_of


@dataclass(slots=True, eq=False)
class Entry:
    """One stored unit: a block, an open tail, or a checkpoint.

    Attributes:
        start: position of its first token.
        copies: name of a tier → whether the copy there is canonical.
        pins: number of requests and writers that need the entry now. It is not evicted meanwhile.
        kept: whether its owner has pinned it (`serving/pins`), so that it is not evicted from memory.
        state: whether it is a checkpoint, at position `stop`. Otherwise it is KV.
        gap: prefill tokens that a checkpoint saves, counted from the checkpoint before it on its chain; 0 if unknown.
        protected: whether requests are expected to continue at this checkpoint (`checkpoints`).
        owner: whose it is (`quota`); the index sets it.
        written: when its tokens were stored first, in seconds since 1970. For a checkpoint: the earliest time of all tokens
            before it.
    """

    id: BlockId
    parent: BlockId
    tokens: Tokens
    start: int
    copies: dict[str, bool] = field(default_factory=dict)
    pins: int = 0
    kept: bool = False
    state: bool = False
    gap: int = 0
    protected: bool = True
    owner: bytes = b""
    written: float = 0.0

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)

    def usable(self, *, canonical_only: bool) -> bool:
        """Whether some copy may be used."""
        return any(self.copies.values()) if canonical_only else bool(self.copies)

    @property
    def canonical(self) -> bool:
        """Whether some copy is canonical."""
        return any(self.copies.values())


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a chain that can be restored.

    Attributes:
        blocks: the first blocks of the chain, without a gap.
        tail: a further entry of which the first `take` tokens fit; None if `take` is 0.
        state: the checkpoint at the end, in models that need one.
    """

    blocks: tuple[Entry, ...]
    tail: Entry | None = None
    take: int = 0
    state: Entry | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries with KV."""
        return self.blocks if self.tail is None else (*self.blocks, self.tail)

    @property
    def tokens(self) -> int:
        """Tokens that can be restored."""
        return sum(len(entry.tokens) for entry in self.blocks) + self.take

    @property
    def canonical(self) -> int:
        """Leading tokens with canonical KV; a derived checkpoint at the end excludes the last block."""
        total = 0
        for entry in self.blocks:
            if not entry.canonical:
                return total
            total = entry.stop
        if self.state is not None and not self.state.canonical and total == self.state.stop:
            return self.state.start
        return total


class IndexListener(Protocol):
    """Hears which copies come and go. It must return at once."""

    def added(self, entry: Entry, tier: str) -> None:
        """A copy came, or became canonical: `entry.copies` has it."""

    def removed(self, entry: Entry, tier: str) -> None:
        """A copy left."""


class NoIndexListener:
    """Nobody listens."""

    def added(self, entry: Entry, tier: str) -> None:
        pass

    def removed(self, entry: Entry, tier: str) -> None:
        pass


class Index:
    """All stored entries of one engine. `check` has the invariants."""

    def __init__(self, block_size: int, listener: IndexListener | None = None) -> None:
        self.block_size = block_size
        self._listener = NoIndexListener() if listener is None else listener
        self._entries: dict[BlockId, Entry] = {}
        self._siblings_by_token: dict[tuple[BlockId, int], dict[BlockId, Entry]] = {}  # KV, by parent and first token
        self._children: dict[BlockId, dict[BlockId, Entry]] = {}  # KV, by parent

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: BlockId) -> Entry | None:
        """The entry with this id."""
        return self._entries.get(key)

    def _siblings(self, parent: BlockId, tokens: Tokens) -> Iterable[Entry]:
        """The entries after `parent` that begin with the first of `tokens`."""
        return self._siblings_by_token.get((parent, int(tokens[0])), {}).values() if len(tokens) else ()

    # ── what can be restored ─────────────────────────────────────────────────────────────────────────────────────────

    def match(self, chain: Chain, limit: int, *, canonical_only: bool, partial: bool) -> Match:
        """The longest prefix of at most `limit` tokens that can be restored. Changes nothing.

        With `partial`, a part of the entry after the last full block may be used. Tokens are compared too, not only ids: a hash
        collision cannot return the KV of another text.
        """
        blocks: list[Entry] = []
        for number, key in enumerate(chain.ids[: limit // self.block_size]):
            entry = self._entries.get(key)
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
        """The longest prefix of at most `limit` tokens that ends at a checkpoint. Changes nothing.

        An open tail must match completely, because its checkpoint is at its end.
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

    def checkpoint(self, key: BlockId, *, canonical_only: bool) -> Entry | None:
        """The usable checkpoint at the end of a block or open tail."""
        found = self._entries.get(checkpoint_id(key))
        return found if found is not None and found.usable(canonical_only=canonical_only) else None

    def is_branch_point(self, key: BlockId) -> bool:
        """Whether at least two canonical entries follow a block. Derived ones do not count: each settled reply leaves one."""
        return len(list(islice((entry for entry in self.children(key) if entry.canonical), 2))) == 2

    def children(self, key: BlockId) -> Iterable[Entry]:
        """The blocks and open tails that follow a block."""
        return self._children.get(key, {}).values()

    # ── what is stored ───────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, entry: Entry, tier: str, *, canonical: bool) -> bool:
        """Records a copy of `entry` in `tier`. Returns whether the tier should store these bytes.

        Returns False and changes nothing if the tier already has a copy that is at least as good: derived never replaces
        canonical.
        """
        known = self._entries.get(entry.id)
        if known is None:
            self._entries[entry.id] = known = entry
            above = self._entries.get(entry.parent)
            entry.owner = entry.owner or (owner_of(entry.parent) if above is None else above.owner)
            if not entry.state:
                self._siblings_by_token.setdefault(_place(entry), {})[entry.id] = entry
                self._children.setdefault(entry.parent, {})[entry.id] = entry
        elif tier in known.copies and known.copies[tier] >= canonical:
            return False
        known.copies[tier] = canonical
        known.written = min(known.written, entry.written)
        self._listener.added(known, tier)
        return True

    def wants(self, key: BlockId, tier: str, *, canonical: bool) -> bool:
        """Whether `add` would accept such a copy."""
        known = self._entries.get(key)
        return known is None or tier not in known.copies or known.copies[tier] < canonical

    def covered(self, parent: BlockId, tokens: Tokens) -> list[Entry]:
        """The open tails after `parent` that an entry with `tokens` makes redundant: its proper prefixes."""
        return [
            entry
            for entry in self._siblings(parent, tokens)
            if len(entry.tokens) < len(tokens) and common_prefix(entry.tokens, tokens) == len(entry.tokens)
        ]

    def covers(self, parent: BlockId, tokens: Tokens) -> bool:
        """Whether an entry after `parent` begins with all of `tokens`."""
        return any(common_prefix(entry.tokens, tokens) == len(tokens) for entry in self._siblings(parent, tokens))

    def remove(self, key: BlockId, tier: str) -> None:
        """Removes the copy in `tier`, and the entry with its last copy."""
        entry = self._entries[key]
        del entry.copies[tier]
        if not entry.copies:
            del self._entries[key]
            if not entry.state:
                siblings = self._siblings_by_token[_place(entry)]
                del siblings[key]
                if not siblings:
                    del self._siblings_by_token[_place(entry)]
                del self._children[entry.parent][key]
                if not self._children[entry.parent]:
                    del self._children[entry.parent]
        self._listener.removed(entry, tier)

    def check(self) -> None:
        """Raises AssertionError if the index contradicts itself. Fast enough to run when the engine is idle."""
        for key, entry in self._entries.items():
            assert entry.id == key
            assert entry.copies, "an entry without a copy"
            assert 1 <= len(entry.tokens) <= self.block_size
            assert entry.start % self.block_size == 0
            if entry.state:
                assert key == checkpoint_id(entry.parent)
            else:
                assert self._siblings_by_token[_place(entry)][key] is entry
        kv = sum(not entry.state for entry in self)
        assert sum(map(len, self._siblings_by_token.values())) == sum(map(len, self._children.values())) == kv


def _place(entry: Entry) -> tuple[BlockId, int]:
    return entry.parent, int(entry.tokens[0])
