"""Tiers of a simulated fleet: sets of blocks of equal size, from which the least recently used ones are evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from headstart.fleet.router.reports import BlockKey


class BlockLru:
    """At most `room` blocks. Of the blocks of one prompt, later ones are evicted before earlier ones."""

    def __init__(self, room: float) -> None:
        self._room = room
        self._blocks: dict[BlockKey, None] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterable[BlockKey]:
        return iter(self._blocks)

    def leading(self, keys: Sequence[BlockKey], start: int = 0) -> int:
        """The number of blocks from number `start` on that are there, up to the first that is not."""
        return sum(1 for _ in takewhile(self._blocks.__contains__, keys[start:] if start else keys))

    def use(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], list[BlockKey]]:
        """Marks blocks as used just now, and adds those that are missing. Returns what was added, and what was evicted.

        If they do not fit, the first ones are kept.
        """
        blocks = self._blocks
        if self._room < len(keys):
            keys = keys[: int(self._room)]
        added = [key for key in keys if key not in blocks]
        for key in reversed(keys):
            blocks.pop(key, None)
            blocks[key] = None
        evicted = []
        while len(blocks) > self._room:
            evicted.append(next(iter(blocks)))
            del blocks[evicted[-1]]
        return added, evicted

    def drop(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Removes blocks. Returns those that were there."""
        found = [key for key in keys if key in self._blocks]
        for key in found:
            del self._blocks[key]
        return found
