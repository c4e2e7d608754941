"""What the measurements of `benchmarks.growth` share: how CPU time and memory are taken, and the rows of the table."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """What an operation costs at one size: CPU microseconds of a call, or bytes of memory (`unit`).

    Attributes:
        high: the 99.9th percentile; None where there is one value only.
    """

    operation: str
    unit: str
    median: float
    high: float | None = None


Measurement = Callable[[int], Iterator[Row]]
"""From the number of entries."""


class _Passes:
    """The CPU time of all passes of Python's collector so far.

    Attributes:
        spent: nanoseconds.
    """

    def __init__(self) -> None:
        self.spent = self._begun = 0
        gc.callbacks.append(self._passed)

    def _passed(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.thread_time_ns()
        else:
            self.spent += time.thread_time_ns() - self._begun


_PASSES = _Passes()


def taken(call: Callable[[], object]) -> float:
    """CPU seconds of a call, less the passes of Python's collector in it: they depend on everything that lives in the process.

    It works on meanwhile. If it waited for the end, its next pass would have more to look at than it has in a server.
    """
    collected, begun = _PASSES.spent, time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begun - (_PASSES.spent - collected)) / 1e9


def row_of(operation: str, seconds: Iterable[float]) -> Row:
    found = np.fromiter(seconds, float) * 1e6
    return Row(operation, "µs", float(np.median(found)), float(np.percentile(found, 99.9)))


def timed(operation: str, calls: Iterable[Callable[[], object]]) -> Row:
    """Makes each call and takes the time of this thread."""
    return row_of(operation, (taken(call) for call in calls))


def held(make: Callable[[], object]) -> int:
    """Bytes that are held after a call: by what it returns, and by what it has changed."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        del made
        tracemalloc.stop()
