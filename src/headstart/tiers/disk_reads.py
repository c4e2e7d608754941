"""Disk reads: brings objects from a disk to memory. The disk may hang, and objects may be bad or gone.

The engine thread reads, on threads that may be left behind. The disk's thread looks at the attributes, and calls `spared`.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.expiry import Terms
from headstart.tiers.disk import Disk, FormatError, Label
from headstart.tiers.disk.catalog import Row, look_up
from headstart.tiers.parallel_read import ParallelRead

log = logging.getLogger("headstart.disk")

FIND = 1.0
"""Most seconds that a look into the catalogue may take: all replies wait for it."""
KEEP = 60.0
"""Seconds for which objects that a request waits for are not evicted."""


class DiskReads:
    """Reads, and what they have found out.

    Args:
        disk: the disk; None while it cannot be used.
        fingerprint: of the objects that are of interest.
        wake: lets the disk's thread look at `bad`.
        unexpected: logs an error, if it is one of this program.

    Attributes:
        bad: keys of objects that could not be read, for the disk's thread.
        looked_up: keys that `find` has found, for the disk's thread.
        again: whether all objects must be reported again, because reads were given up.
    """

    def __init__(
        self,
        disk: Callable[[], Disk | None],
        fingerprint: bytes,
        terms: Terms,
        clock: Callable[[], float],
        *,
        counters: Counter[str],
        wake: Callable[[], None],
        unexpected: Callable[[Exception], bool],
    ) -> None:
        self.bad: deque[bytes] = deque()
        self.looked_up: deque[bytes] = deque()
        self.again = False
        self._disk = disk
        self._fingerprint = fingerprint
        self._terms = terms
        self._clock = clock
        self._counters = counters
        self._wake = wake
        self._unexpected = unexpected
        self._reading: frozenset[bytes] = frozenset()
        self._kept: tuple[frozenset[bytes], float] = frozenset(), 0.0  # and the end of their protection
        self._hung: list[threading.Event] = []
        self._moved = 0  # bytes that were read

    @property
    def hang(self) -> bool:
        """Whether the disk has not answered a read yet. Until it does, nothing is read."""
        return not all(over.is_set() for over in self._hung)

    def find(self, keys: Sequence[bytes]) -> list[Label]:
        """See `DiskTier.find`."""
        disk, now = self._disk(), self._clock()
        if disk is None or self.hang:
            return []
        rows, over = list[Row](), threading.Event()

        def look() -> None:
            try:
                with suppress(OSError, sqlite3.Error, ValueError, TypeError):  # the disk's thread meets it too, and reports it
                    rows.extend(look_up(disk.index, keys))
            finally:
                over.set()

        with suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=look, name="headstart-find", daemon=True).start()
            if not over.wait(FIND):
                self._hung = [over]
                return []
        labels = (row.label for row in rows if row.label.fingerprint == self._fingerprint)
        found = [label for label in labels if label.written > self._terms.cut(label.owner, now)]
        self.looked_up.extend(label.key for label in found)
        return found

    def read(self, wanted: Sequence[tuple[Label, Bytes]]) -> list[int | Exception]:
        """See `DiskTier.read`."""
        if self.hang:
            self.again = True
            return [TimeoutError("the disk still does not answer") for _ in wanted]
        self._reading = frozenset(label.key for label, _ in wanted)
        results, self._hung = ParallelRead(self._read, wanted, lambda: self._moved).run()
        self._reading = frozenset()
        if self.bad:
            self._wake()
        if self._hung:
            log.warning("the disk hangs: nothing is read until it answers")
            self._counters["fault_hung"] += 1
            self.again = True
        return results

    def keep(self, keys: Collection[bytes]) -> None:
        """See `DiskTier.keep`."""
        self._kept = frozenset(keys), time.monotonic() + KEEP

    def spared(self) -> frozenset[bytes]:
        """Keys of objects that must not be evicted now: they are being read, or a request waits for them. For any thread."""
        kept, until = self._kept
        return self._reading | kept if time.monotonic() < until else self._reading

    def _read(self, wanted: tuple[Label, Bytes]) -> int | Exception:
        disk, (label, out) = self._disk(), wanted
        try:
            if disk is None:
                raise FileNotFoundError("the disk is not there")
            return disk.read_into(label, out, self._count)
        except FileNotFoundError as error:
            self._counters["fault_missing"] += 1
            self.bad.append(label.key)  # it may have a row
            return error
        except FormatError as error:
            self._counters[f"fault_{error.reason}"] += 1
            return self._put_aside(label, error)
        except Exception as error:
            self._counters["fault_read"] += 1
            self._unexpected(error)
            return self._put_aside(label, error)

    def _count(self, moved: int) -> None:
        self._moved += moved  # several threads do this, so it may be inexact. It only has to grow

    def _put_aside(self, label: Label, error: Exception) -> Exception:
        log.warning("object %s goes into quarantine: %s", label.key.hex()[:16], error)
        self.bad.append(label.key)
        return error
