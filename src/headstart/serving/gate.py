"""Gate: keeps something from being freed while threads use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headstart.errors import Unavailable


class Gate:
    """Lets threads in until it is shut. Thread-safe.

    Attributes:
        closed: whether it is shut.
    """

    def __init__(self) -> None:
        self.closed = False
        self._inside = 0
        self._changed = threading.Condition()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Lets the caller in. Raises Unavailable if the gate is shut."""
        with self._changed:
            if self.closed:
                raise Unavailable("The server is stopping.")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> bool:
        """Lets nobody in any more. False if it was shut before."""
        with self._changed:
            before, self.closed = self.closed, True
            return not before

    def wait(self) -> None:
        """Waits until nobody is inside. `shut` it first."""
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0)
