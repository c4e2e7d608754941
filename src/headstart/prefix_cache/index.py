"""Index: which entries are stored, and in which tier. It answers without touching a tier.

An *entry* is one stored unit: a block, an open tail, or a checkpoint.

* A block or open tail has the KV of its own tokens. Its parent is the block before it.
* A *checkpoint* is a copy of the state that cannot be truncated (recurrent layers, sliding windows) at one position. Its parent
  is the block or open tail at whose end it was taken, and it has the same tokens.

An entry has at most one copy in each tier (`memory`, `disk`). Each copy is canonical (a full block of a prompt) or derived
(from decoding, from the open tail of a prompt, or computed behind derived KV). Exact mode uses canonical copies only.

Example: after two chats with one system prompt of two blocks, the index has a tree. The system prompt is stored once:

    root ─▶ block 0 ─▶ block 1 ─┬─▶ block 2 ─▶ open tail      (first chat)
                                └─▶ block 2'                  (second chat)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, MutableMapping, ValuesView
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from headstart.interfaces.tokens import BlockId, Tokens
from headstart.prefix_cache.blocks import Chain, checkpoint_id
from headstart.prefix_cache.id_map import IdMap
from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST, ReuseHistory
from headstart.prefix_cache.siblings import WIDTH, Siblings

TierCopies = Mapping[str, bool]
"""Name of a tier → whether the copy there is canonical. It never changes: an entry gets another one."""
NO_COPIES: TierCopies = MappingProxyType({})
_COPIES: dict[frozenset[tuple[str, bool]], TierCopies] = {frozenset(): NO_COPIES}


def copies_of(copies: Mapping[str, bool]) -> TierCopies:
    """The one read-only object for these copies. There are very few, and millions of entries share them."""
    key = frozenset(copies.items())
    found = _COPIES.get(key)
    return _COPIES.setdefault(key, MappingProxyType(dict(copies))) if found is None else found


class Entry(Siblings["Entry"], ReuseHistory):
    """One stored unit: a block, an open tail, or a checkpoint. It heads the siblings that follow it.

    Millions of them may be stored, so what they have in common they share, and small things stand in one number. Python's
    collector of cycles does not look at them: nothing in an entry leads back to it, so no cycle has one.

    What an entry is does not change: `id`, `parent`, `tokens`, `start`, `state`, `owner`. The index alone writes `copies` and
    `written`. Retention (`eviction`) alone writes how it was used in memory: what it has as a `ReuseHistory`, `followers` and
    `rank`. These stand in the entry because a table beside it would take more memory than they do.

    Attributes:
        packed: its tokens as bytes, as a block's id hashes them.
        start: position of its first token.
        copies: in which tiers it is. Other threads may read it: a change replaces it as a whole.
        holds: number of requests and writers that need the entry now. It is not evicted meanwhile.
        pinned: whether its owner has pinned it (`serving/pins`), so that it is not evicted from memory.
        state: whether it is a checkpoint, at position `stop`. Otherwise it is KV.
        cell: number of its cell in memory (`tiers/memory.CellPlaces`); None if it has none. `EntryPlaces` writes it.
        gap: prefill tokens that a checkpoint saves, counted from the checkpoint before it on its chain; 0 if unknown.
        protected: whether requests are expected to continue at this checkpoint (`checkpoints`).
        owner: whose it is (`quota`); the index sets it.
        written: when its tokens were stored first, in seconds since 1970, to a millisecond. For a checkpoint: the earliest
            time of all tokens before it.
        uses: number of uses, its ghost's included; 0 as long as it is not in memory, and then the history means nothing.
        followers: number of entries in memory that follow it. It is a leaf without them.
        rank: its rank as long as it is in the order of eviction.
    """

    __slots__ = (
        "_marks",
        "children",
        "copies",
        "followers",
        "id",
        "last",
        "owner",
        "packed",
        "parent",
        "rank",
        "request_traits",
        "saved_per_byte",
        "start",
        "uses",
    )

    def __init__(
        self,
        id: BlockId,
        parent: BlockId,
        tokens: Tokens,
        start: int,
        copies: Mapping[str, bool] = NO_COPIES,
        *,
        state: bool = False,
        gap: int = 0,
        protected: bool = True,
        owner: bytes = b"",
        written: float = 0.0,
    ) -> None:
        super().__init__()
        self.id = id
        self.parent = parent
        self.packed = tokens.astype(_INT32, copy=False).tobytes()
        self.start = start
        self.copies = copies if copies is NO_COPIES else copies_of(copies)
        self._marks = gap << _GAP | (_STATE if state else 0) | (_PROTECTED if protected else 0)
        self.owner = owner
        self.written = written
        self.saved_per_byte = self.last = 0.0
        self.uses = self.children = self.followers = 0
        self.request_traits = UNKNOWN_REQUEST
        self.rank: float | None = None
        _untrack(self)

    @property
    def tokens(self) -> Tokens:
        """Its tokens, as a view that cannot be written."""
        return np.frombuffer(self.packed, _INT32)

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return len(self.packed) // WIDTH

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + len(self.packed) // WIDTH

    @property
    def pinned(self) -> bool:
        return bool(self._marks & _PINNED)

    @pinned.setter
    def pinned(self, value: bool) -> None:
        self._marks = self._marks & ~_PINNED | (_PINNED if value else 0)

    @property
    def protected(self) -> bool:
        return bool(self._marks & _PROTECTED)

    @protected.setter
    def protected(self, value: bool) -> None:
        self._marks = self._marks & ~_PROTECTED | (_PROTECTED if value else 0)

    @property
    def state(self) -> bool:
        return bool(self._marks & _STATE)

    @property
    def cell(self) -> int | None:
        number = self._marks >> _CELL & _CELLS
        return number - 1 if number else None

    @cell.setter
    def cell(self, value: int | None) -> None:
        self._marks = self._marks & ~(_CELLS << _CELL) | (0 if value is None else value + 1) << _CELL

    @property
    def written(self) -> float:
        return (self._marks >> _WRITTEN & _TIMES) / _A_SECOND

    @written.setter
    def written(self, value: float) -> None:
        time = max(0, min(int(value * _A_SECOND), _TIMES))
        self._marks = self._marks & ~(_TIMES << _WRITTEN) | time << _WRITTEN

    @property
    def gap(self) -> int:
        return self._marks >> _GAP & _GAPS

    @gap.setter
    def gap(self, value: int) -> None:
        self._marks = self._marks & ~(_GAPS << _GAP) | value << _GAP

    @property
    def holds(self) -> int:
        return self._marks >> _HOLDS

    @holds.setter
    def holds(self, value: int) -> None:
        self._marks = value << _HOLDS | self._marks & ((1 << _HOLDS) - 1)

    @property
    def needed(self) -> bool:
        """Whether it is held, or its owner has pinned it."""
        return bool(self._marks >> _HOLDS or self._marks & _PINNED)

    def usable(self, *, canonical_only: bool) -> bool:
        """Whether some copy may be used."""
        return True in self.copies.values() if canonical_only else bool(self.copies)

    @property
    def canonical(self) -> bool:
        """Whether some copy is canonical."""
        return True in self.copies.values()

    def __repr__(self) -> str:
        kind = "checkpoint" if self.state else "KV"
        return f"Entry({self.id.hex()[:8]}, {kind} {self.start}–{self.stop}, {dict(self.copies)})"


_PINNED, _PROTECTED, _STATE = 1, 2, 4
_CELL, _WRITTEN, _GAP, _HOLDS = 3, 33, 75, 107
"""The first bits of these numbers in an entry's marks. A block has no gap, and no holds unless it is in use: its marks are an
object of 36 bytes."""
_CELLS, _TIMES, _GAPS = (1 << _WRITTEN - _CELL) - 1, (1 << _GAP - _WRITTEN) - 1, (1 << _HOLDS - _GAP) - 1
_A_SECOND = 1000
"""Times are kept in milliseconds, rounded down."""
_INT32 = np.dtype("<i4")
_untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))
"""Takes an object out of the sight of Python's collector, as Python itself does with tuples of numbers."""


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
            known = entry
            self._attach(entry)
        elif tier in known.copies and known.copies[tier] >= canonical:
            return False
        self._set(known, copies_of({**known.copies, tier: canonical}))
        if known is not entry:
            known.written = min(known.written, entry.written)
        self._listener.added(known, tier)
        return True

    def _attach(self, entry: Entry) -> None:
        """Gives a new entry its place. What it has in common with others becomes one object."""
        above = self._entries.get(entry.parent)
        owner = entry.owner or (owner_of(entry.parent) if above is None else above.owner)
        entry.owner = self._owners.setdefault(owner, owner)
        entry.start = self._shared(entry.start)
        if above is not None:
            entry.parent = above.id
            if entry.packed == above.packed:
                entry.packed = above.packed
        elif not entry.state:
            sibling = self._unattached.setdefault(entry.parent, Siblings()).some()
            entry.parent = entry.parent if sibling is None else sibling.parent
        entry.copies = NO_COPIES
        self._entries[entry.id] = entry
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
        """Replaces the copies of an entry, and moves it among its siblings."""
        before = entry.copies
        if entry.state or (before and after and entry.canonical == (True in after.values())):
            entry.copies = after
            return
        siblings = self._entries.get(entry.parent) or self._unattached[entry.parent]
        if before:
            siblings.take(entry)
        entry.copies = after
        if after:
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
        kv, size, shared = 0, self.block_size, {id(copies) for copies in _COPIES.values()}
        for key, entry in self._entries.items():
            assert entry.id == key
            assert entry.copies, "an entry without a copy"
            assert id(entry.copies) in shared
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


class EntryPlaces(MutableMapping[BlockId, int]):
    """The cells of entries in memory, in the entries themselves. Only an entry of the index can have one."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._count = 0

    def __getitem__(self, key: BlockId) -> int:
        entry = self._index.get(key)
        if entry is None or (place := entry.cell) is None:
            raise KeyError(key)
        return place

    def get(self, key: BlockId, default: Any = None) -> Any:
        entry = self._index.get(key)
        return default if entry is None or (place := entry.cell) is None else place

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self.get(key) is not None

    def __setitem__(self, key: BlockId, place: int) -> None:
        entry = self._index.get(key)
        if entry is None:
            raise KeyError(key)
        self._count += entry.cell is None
        entry.cell = place

    def __delitem__(self, key: BlockId) -> None:
        entry = self._index.get(key)
        if entry is None or entry.cell is None:
            raise KeyError(key)
        entry.cell = None
        self._count -= 1

    def __iter__(self) -> Iterator[BlockId]:
        return (entry.id for entry in self._index if entry.cell is not None)

    def values(self) -> ValuesView[int]:
        return _Cells(self)

    def cells(self) -> Iterator[int]:
        return (place for entry in self._index if (place := entry.cell) is not None)

    def __len__(self) -> int:
        return self._count


class _Cells(ValuesView[int]):
    """All cells, without a search for each."""

    _mapping: EntryPlaces

    def __iter__(self) -> Iterator[int]:
        return self._mapping.cells()


_NONE: Siblings[Entry] = Siblings()
"""Of a parent that nothing follows."""
