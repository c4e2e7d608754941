"""Engine calls: what other threads want done on the engine thread, between two steps of the scheduler.

A *call* is a function that takes no time worth speaking of. Long work is done in pieces (`portions`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from headstart.serving.gate import OwnProcess
from headstart.serving.portions import LongWork, Portions

T = TypeVar("T")


class EngineCalls:
    """Calls and long work that wait. `answer` and `finish` are for the engine thread, all else for any.

    What is called is done even if the scheduler's loop has ended: then on the thread that ended it, or on that of a caller.

    Args:
        wake: wakes the scheduler's loop.
        clock: a monotonic clock in seconds.

    Attributes:
        portions: the long work.
    """

    def __init__(self, process: OwnProcess, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.portions = Portions(clock)
        self._process = process
        self._wake = wake
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop: Future[None] | None = None  # once it is to end
        self._unanswered = 0  # calls since the end of the loop, until they are answered
        self._lock = threading.Lock()  # of that number

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function on the engine thread between two steps. Raises Unavailable in a forked process."""
        self._process.check()
        done: Future[T] = Future()

        def answer() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._calls.put(answer)
        self._called()
        return done

    def carry_out(self, work: LongWork[T]) -> Future[T]:
        """Does long work on the engine thread, in pieces between its steps. Raises Unavailable in a forked process."""
        self._process.check()
        done = self.portions.add(work)
        self._called()
        return done

    def ends_with(self, loop: Future[None]) -> None:
        """The loop is to end, and may not see what is called from now on. `loop` is done when it has ended. For any thread."""
        self._loop = loop

    def answer(self) -> None:
        """Does all calls that wait."""
        while True:
            try:
                answer = self._calls.get_nowait()
            except queue.Empty:
                return
            answer()

    def finish(self) -> None:
        """Does all calls that wait, and all long work, to its end."""
        self.answer()
        self.portions.finish()

    def _called(self) -> None:
        self._wake()
        if self._loop is not None:  # as long as it runs, nothing may change under it
            self._loop.add_done_callback(lambda _: self._answer_after_the_end())

    def _answer_after_the_end(self) -> None:
        """Does what was called when the loop had ended. One thread does it for all who call meanwhile."""
        with self._lock:
            self._unanswered += 1
            if self._unanswered > 1:
                return
        while True:
            answered = self._unanswered
            self.finish()
            with self._lock:
                if answered == self._unanswered:
                    self._unanswered = 0
                    return
