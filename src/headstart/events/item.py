"""Item: a piece of an event, and who may read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

EACH = 128
"""Most requests of one owner that are remembered."""
ALL = 2048
"""Most requests that are remembered. If there are more, the owner with the most loses its oldest."""


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of JSON. `owner`: who may read it, beside the operator. `public`: what others read in its place, or b""."""

    owner: bytes
    data: bytes
    public: bytes = b""


class LatestRequests:
    """The latest requests of each owner. How many others send changes nothing of that, unless very many owners do."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[int, Item]] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Item]:
        """All of them, by number."""
        numbered = [pair for mine in self._of.values() for pair in mine.items()]
        return (item for _, item in sorted(numbered, key=lambda pair: pair[0]))

    def put(self, number: int, item: Item) -> None:
        """Adds a request, or replaces what was known of it."""
        mine = self._of.setdefault(item.owner, {})
        self._count += number not in mine
        mine[number] = item
        if len(mine) > EACH:
            self.drop(next(iter(mine)), item.owner)
        elif self._count > ALL:
            most = max(self._of, key=lambda owner: len(self._of[owner]))
            self.drop(next(iter(self._of[most])), most)

    def drop(self, number: int, owner: bytes) -> None:
        """Forgets a request, if it is known."""
        mine = self._of.get(owner, {})
        if mine.pop(number, None) is not None:
            self._count -= 1
            if not mine:
                del self._of[owner]
