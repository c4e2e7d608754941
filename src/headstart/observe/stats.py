"""Stats: what reuse has saved since the server started, in total and over time. Always of the same size.

Time is divided into steps. When there are too many, each two become one that is twice as long: they always cover all the time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from headstart.observe.report import Summary

STEPS = 240
"""Most steps."""
FIRST = 5.0
"""Seconds of a step at the beginning."""
LATEST = 256
"""Times to the first token that a median is made of."""
TENANTS = 128
"""Most tenants whose figures are kept: those with the latest requests."""


@dataclass(slots=True)
class StatsStep:
    """The sums of the requests that ended in a step. A request is warm if at least half of its prompt was cached, else cold.

    Attributes:
        saved: seconds of prefill that the cached tokens would have taken, less what restoring them took.
        warm, cold: seconds to the first token.
        decoded: tokens of replies behind the first one, and `decode` the seconds that they took.
    """

    requests: int = 0
    cached: int = 0
    computed: int = 0
    saved: float = 0.0
    warm: float = 0.0
    warms: int = 0
    cold: float = 0.0
    colds: int = 0
    decoded: int = 0
    decode: float = 0.0

    def add(self, other: StatsStep) -> None:
        for field in fields(StatsStep):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Stats:
    """Counts finished requests. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._length = FIRST
        self._steps = [StatsStep()]
        self._total = StatsStep()
        self._prompt = self._completion = 0
        self._known = False  # whether the speed of prefill was known at any request
        self._tiers: Counter[str] = Counter()
        self._recomputed: Counter[str] = Counter()
        self._latest: dict[str, deque[float]] = {"warm": deque(maxlen=LATEST), "cold": deque(maxlen=LATEST)}
        self._lock = threading.Lock()

    def record(self, summary: Summary, saved: float | None) -> None:
        """Counts a finished request. `saved`: see `StatsStep`; None if the speed of prefill was not known."""
        warm, decoded = 2 * summary.cached >= summary.prompt, summary.decoded
        one = StatsStep(
            1, summary.cached, summary.computed, saved or 0.0, decoded=decoded, decode=summary.decode if decoded else 0.0
        )
        if warm:
            one.warm, one.warms = summary.ttft, 1
        else:
            one.cold, one.colds = summary.ttft, 1
        with self._lock:
            self._now().add(one)
            self._total.add(one)
            self._known |= saved is not None
            self._prompt += summary.prompt
            self._completion += summary.completion
            self._tiers.update({"live": summary.live, **summary.tiers})
            if (found := summary.explanation) is not None:
                self._recomputed[found.cause.value] += found.recomputed
            self._latest["warm" if warm else "cold"].append(summary.ttft)

    def _now(self) -> StatsStep:
        """The present step."""
        elapsed = self._clock() - self._began
        while elapsed >= STEPS * self._length:
            pairs = zip(self._steps[::2], [*self._steps[1::2], StatsStep()], strict=False)
            self._steps = [_sum(pair) for pair in pairs]
            self._length *= 2
        while len(self._steps) <= elapsed // self._length:
            self._steps.append(StatsStep())
        return self._steps[-1]

    def view(self) -> dict[str, Any]:
        """All figures, as JSON."""
        with self._lock:
            self._now()
            total, steps = self._total, self._steps
            return {
                "seconds": round(self._clock() - self._began, 1),
                "requests": total.requests,
                "prompt": self._prompt,
                "cached": total.cached,
                "computed": total.computed,
                "completion": self._completion,
                "tiers": dict(self._tiers),
                # After a restart all may be cached: then nothing has shown the speed of prefill.
                "saved_seconds": round(total.saved, 3) if self._known or not total.cached else None,
                "recomputed": {cause: tokens for cause, tokens in self._recomputed.items() if tokens},
                "ttft": {
                    "warm": {"requests": total.warms, "median": _median(self._latest["warm"])},
                    "cold": {"requests": total.colds, "median": _median(self._latest["cold"])},
                },
                "decode": _ratio(total.decoded, total.decode),
                "steps": {
                    "seconds": self._length,
                    "requests": [step.requests for step in steps],
                    "cached": [step.cached for step in steps],
                    "computed": [step.computed for step in steps],
                    "saved_seconds": [round(step.saved, 3) for step in steps],
                    "warm": [_ratio(step.warm, step.warms) for step in steps],
                    "cold": [_ratio(step.cold, step.colds) for step in steps],
                    "decode": [_ratio(step.decoded, step.decode) for step in steps],
                },
            }


class TenantStats:
    """The figures of each tenant alone. Thread-safe."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, Stats] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, tenant: str, summary: Summary, saved: float | None) -> None:
        """Counts a finished request of a tenant."""
        with self._lock:
            stats = self._of.setdefault(tenant, Stats())
            self._of.move_to_end(tenant)
            if len(self._of) > TENANTS:
                self._of.popitem(last=False)
        stats.record(summary, saved)

    def of(self, tenant: str) -> Stats:
        """The figures of a tenant since its first request, if it is one of the latest."""
        with self._lock:
            return self._of.get(tenant) or Stats()


def _sum(steps: Sequence[StatsStep]) -> StatsStep:
    found = StatsStep()
    for step in steps:
        found.add(step)
    return found


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 4) if values else None


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 4) if b else None
