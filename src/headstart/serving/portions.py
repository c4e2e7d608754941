"""Portions: long work for the engine thread, done in pieces between two steps of the scheduler. Replies do not wait for it.

A *piece* is what a generator does between two of its `yield`s: a few tenths of a millisecond. A *portion* is what one step of
the scheduler does: a millisecond of pieces. Several generators take turns, piece by piece.

Example: with a million entries, a list of all of them has 256 pieces. A step of the scheduler does about ten.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")

LongWork = Generator[None, None, ResultT]
"""Work in pieces, and its result."""

BUDGET = 0.001
"""Seconds of a portion. Its last piece may end a little later."""
MOST = 64
"""Most pieces of a portion."""
BREAK = 0.0005
"""Seconds for which `paced` leaves the interpreter to others."""


class Portions:
    """Work that is under way. `add` may be called on any thread; everything else is for the engine thread.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: deque[tuple[LongWork[Any], Future[Any]]] = deque()

    @property
    def pending(self) -> bool:
        """Whether there is work."""
        return bool(self._work)

    def add(self, work: LongWork[ResultT]) -> Future[ResultT]:
        """Begins work, beside what is under way. The future has its result, or the error that ended it."""
        done: Future[ResultT] = Future()
        self._work.append((work, done))
        return done

    def step(self) -> bool:
        """Does a portion. Returns whether work is left."""
        until = self._clock() + BUDGET
        for _ in range(MOST):
            if not self._work:
                break
            self._piece()
            if self._clock() >= until:
                break
        return self.pending

    def finish(self) -> None:
        """Does all that is left. For the time after the last step."""
        while self._work:
            self._piece()

    def _piece(self) -> None:
        work, done = self._work.popleft()
        try:
            next(work)
        except StopIteration as end:
            done.set_result(end.value)
        except Exception as error:
            done.set_exception(error)
        else:
            self._work.append((work, done))


def paced(items: Iterable[ItemT]) -> Iterator[ItemT]:
    """The same items, for long work on another thread than the engine's: after each millisecond, others get the interpreter."""
    until = time.monotonic() + BUDGET
    for item in items:
        yield item
        if time.monotonic() >= until:
            time.sleep(BREAK)
            until = time.monotonic() + BUDGET
