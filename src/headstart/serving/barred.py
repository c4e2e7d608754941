"""Barred: entries that are being deleted, in pieces. No request loads them meanwhile, no slot with a block of them is saved,
and what the disk reports of them is not heard: the disk is asked again afterwards.

So a deletion need not be one call: between two of its pieces, nothing brings back what it deletes. For the engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headstart.interfaces.tokens import BlockId


class Owners:
    """Some owners, or all of them. An entry whose owner is unknown (b"") may be of any of them."""

    def __init__(self) -> None:
        self._some: set[bytes] = set()
        self._all = False

    def __contains__(self, owner: bytes) -> bool:
        return self._all or owner in self._some or (bool(self._some) and not owner)

    def __bool__(self) -> bool:
        return self._all or bool(self._some)

    def add(self, owners: Iterable[bytes] | None) -> None:
        """Adds some owners; None adds all."""
        if owners is None:
            self._all = True
        else:
            self._some.update(owners)


class Barred:
    """Ids of entries. Several deletions may bar one id, which is free again when all of them have lifted it.

    Attributes:
        owners: those of whom another process has deleted something. What only memory has of them is barred.
    """

    def __init__(self) -> None:
        self._deletions: Counter[BlockId] = Counter()
        self.owners = Owners()

    def __contains__(self, key: BlockId) -> bool:
        return key in self._deletions

    def __len__(self) -> int:
        return len(self._deletions)

    def meets(self, keys: Iterable[BlockId]) -> bool:
        """Whether any of these is barred."""
        return bool(self._deletions) and any(key in self._deletions for key in keys)

    def add(self, keys: Iterable[BlockId]) -> None:
        self._deletions.update(keys)

    def lift(self, keys: Iterable[BlockId]) -> None:
        """Ends what `add` began, with the same keys."""
        for key in keys:
            if self._deletions[key] > 1:
                self._deletions[key] -= 1
            else:
                del self._deletions[key]
