"""State: what a model of a server goes through, as a pure state machine.

absent ──load──▶ loading ──loaded──▶ ready ──drain──▶ draining ──unload──▶ unloading ──ended──▶ absent
                    └──────ended──▶ failed ──load, when it is due──▶ loading

A ready model is unloaded directly if it is idle. The process of a ready model may end at any time. The model is then absent,
and the next request loads it again. Only a load that fails makes the next one wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds after a failed load until the next one may begin. They double with each failure in a row."""


class Phase(StrEnum):
    """`DRAINING`: takes no requests, and its running ones go on. `FAILED`: absent, because its last load failed."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNLOADING = "unloading"
    FAILED = "failed"


HOLDING = frozenset({Phase.LOADING, Phase.READY, Phase.DRAINING, Phase.UNLOADING})
"""Phases in which a model holds memory."""


class WrongPhase(Exception):
    """A step that the phase does not allow: a fault in this program."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The state of one model. Each step returns the next state, or raises WrongPhase.

    Attributes:
        run: how often it was loaded. It tells the requests of one process from those of an earlier one.
        running: requests that this run answers.
        failures: failed loads in a row.
        due: when the next load may begin, in the phase `FAILED`.
        cause: why its last process ended unasked; "" if it did not.
    """

    phase: Phase = Phase.ABSENT
    run: int = 0
    running: int = 0
    failures: int = 0
    due: float = 0.0
    cause: str = ""

    @property
    def holds(self) -> bool:
        """Whether it holds memory."""
        return self.phase in HOLDING

    @property
    def idle(self) -> bool:
        """Whether it is loaded and has nothing to do."""
        return self.phase is Phase.READY and not self.running

    def may_load(self, now: float) -> bool:
        """Whether a load may begin."""
        return self.phase is Phase.ABSENT or (self.phase is Phase.FAILED and now >= self.due)

    def load(self, now: float) -> Lifecycle:
        if not self.may_load(now):
            raise WrongPhase(f"load, {self.phase}")
        return replace(self, phase=Phase.LOADING, run=self.run + 1, running=0)

    def loaded(self) -> Lifecycle:
        self._check(Phase.LOADING)
        return replace(self, phase=Phase.READY, failures=0, due=0.0, cause="")

    def begin(self) -> Lifecycle:
        """A request is passed to its process."""
        self._check(Phase.READY)
        return replace(self, running=self.running + 1)

    def finish(self, run: int) -> Lifecycle:
        """A request of a run is over. Requests of an earlier run are over already."""
        return replace(self, running=self.running - 1) if run == self.run and self.running else self

    def drain(self) -> Lifecycle:
        self._check(Phase.READY)
        return replace(self, phase=Phase.DRAINING)

    def resume(self) -> Lifecycle:
        """Its memory is not needed any more."""
        self._check(Phase.DRAINING)
        return replace(self, phase=Phase.READY)

    def unload(self) -> Lifecycle:
        self._check(Phase.READY, Phase.DRAINING)
        if self.running:
            raise WrongPhase(f"unload, {self.running} running")
        return replace(self, phase=Phase.UNLOADING)

    def ended(self, cause: str, now: float) -> Lifecycle:
        """Its process has ended; `cause` says why, if it was not asked to."""
        self._check(*HOLDING)
        if self.phase is Phase.LOADING:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.failures, 16))
            return replace(
                self, phase=Phase.FAILED, running=0, failures=self.failures + 1, due=now + pause, cause=cause or "it ended"
            )
        asked = self.phase is Phase.UNLOADING
        return replace(self, phase=Phase.ABSENT, running=0, cause="" if asked else cause)

    def _check(self, *phases: Phase) -> None:
        if self.phase not in phases:
            raise WrongPhase(f"{self.phase}, not {' or '.join(phases)}")
