"""Speed: how fast a replica is, from what its engine and its store did."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from headstart.fleet.router.curve import CurveFit
from headstart.fleet.router.reports import Speed

_KEEP = 0.7
"""Weight of what was measured before."""
_MOST = 4096
"""Most measurements that wait for `speed`. The oldest are given up first."""
_PROBE = 1 << 20
"""Bytes of the fetch whose expected time gives the bandwidth."""


class Speedometer:
    """Measures. The engine thread says what it did. One other thread calls `speed`, which does the arithmetic.

    Attributes:
        step: seconds of a step of decoding, smoothed; 0 before the first one.
    """

    def __init__(self) -> None:
        self.step = 0.0
        self._calls: deque[tuple[int, int, float]] = deque(maxlen=_MOST)
        self._loads: deque[tuple[int, int, float]] = deque(maxlen=_MOST)
        self._fit = CurveFit()
        self._memory, self._disk = Speed().memory, Speed().disk

    # ── the engine thread ────────────────────────────────────────────────────────────────────────────────────────────

    def prefilled(self, start: int, stop: int, seconds: float) -> None:
        if seconds > 0:
            self._calls.append((start, stop, seconds))

    def decoded(self, seconds: float) -> None:
        self.step = _smooth(self.step, seconds) if self.step else seconds

    def restored(self, tiers: Mapping[str, int], seconds: float) -> None:
        """`tiers`: tokens that were loaded from `memory` and from `disk`."""
        self._loads.append((tiers.get("memory", 0), tiers.get("disk", 0), seconds))

    # ── another thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def speed(self, token_bytes: int, fetching: Callable[[int], float | None]) -> Speed:
        """The speed now.

        Args:
            token_bytes: bytes of KV of one token.
            fetching: the expected seconds to fetch so many bytes from the shared tier.
        """
        while self._calls:
            self._fit.measured(*self._calls.popleft())
        while self._loads:
            self._loaded(*self._loads.popleft())
        first, probe = fetching(0), fetching(_PROBE)
        if first is None or probe is None:
            return Speed(self._fit.curve, self._memory, self._disk)
        return Speed(self._fit.curve, self._memory, self._disk, max(0.0, probe - first) / _PROBE * token_bytes, first)

    def _loaded(self, memory: int, disk: int, seconds: float) -> None:
        if disk:
            self._disk = _smooth(self._disk, max(self._memory, (seconds - memory * self._memory) / disk))
        elif memory:
            self._memory = _smooth(self._memory, seconds / memory)


def _smooth(old: float, new: float) -> float:
    return _KEEP * old + (1 - _KEEP) * new
