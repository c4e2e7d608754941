"""Progress of a download."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_EVERY = 0.1
"""Seconds between two reports of one file, at least."""
_WINDOW = 5.0
"""Seconds over which a rate is measured."""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far the download of one file is.

    Attributes:
        file: the file's path in its repository.
        done: bytes that are here, also those of an earlier attempt.
        total: bytes of the whole file.
        rate: bytes a second, over the last seconds; 0 if unknown.
        digest: the hash of its content, in hexadecimal digits, as the hub names it.
    """

    file: str
    done: int
    total: int
    rate: float = 0.0
    digest: str = ""


OnProgress = Callable[[PullProgress], None]
"""It is called in the thread that downloads, at the beginning and the end of each file and up to ten times a second between.
What it raises ends the download; the part that is here is kept for a later attempt."""


class Meter:
    """Reports one file."""

    def __init__(self, file: str, total: int, digest: str, report: OnProgress) -> None:
        self._file, self._total, self._digest, self._report = file, total, digest, report
        self._marks: deque[tuple[float, int]] = deque()

    def at(self, done: int) -> None:
        """Bytes that are here now. The first and the last ones are always reported."""
        now = time.monotonic()
        if self._marks and done < self._total and now - self._marks[-1][0] < _EVERY:
            return
        if self._marks and done < self._marks[-1][1]:
            self._marks.clear()  # it began again
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW:
            self._marks.popleft()
        (since, before) = self._marks[0]
        rate = (done - before) / (now - since) if now > since else 0.0
        self._report(PullProgress(self._file, done, self._total, rate, self._digest))
