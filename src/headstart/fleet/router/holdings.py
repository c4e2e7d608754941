"""Holdings: which replica holds which blocks, in which tiers, and what each could reuse of a prompt.

A dictionary gives for each key its `Copies`: which replicas hold it, and in which tiers. Equal copies are one object. The
blocks of a conversation are nearly always held by the same replicas, so a chain of hundreds of blocks is a few runs of one
object each, and a lookup costs a step for each run.

Replicas are *columns* here, small numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from headstart.fleet.router.chains import PromptChain, checkpoint_key
from headstart.fleet.router.reports import BlockKey, Tier, TierKeys

Column = int
Counts = npt.NDArray[np.int64]
"""One number for each column."""

_SHARED = 1 << Tier.SHARED
_OWN = _SHARED - 1
"""The tiers that only the replica itself can use."""
_ALL = _OWN | _SHARED
_BEST = np.array([Tier.SHARED, *((bits & -bits).bit_length() - 1 for bits in range(1, _ALL + 1))])
"""The cheapest tier of a set of tiers."""
_SLACK = 1024


class Copies:
    """Who holds a block. Immutable.

    Attributes:
        bits: the tiers of each column that holds it, as a sum of ``1 << tier``.
        own: the columns that hold it themselves.
        best: the cheapest tier of each of these.
        shared: whether it is said to be in the shared tier.
    """

    __slots__ = ("__weakref__", "best", "bits", "own", "shared")

    def __init__(self, bits: dict[Column, int]) -> None:
        self.bits = bits
        own = [column for column, tiers in bits.items() if tiers & _OWN]
        self.own = np.array(own, np.intp)
        self.best = _BEST[np.array([bits[column] for column in own], np.intp)]
        self.shared = any(tiers & _SHARED for tiers in bits.values())


@dataclass(frozen=True, slots=True)
class Reach:
    """What each column could reuse of a prompt, in blocks from its beginning.

    A model with state can use as much as ends with a checkpoint that can be reached in the same way.

    Attributes:
        own: without the shared tier.
        all: with it; at least `own`.
        tiers: tiers × columns: how many of `all` come from each tier, if each block comes from its cheapest.
    """

    own: Counts
    all: Counts
    tiers: Counts


class Holdings:
    """What the replicas hold. Columns are added by `grow`."""

    def __init__(self) -> None:
        self._copies: dict[BlockKey, Copies] = {}
        self._same: WeakValueDictionary[frozenset[tuple[Column, int]], Copies] = WeakValueDictionary()
        self._logs: list[array[int]] = []
        self._held: list[int] = []

    def grow(self) -> Column:
        """Adds a column."""
        self._logs.append(array("Q"))
        self._held.append(0)
        return len(self._held) - 1

    def __len__(self) -> int:
        """The number of different keys."""
        return len(self._copies)

    def held(self, column: Column) -> int:
        """The number of keys of a column, those in the shared tier included."""
        return self._held[column]

    def change(self, column: Column, removed: TierKeys, added: TierKeys) -> None:
        """Applies a replica's changes. What is removed and added is there afterwards."""
        for tier, keys in removed.items():
            self._set(column, keys, 0, 1 << tier)
        for tier, keys in added.items():
            self._set(column, keys, 1 << tier, 0)

    def replace(self, column: Column, held: TierKeys) -> None:
        """Replaces all that is known of a replica, except for what is coming."""
        self._set(column, self._keys(column), 0, _ALL & ~(1 << Tier.COMING))
        self.change(column, {}, held)

    def clear(self, column: Column) -> None:
        """Forgets a replica."""
        self._set(column, self._keys(column), 0, _ALL)
        self._logs[column] = array("Q")

    def tiers(self, column: Column, key: BlockKey) -> frozenset[Tier]:
        """In which tiers a column holds a key."""
        copies = self._copies.get(key)
        bits = 0 if copies is None else copies.bits.get(column, 0)
        return frozenset(tier for tier in Tier if bits >> tier & 1)

    def reach(self, chain: PromptChain) -> Reach:
        """What each column could reuse of a prompt."""
        columns = len(self._held)
        own, whole = np.zeros(columns, np.int64), np.zeros(columns, np.int64)
        tiers = np.zeros((len(Tier), columns), np.int64)
        usable = Reach(own.copy(), whole.copy(), tiers.copy()) if chain.stateful else Reach(own, whole, tiers)
        going, owning = np.ones(columns, bool), np.ones(columns, bool)
        for copies, count, checkpoint in self._runs(chain):
            has = np.zeros(columns, bool)
            has[copies.own] = True
            owning &= has
            own += count * owning
            if copies.shared:
                tiers[Tier.SHARED] += count * (going & ~has)
            else:
                going &= has
                if not going.any():
                    break
            whole += count * going
            here = going[copies.own]
            tiers[copies.best[here], copies.own[here]] += count
            if checkpoint is not None:
                ends = np.zeros(columns, bool)
                ends[checkpoint.own] = True
                np.copyto(usable.own, own, where=owning & ends)
                ends |= checkpoint.shared
                ends &= going
                np.copyto(usable.all, whole, where=ends)
                np.copyto(usable.tiers, tiers, where=ends)
        return usable

    def _runs(self, chain: PromptChain) -> Iterator[tuple[Copies, int, Copies | None]]:
        """The blocks up to the first that nobody holds, in runs with the same copies, and the checkpoint at a run's end."""
        keys = chain.keys
        found = map(self._copies.get, keys)
        if not chain.stateful:
            for copies, run in groupby(found):
                if copies is None:
                    return
                yield copies, len(list(run)), None
            return
        count, current = 0, None
        for key, copies in zip(keys, found, strict=True):
            if copies is not current and count:
                assert current is not None
                yield current, count, None
                count = 0
            if copies is None:
                return
            current, count = copies, count + 1
            checkpoint = self._copies.get(checkpoint_key(key))
            if checkpoint is not None:
                yield copies, count, checkpoint
                count = 0
        if count:
            assert current is not None
            yield current, count, None

    def _set(self, column: Column, keys: Iterable[BlockKey], on: int, off: int) -> None:
        """Changes the tiers of a column for some keys. Keys with the same copies change together."""
        listed = list(dict.fromkeys(keys))
        position = 0
        for copies, run in groupby(map(self._copies.get, listed)):
            part = listed[position : (position := position + len(list(run)))]
            bits = 0 if copies is None else copies.bits.get(column, 0)
            changed = bits & ~off | on
            if changed == bits:
                continue
            if not bits:
                self._logs[column].extend(part)
                self._held[column] += len(part)
            elif not changed:
                self._held[column] -= len(part)
            self._assign(part, self._with(copies, column, changed))
        if len(self._logs[column]) > 2 * self._held[column] + _SLACK:
            self._logs[column] = array("Q", self._keys(column))

    def _assign(self, keys: Sequence[BlockKey], copies: Copies | None) -> None:
        if copies is None:
            for key in keys:
                del self._copies[key]
        else:
            self._copies.update(dict.fromkeys(keys, copies))

    def _with(self, copies: Copies | None, column: Column, tiers: int) -> Copies | None:
        """The copies after a column's tiers changed; None if nobody holds the block any longer."""
        bits = {} if copies is None else copies.bits.copy()
        if tiers:
            bits[column] = tiers
        else:
            del bits[column]
        if not bits:
            return None
        name = frozenset(bits.items())
        same = self._same.get(name)
        if same is None:
            same = self._same[name] = Copies(bits)
        return same

    def _keys(self, column: Column) -> list[BlockKey]:
        """All keys of a column. Its log has each of them, and perhaps some that have left."""
        return [key for key in dict.fromkeys(self._logs[column]) if self._holds(column, key)]

    def _holds(self, column: Column, key: BlockKey) -> bool:
        copies = self._copies.get(key)
        return copies is not None and column in copies.bits
