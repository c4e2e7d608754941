"""Recent: what was learnt about objects of the store, for as long as it is likely to be true."""

from __future__ import annotations

from collections.abc import Callable

from headstart.lru import Lru

MOST = 1 << 17
"""Most members. The oldest are forgotten first."""


def _unheard(key: bytes) -> None:
    pass


class Recent:
    """A set of ids whose members leave it after some seconds. Thread-safe.

    Args:
        added, dropped: called with each id that `add` adds, and that `drop` drops.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float],
        most: int = MOST,
        *,
        added: Callable[[bytes], None] = _unheard,
        dropped: Callable[[bytes], None] = _unheard,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._added, self._dropped = added, dropped
        self._since: Lru[bytes, float] = Lru(most)

    def __contains__(self, key: bytes) -> bool:
        since = self._since.get(key)
        return since is not None and self._clock() < since + self._seconds

    def add(self, key: bytes) -> None:
        self._since.put(key, self._clock())
        self._added(key)

    def drop(self, key: bytes) -> None:
        self._since.drop(key)
        self._dropped(key)

    def clear(self) -> None:
        for key, _ in self._since.items():
            self.drop(key)
