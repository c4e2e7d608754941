"""Barred: entries that are being deleted, in pieces. No request loads them meanwhile, and reports of the disk are ignored.

So a deletion need not be one call: between two of its pieces, nothing brings back what it deletes. For the engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headstart.interfaces.tokens import BlockId


class Barred:
    """Ids of entries. Several deletions may bar one id, which is free again when all of them have lifted it."""

    def __init__(self) -> None:
        self._deletions: Counter[BlockId] = Counter()

    def __contains__(self, key: BlockId) -> bool:
        return key in self._deletions

    def __len__(self) -> int:
        return len(self._deletions)

    def add(self, keys: Iterable[BlockId]) -> None:
        self._deletions.update(keys)

    def lift(self, keys: Iterable[BlockId]) -> None:
        """Ends what `add` began, with the same keys."""
        for key in keys:
            if self._deletions[key] > 1:
                self._deletions[key] -= 1
            else:
                del self._deletions[key]
