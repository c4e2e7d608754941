"""Index: which entries are stored, and in which tier. It answers without touching a tier.

Example: after two chats with one system prompt of two blocks, the index has a tree. The system prompt is stored once:

    root ─▶ block 0 ─▶ block 1 ─┬─▶ block 2 ─▶ open tail      (first chat)
                                └─▶ block 2'                  (second chat)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from headstart.interfaces.tokens import BlockId, Tokens
from headstart.prefix_cache.blocks import Chain, checkpoint_id
from headstart.prefix_cache.entry import NO_COPIES, Entry, TierCopies, copies_of, only_copy
from headstart.prefix_cache.id_map import IdMap
from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.siblings import WIDTH, Siblings


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
        return (self.blocks[-1].stop if self.blocks else 0) + self.take

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
    """All stored entries of one engine. `check` has the invariants.

    Attributes:
        get: the entry with an id; None if it is not stored. (The map's own method: a hit asks it for each block.)
    """

    get: Callable[[BlockId], Entry | None]

    def __init__(self, block_size: int, listener: IndexListener | None = None) -> None:
        self.block_size = block_size
        self._listener = NoIndexListener() if listener is None else listener
        self._entries = IdMap[Entry]()
        self.get = self._entries.get
        self._unattached: dict[BlockId, Siblings[Entry]] = {}  # by parents that are not stored, as roots never are
        self._starts: list[int] = []  # one object for each multiple of the block size
        self._owners: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return self._entries.values()

    def pieces(self) -> Iterator[list[Entry]]:
        """All entries, in pieces. The index may change between two pieces: see `IdMap.pieces`."""
        return self._entries.pieces()

    def _after(self, parent: BlockId) -> Siblings[Entry]:
        """The blocks and open tails that follow `parent`."""
        return self._entries.get(parent) or self._unattached.get(parent) or _NONE

    # ── what can be restored ─────────────────────────────────────────────────────────────────────────────────────────

    def match(self, chain: Chain, limit: int, *, canonical_only: bool, partial: bool) -> Match:
        """The longest prefix of at most `limit` tokens that can be restored. Changes nothing.

        With `partial`, a part of the entry after the last full block may be used. Tokens are compared too, not only ids: a hash
        collision cannot return the KV of another text.
        """
        blocks: list[Entry] = []
        size = self.block_size * WIDTH
        data = chain.tokens[:limit].tobytes()
        for number, key in enumerate(chain.ids[: limit // self.block_size]):
            entry = self._entries.get(key)
            if entry is None or not entry.usable(canonical_only=canonical_only):
                break
            if entry.packed != data[number * size : (number + 1) * size]:
                break
            blocks.append(entry)
        if not partial:
            return Match(tuple(blocks))
        rest = data[len(blocks) * size : (len(blocks) + 1) * size]
        tail, take = self._after(chain.parent_of(len(blocks))).nearest(rest, canonical_only=canonical_only)
        return Match(tuple(blocks), tail, take)

    def resume(self, chain: Chain, limit: int, *, canonical_only: bool) -> Match:
        """The longest prefix of at most `limit` tokens that ends at a checkpoint. Changes nothing.

        An open tail must match completely, because its checkpoint is at its end.
        """
        blocks = self.match(chain, limit, canonical_only=canonical_only, partial=False).blocks
        done = len(blocks) * self.block_size
        rest = chain.tokens[done : min(limit, done + self.block_size)].tobytes()
        best: Match | None = None
        for tail in self._after(chain.parent_of(len(blocks))).prefixes(rest, canonical_only=canonical_only):
            if self.block_size > tail.length > (0 if best is None else best.take):
                state = self.checkpoint(tail.id, canonical_only=canonical_only)
                best = best if state is None else Match(blocks, tail, tail.length, state)
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
        return self._after(key).branches

    def children(self, key: BlockId) -> Siblings[Entry]:
        """The blocks and open tails that follow a block."""
        return self._after(key)

    # ── what is stored ───────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, entry: Entry, tier: str, *, canonical: bool) -> bool:
        """Records a copy of `entry` in `tier`. Returns whether the tier should store these bytes.

        Returns False and changes nothing if the tier already has a copy that is at least as good: derived never replaces
        canonical.
        """
        known = self._entries.get(entry.id)
        if known is None:
            self._attach(entry, only_copy(tier, canonical))
            self._listener.added(entry, tier)
            return True
        if tier in known.copies and known.copies[tier] >= canonical:
            return False
        self._set(known, copies_of({**known.copies, tier: canonical}))
        known.written = min(known.written, entry.written)
        self._listener.added(known, tier)
        return True

    def _attach(self, entry: Entry, copies: TierCopies) -> None:
        """Gives a new entry its copies and its place. What it has in common with others becomes one object."""
        above = self._entries.get(entry.parent)
        owner = entry.owner or (owner_of(entry.parent) if above is None else above.owner)
        entry.owner = self._owners.setdefault(owner, owner)
        entry.start = self._shared(entry.start)
        entry.copies = copies
        if above is not None:
            entry.parent = above.id
            if entry.packed == above.packed:
                entry.packed = above.packed
        self._entries[entry.id] = entry
        if not entry.state:
            siblings: Siblings[Entry] | None = above or self._unattached.get(entry.parent)
            if siblings is None:
                siblings = self._unattached[entry.parent] = Siblings()
            elif above is None and (sibling := siblings.some()) is not None:
                entry.parent = sibling.parent
            siblings.put(entry)
        waiting = self._unattached.pop(entry.id, None)
        if waiting is not None:
            waiting.move_to(entry)

    def _shared(self, start: int) -> int:
        """The same number, as the one object that entries at this position share."""
        number, rest = divmod(start, self.block_size)
        if rest or number > len(self._starts):  # a chain begins at 0, so the list has no gaps
            return start
        if number == len(self._starts):
            self._starts.append(start)
        return self._starts[number]

    def _set(self, entry: Entry, after: TierCopies) -> None:
        """Replaces the copies of a stored entry, and moves it among its siblings."""
        if entry.state or entry.canonical == (True in after.values()):
            entry.copies = after
            return
        siblings = self._after(entry.parent)
        siblings.take(entry)
        entry.copies = after
        siblings.put(entry)

    def wants(self, key: BlockId, tier: str, *, canonical: bool) -> bool:
        """Whether `add` would accept such a copy."""
        known = self._entries.get(key)
        return known is None or tier not in known.copies or known.copies[tier] < canonical

    def covered(self, parent: BlockId, tokens: Tokens) -> list[Entry]:
        """The open tails after `parent` that an entry with `tokens` makes redundant: its proper prefixes."""
        packed = tokens.tobytes()
        found = self._after(parent).prefixes(packed, canonical_only=False)
        return [entry for entry in found if len(entry.packed) < len(packed)]

    def covers(self, parent: BlockId, tokens: Tokens) -> bool:
        """Whether an entry after `parent` begins with all of `tokens`."""
        return self._after(parent).continues(tokens.tobytes())

    def remove(self, key: BlockId, tier: str) -> None:
        """Removes the copy in `tier`, and the entry with its last copy."""
        entry = self._entries[key]
        copies = entry.copies
        assert tier in copies
        if len(copies) > 1:
            self._set(entry, copies_of({name: good for name, good in copies.items() if name != tier}))
        else:
            self._detach(entry)
        self._listener.removed(entry, tier)

    def _detach(self, entry: Entry) -> None:
        """Removes an entry. What follows it waits for it to come back."""
        siblings = self._after(entry.parent)
        if not entry.state:
            siblings.take(entry)
        entry.copies = NO_COPIES
        del self._entries[entry.id]
        if entry.followed:
            entry.move_to(self._unattached.setdefault(entry.id, Siblings()))
        if not siblings.followed and entry.parent in self._unattached:
            del self._unattached[entry.parent]

    def check(self) -> None:
        """Raises AssertionError if the index contradicts itself. It looks at everything: for tests."""
        kv, size = 0, self.block_size
        for key, entry in self._entries.items():
            assert entry.id == key
            assert entry.copies, "an entry without a copy"
            assert copies_of(entry.copies) is entry.copies
            assert 1 <= entry.length <= size
            assert entry.start % size == 0
            if entry.state:
                assert key == checkpoint_id(entry.parent)
            else:
                kv += 1
        followed: list[tuple[BlockId, Siblings[Entry]]] = [(head.id, head) for head in self if head.followed]
        for key, head in (*followed, *self._unattached.items()):
            head.check()
            for entry in head:
                kv -= 1
                assert entry.parent == key
                assert self._entries[entry.id] is entry
        assert not kv, "an entry follows no parent, or several"
        assert not any(key in self._entries for key in self._unattached)
        assert all(head.some() is not None for head in self._unattached.values())


_NONE: Siblings[Entry] = Siblings()
"""Of a parent that nothing follows."""
