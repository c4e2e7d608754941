"""Garbage: keeps what stays for long out of the sight of Python's collector of cycles, so that it makes no long pauses.

The collector makes a full pass when there are a quarter more objects than after the last one. Then it looks at all of them, and
every thread waits. It does not look at entries (`prefix_cache/entry`), but at what is remembered of texts and requests, and at
what was loaded at the start.

So whenever a full pass has taken long, what has survived it is *frozen* (`gc.freeze`): no later pass looks at it. Nearly all of
it has no cycles, so it is freed at once when it is dropped, frozen or not. Full passes come earlier than by themselves, so that
no pass has much to look at.

What cannot be freed: a cycle of objects that was alive when it was frozen, and is dropped later. There are few, those of the
requests that ran then. So after `FREEZES` of these times, and at a moment when the server is idle, everything is thawed,
collected and frozen again. That is one pass of 20 ms with 1,000 entries, and of 100 ms with a million
(docs/benchmarks.md).
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LONG = 0.001
"""Seconds of a full pass after which what is left is frozen: that of some ten thousand objects."""
MIDDLE, FULL = 3, 1
"""Passes over new objects before one over the middle generation, and of these before a full one; Python has 10 and 10. A full
pass then comes every 8,000 new objects."""
FREEZES = 1024
"""After so many times, all of it is looked at again. So less than one full pass in a thousand takes long."""
PERIOD = 10.0
"""Seconds between two looks whether the server is idle."""


class Garbage:
    """The collector of this process. For a process that serves, as all objects are frozen. Begins with a full pass.

    Args:
        idle: whether nobody waits for this process now. It is asked on a thread of its own.

    Attributes:
        freezes: how often objects were frozen since all were looked at.
    """

    def __init__(self, idle: Callable[[], bool]) -> None:
        self.freezes = 0
        self._idle = idle
        self._begun = 0.0
        self._closed = threading.Event()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(self._thresholds[0], MIDDLE, FULL)
        _freeze()
        gc.callbacks.append(self._passed)
        self._thread = threading.Thread(target=self._watch, name="headstart-garbage", daemon=True)
        self._thread.start()

    def _passed(self, phase: str, info: dict[str, int]) -> None:
        """The collector calls it, on any thread, at any moment: it takes no lock."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._begun = time.thread_time()
        elif time.thread_time() - self._begun >= LONG:
            gc.freeze()
            self.freezes += 1

    def _watch(self) -> None:
        while not self._closed.wait(PERIOD):
            self.look()

    def look(self) -> None:
        """Looks at everything again, if that is due and the server is idle."""
        if self.freezes >= FREEZES and self._idle():
            gc.unfreeze()
            _freeze()
            self.freezes = 0

    def close(self) -> None:
        """The collector works as usual again. Idempotent."""
        self._closed.set()
        self._thread.join()
        with suppress(ValueError):
            gc.callbacks.remove(self._passed)
            gc.set_threshold(*self._thresholds)
            gc.unfreeze()


def _freeze() -> None:
    """Freezes what survives a full pass.

    A second pass looks at nothing: the next full one comes when there are a quarter more objects than after the last, and would
    otherwise wait for a quarter of all that was frozen.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
