"""Entry: one stored unit of the prefix cache, and in which tiers it has copies.

An *entry* is one stored unit: a block, an open tail, or a checkpoint.

* A block or open tail has the KV of its own tokens. Its parent is the block before it.
* A *checkpoint* is a copy of the state that cannot be truncated (recurrent layers, sliding windows) at one position. Its parent
  is the block or open tail at whose end it was taken, and it has the same tokens.

An entry has at most one copy in each tier (`memory`, `disk`). Each copy is canonical (a full block of a prompt) or derived
(from decoding, from the open tail of a prompt, or computed behind derived KV). Exact mode uses canonical copies only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import numpy as np

from headstart.interfaces.tokens import BlockId, Tokens
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


@cache
def only_copy(tier: str, canonical: bool) -> TierCopies:
    """The copies of an entry that is in one tier."""
    return copies_of({tier: canonical})


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
