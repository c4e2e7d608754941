"""Prefill: logs the progress of long prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from headstart.serving.request import Event, Progress, Request

FIRST, EVERY = 2.0, 5.0
"""Seconds of prefill before the first line, and between lines."""


class PrefillLog:
    """A watcher of requests (`Runtime.watch`)."""

    def __init__(self, log: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log or structlog.get_logger("headstart.prefill")
        self._clock = clock

    def __call__(self, request: Request) -> Callable[[Event], None]:
        start, due, first = 0.0, 0.0, 0

        def log_progress(event: Event) -> None:
            nonlocal start, due, first
            if not isinstance(event, Progress):
                return
            now = self._clock()
            if not start:
                start, due = now, now + FIRST  # begins with the first engine call, because the request may have waited before
                first = event.done
                return
            if now < due:
                return
            due = now + EVERY
            rate = (event.done - first) / (now - start)
            self._log.info(
                "prefill",
                done=event.done,
                total=event.total,
                cached=event.cached,
                percent=round(100 * event.done / event.total),
                tokens_per_s=round(rate),
                seconds_left=round((event.total - event.done) / rate) if rate else None,
            )

        return log_progress
