"""Engine thread: the one thread that loads an engine, computes with it and closes it.

An engine need not be thread-safe then. OpenMP is a second reason: it keeps a team of workers for each thread that computes. All
teams become slow when together they have more workers than there are cores.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from headstart.interfaces.engine import Engine

T = TypeVar("T")


class EngineThread:
    """An engine and its thread. The thread runs one call after the other, until `close`.

    Args:
        make: loads or makes the engine.

    Raises whatever `make` raises. An interrupted caller still waits for the end of the load, because native code cannot be
    interrupted.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # A daemon: a process can then end without closing its runtime.
        self._thread = threading.Thread(target=self._run, name="headstart-engine", daemon=True)
        self._thread.start()
        self._made = self.submit(make)
        try:
            self.engine = self._made.result()
        except BaseException:
            self.close()
            raise

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Runs `call` on the thread, after all earlier calls. Thread-safe."""
        done: Future[T] = Future()
        self._calls.put((call, done))
        return done

    def close(self) -> None:
        """Closes the engine, if it was made, and ends the thread. Idempotent."""
        closing = self.submit(lambda: None if self._made.exception() else self._made.result().close())
        self._calls.put(None)
        self._thread.join()
        if not self._made.exception() and self._made.result().close_at_exit:
            _wait_for_end(self._thread)
        if closing.done():  # if not, an earlier call has ended the thread
            closing.result()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, done = item
            try:
                done.set_result(call())
            except BaseException as error:  # the caller of `result` gets it
                done.set_exception(error)
            del item, call, done  # else the thread keeps them while it waits


def _wait_for_end(thread: threading.Thread) -> None:
    """Waits until the system's thread is gone: before Python 3.13 `join` returns earlier.

    Native code may free what it kept for the thread with Python's lock, and aborts if Python ends meanwhile.
    """
    if sys.version_info >= (3, 13):
        return
    tasks = "/proc/self/task"
    if not os.path.exists(tasks):  # not Linux, or not allowed; `Path.exists` may raise then, and closing must go on
        time.sleep(0.05)
    until = time.monotonic() + 1.0
    while os.path.exists(f"{tasks}/{thread.native_id}") and time.monotonic() < until:
        time.sleep(0.001)
