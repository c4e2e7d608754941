"""Gate: keeps something from being freed while threads use it, and processes that were forked from using it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headstart.errors import Unavailable

_forks = 0
"""How often this process was forked from another one."""


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


class OwnProcess:
    """The process in which this was made. One that is forked from it has none of its threads, so nobody would answer there.

    Attributes:
        left: whether the caller is in a forked process.
    """

    def __init__(self) -> None:
        self._forks = _forks

    @property
    def left(self) -> bool:
        return self._forks != _forks

    def check(self) -> None:
        """Raises Unavailable in a forked process."""
        if self.left:
            raise Unavailable(
                "The model was loaded before this process was forked, and does not run here: load it after the fork, or start "
                "processes with the method 'spawn'."
            )


class Gate:
    """Lets threads in until it is shut. Thread-safe.

    Attributes:
        closed: whether it is shut.
    """

    def __init__(self) -> None:
        self.closed = False
        self._process = OwnProcess()
        self._inside = 0
        self._changed = threading.Condition()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Lets the caller in. Raises Unavailable if the gate is shut, or in a forked process."""
        self._process.check()  # first: a thread that is not here may have the lock
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
