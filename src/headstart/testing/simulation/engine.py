"""Engine: fake engines that take no real time. That of a server takes virtual time, and fails when a fault is armed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.errors import EngineError
from headstart.interfaces.engine import KVSegment, Logits, Span, Step
from headstart.interfaces.tokens import Bytes
from headstart.testing.fake_engine import GAP, NOISE, FakeEngine, Operation, _Slot
from headstart.testing.simulation.faults import Faults
from headstart.testing.simulation.kernel import world

PREFILL = 2e-3
"""Most virtual seconds of prefill for a token."""
DECODE = 2e-2
"""Most virtual seconds of a decoding step."""
COPY = 2e-3
"""Most virtual seconds of an export or import."""


UNCHANGED = 1 << 30
"""No position of a slot has changed."""
DRAWN = 4096
"""Most digests of KV whose logits are kept, by a whole process. A cold run draws those of the server once more."""


class UntimedEngine(FakeEngine):
    """A fake engine that takes no real time, and draws the logits of the same KV once.

    What it draws is a function of a digest of the KV that the slot really holds. So one engine may use what another has drawn.
    """

    def _pass_time(self) -> None:
        return

    def _order(self, seen: int, size: int) -> Logits:
        return _order(seen, size)

    def _noise(self, seen: int, size: int) -> Logits:
        return _noise(seen, size)


@lru_cache(DRAWN)
def _order(seen: int, size: int) -> Logits:
    return np.random.default_rng(seen).permutation(size).astype(np.float32) * np.float32(GAP)


@lru_cache(DRAWN)
def _noise(seen: int, size: int) -> Logits:
    return np.random.default_rng(seen).random(size, np.float32) * np.float32(NOISE)


class SimulatedEngine(UntimedEngine):
    """Args: as those of `FakeEngine`.

    Attributes:
        made: by slot, when each position was computed there, in seconds since 1970; less than 0 for what was imported.
        changed: by slot, the first position whose content may have changed since somebody has set this to `UNCHANGED`.
        leaves: called with a slot whose content is exported, and may be gone after the step.
        spoiled: requests whose slot a failed prefill or decode has spoiled. So many may fail.
    """

    def __init__(self, faults: Faults, **options: Any) -> None:
        super().__init__(**options)
        self._faults = faults
        self.made = np.full((self.shape.slots, self.shape.ctx), -1.0)
        self.changed = [0] * self.shape.slots
        self.leaves: Callable[[int], None] = lambda slot: None
        self.spoiled = 0

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        world().pause(PREFILL * len(tokens))
        start = self._slots[slot].length
        self._change(slot, start)
        super().prefill(slot, tokens, logits=logits)
        self.made[slot, start : start + len(tokens)] = world().wall

    def decode(self, steps: Sequence[Step]) -> None:
        world().pause(DECODE)
        self._deciding = len(steps)
        for step in steps:
            self._change(step.slot, self._slots[step.slot].length)
        super().decode(steps)
        for step in steps:
            self.made[step.slot, self._slots[step.slot].length - 1] = world().wall

    def export_kv(self, slot: int, spans: Sequence[Span]) -> None:
        world().pause(COPY)
        super().export_kv(slot, spans)
        self.leaves(slot)

    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        world().pause(COPY)
        self._change(slot, 0)
        super().import_kv(slot, segments)
        self.made[slot] = -1.0

    def export_checkpoint(self, slot: int, out: Bytes) -> int:
        world().pause(COPY)
        size = super().export_checkpoint(slot, out)
        self.leaves(slot)
        return size

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        world().pause(COPY)
        self._change(slot, 0)
        super().import_checkpoint(slot, segments, state)
        self.made[slot] = -1.0

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        self._change(slot, 0)
        super().rewind(slot, length, state)

    def truncate(self, slot: int, length: int) -> None:
        self._change(slot, length)
        super().truncate(slot, length)

    def _change(self, slot: int, start: int) -> None:
        self.changed[slot] = min(self.changed[slot], start)

    def _fail(self, operation: Operation, *slots: _Slot) -> None:
        try:
            super()._fail(operation, *slots)
        except EngineError:
            for number, one in enumerate(self._slots):
                if any(one is failed for failed in slots):
                    self._change(number, 0)
            raise

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
