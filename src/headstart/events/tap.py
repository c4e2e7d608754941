"""Tap: the listener of those who watch a runtime. The engine thread only appends to a bounded deque; another thread reads it.

An entry is in the deque as it is, without what has happened: its copies say where it is at the moment at which it is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.entry import Entry
from headstart.serving.job import Job
from headstart.serving.listener import JobEnd, NoListener
from headstart.serving.request import Report

MOST = 1 << 16
"""Most news that wait to be read. If there are more, all of them are lost."""

Stage = Literal["queued", "prefill", "reply"] | JobEnd
RequestState = Stage | Literal["ended"]
"""The state of a request in an event: a stage, or `ended` if it was over before anybody listened."""


@dataclass(frozen=True, slots=True)
class JobNews:
    """A job has reached a stage.

    Attributes:
        at: the time, by `time.time`.
        slot: its slot; -1 without one.
    """

    job: Job
    stage: Stage
    at: float
    slot: int = -1
    report: Report | None = None


News = Entry | frozenset[BlockId] | JobNews
"""An entry that came, left or changed; entries that were pinned or unpinned; a job."""


class Tap(NoListener):
    """A `Listener`. `drain` is for one other thread."""

    def __init__(self, clock: Callable[[], float] = time.time, most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._news: deque[News] = deque(maxlen=most)
        self._lost = False

    def added(self, entry: Entry, tier: str) -> None:
        self._tell(entry)

    def removed(self, entry: Entry, tier: str) -> None:
        self._tell(entry)

    def pinned(self, keys: Collection[BlockId]) -> None:
        self._tell(frozenset(keys))

    def arrived(self, job: Job, available: Callable[[Chain], int]) -> None:
        self._tell(JobNews(job, "queued", self._clock()))

    def began(self, job: Job) -> None:
        self._tell(JobNews(job, "prefill", self._clock(), _slot(job)))

    def replying(self, job: Job, report: Report) -> None:
        self._tell(JobNews(job, "reply", self._clock(), _slot(job), report))

    def ended(self, job: Job, how: JobEnd, report: Report | None = None) -> None:
        self._tell(JobNews(job, how, self._clock(), _slot(job), report))

    def _tell(self, news: News) -> None:
        if len(self._news) == self._most:
            self._lost = True
        self._news.append(news)

    def drain(self) -> list[News] | None:
        """The news since the last call, in order. None if some were lost."""
        found = [self._news.popleft() for _ in range(len(self._news))]
        lost, self._lost = self._lost, False
        return None if lost else found


def _slot(job: Job) -> int:
    return -1 if job.slot is None else job.slot.number
