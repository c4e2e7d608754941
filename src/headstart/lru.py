"""LRU: a bounded memory of the most recently used values, for everything that could grow with traffic."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")

PIECE = 1024
"""Values that are freed in one piece."""


class Lru(Generic[KeyT, ValueT]):
    """The most recently used values. Thread-safe.

    Args:
        limit: most values.
        size: most weight of all values together, by `weigh`. A single value above it is not kept: it would evict all others.
    """

    def __init__(self, limit: int, size: float = math.inf, weigh: Callable[[ValueT], int] = lambda value: 1) -> None:
        self._limit = limit
        self._size = self._left = size
        self._weigh = weigh
        self._known: OrderedDict[KeyT, ValueT] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        """Whether there is a value. This does not count as a use."""
        return key in self._known

    def get(self, key: KeyT) -> ValueT | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: KeyT, value: ValueT) -> None:
        with self._lock:
            self._remove(key)
            if self._weigh(value) > self._size:
                return
            self._known[key] = value
            self._left -= self._enter(value)
            while len(self._known) > self._limit or self._left < 0:
                self._remove(next(iter(self._known)))

    def keys(self) -> list[KeyT]:
        """All keys, the least recently used first."""
        with self._lock:
            return list(self._known)

    def items(self) -> list[tuple[KeyT, ValueT]]:
        """All keys and values, the least recently used first. This does not count as a use."""
        with self._lock:
            return list(self._known.items())

    def clear(self) -> None:
        """Forgets everything."""
        for _ in self.clearing():
            pass

    def clearing(self) -> Iterator[None]:
        """Forgets everything at once, and frees it in pieces: freeing 100,000 values in one call takes tens of milliseconds."""
        with self._lock:
            before, self._known = self._known, OrderedDict()
            self._left = self._size
        while before:
            for _ in range(min(PIECE, len(before))):
                before.popitem()
            yield

    @property
    def used(self) -> float:
        """The weight of all values."""
        return self._size - self._left if self._size < math.inf else 0.0

    def drop(self, key: KeyT) -> None:
        """Forgets a key, if it is there."""
        with self._lock:
            self._remove(key)

    def forget(self, gone: Callable[[KeyT, ValueT], bool]) -> None:
        """Forgets all values for which `gone` is true."""
        with self._lock:
            for key in [key for key, value in self._known.items() if gone(key, value)]:
                self._remove(key)

    def first(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """The value of a key. `make` makes it if there is none."""
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found)
        return found

    def _remove(self, key: KeyT) -> None:
        if key in self._known:
            self._left += self._leave(self._known.pop(key))

    def _enter(self, value: ValueT) -> int:
        """The weight that a new value adds. It is less than its own if values share parts."""
        return self._weigh(value)

    def _leave(self, value: ValueT) -> int:
        """The weight that goes with a value."""
        return self._weigh(value)
