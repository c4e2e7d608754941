"""Engine: a fake engine whose calls take virtual time, and fail when a fault is armed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.interfaces.engine import KVSegment, Span, Step
from headstart.interfaces.tokens import Bytes
from headstart.testing.fake_engine import FakeEngine, Operation
from headstart.testing.simulation.faults import Faults
from headstart.testing.simulation.kernel import world
from headstart.testing.simulation.threads import TIME

PREFILL = 2e-3
"""Most virtual seconds of prefill for a token."""
DECODE = 2e-2
"""Most virtual seconds of a decoding step."""
COPY = 2e-3
"""Most virtual seconds of an export or import."""


class SimulatedEngine(FakeEngine):
    """Args: as those of `FakeEngine`.

    Attributes:
        made: by slot, when each position was computed there, in seconds since 1970; less than 0 for what was imported.
        spoiled: requests whose slot a failed prefill or decode has spoiled. So many may fail.
    """

    def __init__(self, faults: Faults, **options: Any) -> None:
        super().__init__(**options)
        self._faults = faults
        self.made = np.full((self.shape.slots, self.shape.ctx), -1.0)
        self.spoiled = 0

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        world().pause(PREFILL * len(tokens))
        start = self._slots[slot].length
        super().prefill(slot, tokens, logits=logits)
        self.made[slot, start : start + len(tokens)] = TIME.time()

    def decode(self, steps: Sequence[Step]) -> None:
        world().pause(DECODE)
        self._deciding = len(steps)
        super().decode(steps)
        for step in steps:
            self.made[step.slot, self._slots[step.slot].length - 1] = TIME.time()

    def export_kv(self, slot: int, spans: Sequence[Span]) -> None:
        world().pause(COPY)
        super().export_kv(slot, spans)

    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        world().pause(COPY)
        super().import_kv(slot, segments)
        self.made[slot] = -1.0

    def export_checkpoint(self, slot: int, out: Bytes) -> int:
        world().pause(COPY)
        return super().export_checkpoint(slot, out)

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        world().pause(COPY)
        super().import_checkpoint(slot, segments, state)
        self.made[slot] = -1.0

    def _failing(self, operation: Operation) -> bool:
        kind = self._faults.take(operation)
        if kind is None:
            return False
        self._faults.counts[kind] += 1
        if operation == "prefill":
            self.spoiled += 1
        elif operation == "decode":
            self.spoiled += self._deciding
        return True
