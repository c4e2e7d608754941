"""Clocked engine: a fake engine whose calls take the time of a machine that the test chooses.

With it a real server, or a real fleet, replays traffic at the speed of a large machine, on a small one. Calls sleep, so many
replicas share two cores. Its own work must be small beside that: KV is a running sum over the tokens, so a call costs about
20 ns a token, where `FakeEngine` hashes. A row depends on all tokens before it, and replies depend on the last row alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.interfaces.engine import Logits, Step
from headstart.testing.fake_engine import LOW, FakeEngine, _Slot

_SUM = 8
"""Bytes of a row's running sum."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class MachineClock:
    """The seconds of an engine's calls.

    Attributes:
        per_token: of prefill.
        per_depth: of prefill, for each token that stands before a token.
        step: of a decoding step with one reply.
        step_reply: more, for each further reply in the step.
    """

    per_token: float
    per_depth: float = 0.0
    step: float = 0.01
    step_reply: float = 0.0005

    def prefill(self, start: int, stop: int) -> float:
        """Seconds to compute the tokens from `start` to `stop`."""
        return self.per_token * (stop - start) + self.per_depth * (stop * stop - start * start) / 2

    def decode(self, replies: int) -> float:
        return self.step + self.step_reply * (replies - 1)


class ClockedEngine(FakeEngine):
    """A sliceable fake engine that keeps a clock. Its KV is canonical everywhere.

    Args:
        clock: how long calls take. A call that the machine below needs longer for takes longer.
        options: of `FakeEngine`.
    """

    def __init__(self, clock: MachineClock, **options: Any) -> None:
        super().__init__(kv_bytes_per_token=_SUM + LOW, decode_is_prefill=True, **options)
        self._clock = clock
        self._positions = np.arange(1, self.shape.ctx + 1, dtype=np.uint64) * _MULTIPLIER

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        begun, start = time.perf_counter(), self.length(slot)
        super().prefill(slot, tokens, logits=logits)
        _sleep(begun + self._clock.prefill(start, start + len(tokens)))

    def decode(self, steps: Sequence[Step]) -> None:
        begun = time.perf_counter()
        super().decode(steps)
        _sleep(begun + self._clock.decode(len(steps)))

    def _kernels(self, start: int, count: int) -> list[bytes]:
        return []  # all KV is canonical

    def _append(self, slot: _Slot, tokens: Any, kernels: Sequence[bytes]) -> None:
        start, stop = slot.length, slot.length + len(tokens)
        rows = (np.asarray(tokens, np.uint64) + np.uint64(1)) * self._positions[start:stop]
        rows ^= rows >> np.uint64(29)
        rows[:1] += _last(slot)
        slot.high[start:stop] = np.cumsum(rows, dtype=np.uint64).view(np.uint8).reshape(-1, _SUM)
        slot.length = stop

    def _predict(self, slot: _Slot) -> Logits:
        random = np.random.default_rng(int(_last(slot)))
        likes: Logits = self._likes + random.random(len(self._likes), np.float32)
        return likes


def _last(slot: _Slot) -> np.uint64:
    """The running sum of the last row; 0 if there is none."""
    if not slot.length:
        return np.uint64(0)
    return np.uint64(slot.high[slot.length - 1].view(np.uint64)[0])


def _sleep(until: float) -> None:
    time.sleep(max(0.0, until - time.perf_counter()))
