"""Recent: what was learnt about objects of the store, for as long as it is likely to be true."""

from __future__ import annotations

from collections.abc import Callable

from headstart.lru import Lru

MOST = 1 << 17
"""Most members. The oldest are forgotten first."""


class Recent:
    """A set of ids whose members leave it after some seconds. Thread-safe."""

    def __init__(self, seconds: float, clock: Callable[[], float], most: int = MOST) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since: Lru[bytes, float] = Lru(most)

    def __contains__(self, key: bytes) -> bool:
        since = self._since.get(key)
        return since is not None and self._clock() < since + self._seconds

    def add(self, key: bytes) -> None:
        self._since.put(key, self._clock())

    def drop(self, key: bytes) -> None:
        self._since.drop(key)

    def clear(self) -> None:
        self._since.clear()
