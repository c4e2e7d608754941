"""Store pace: how fast the shared store answers, as measured. Whether fetching is worth it follows from this."""

from __future__ import annotations

import threading

FIRST_ROUND_TRIP = 0.002
FIRST_BANDWIDTH = 200e6
"""Seconds and bytes a second that are assumed before the first answer."""
KEEP = 0.7
"""Weight of what was measured before."""
HOPE = 1.05
"""Factor of the bandwidth with each fetch that is not begun because it would take too long. Nothing is measured then, and a
store that has become faster must be found."""
SMALL = 1 << 16
"""Smaller answers say nothing about the bandwidth."""


class StorePace:
    """Smoothed round trip (seconds) and bandwidth (bytes a second). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round_trip, self._bandwidth = FIRST_ROUND_TRIP, FIRST_BANDWIDTH
        self._measured = False

    @property
    def bandwidth(self) -> float:
        return self._bandwidth

    def asked(self, seconds: float) -> None:
        """A call without content took so long."""
        with self._lock:
            self._round_trip = KEEP * self._round_trip + (1 - KEEP) * seconds

    def got(self, seconds: float, size: int) -> None:
        """Fetching and checking `size` bytes took so long."""
        if size >= SMALL:
            with self._lock:
                moving = max(seconds - self._round_trip, seconds / 2, 1e-6)  # a round trip may be longer than a batch
                keep = KEEP if self._measured else 0.0
                self._bandwidth, self._measured = keep * self._bandwidth + (1 - keep) * size / moving, True

    def seconds(self, size: int) -> float:
        """Expected seconds to fetch `size` bytes."""
        return self._round_trip + size / self._bandwidth

    def pays(self, size: int, limit: float) -> bool:
        """Whether fetching `size` bytes should take less than `limit` seconds. As long as nothing was measured, it is tried."""
        if not self._measured or self.seconds(size) < limit:
            return True
        with self._lock:
            self._bandwidth *= HOPE
        return False
