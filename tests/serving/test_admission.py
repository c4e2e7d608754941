"""Admission: what is planned by measured speed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harness import ask, system, user
from headstart.config import Settings
from headstart.explain.causes import Cause
from headstart.interfaces.engine import KVSegment
from headstart.serving.admission import Pace
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine


class StalledOnce(FakeEngine):
    """Its prefill takes 0.3 ms a token, as on a GPU. One import of KV takes as long as a thousand tokens."""

    stall = 0.3

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        time.sleep(3e-4 * len(tokens))
        super().prefill(slot, tokens, logits=logits)

    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        time.sleep(self.stall)
        self.stall = 0
        super().import_kv(slot, segments)


def test_after_a_restore_that_stalled_others_are_restored_all_the_same() -> None:
    """A machine that is short of memory stalls. Short talks share their first words with a long one, and have both slots."""
    long = [system("You help."), user("A long talk. " * 40)]
    short = [[system("You help."), user(f"Hi from {name}")] for name in "AB"]
    with Runtime(lambda: StalledOnce(slots=2, ctx=1024), Settings(memory_budget=32 << 20, settle="off")) as runtime:
        ask(runtime, long)
        for talk in short:
            ask(runtime, talk)
        assert runtime.engine.stall == 0
        assert ask(runtime, long).finish.report.restored > 400


def test_a_prompt_that_is_computed_because_restores_are_slow_says_so() -> None:
    """And not that it was evicted, or nothing. The slot has the first words of both."""
    long, short = ([system("You help."), user(text)] for text in ("A long talk. " * 40, "Hi"))
    with Runtime(lambda: FakeEngine(slots=1, ctx=1024), Settings(memory_budget=32 << 20, settle="off")) as runtime:
        ask(runtime, long)
        ask(runtime, short)
        runtime.scheduler._admission.pace.restore = 1e3
        report = ask(runtime, long).report
        assert report.restored == 0
        assert report.explanation is not None
        assert report.explanation.cause is Cause.SLOWER
        assert report.explanation.recomputed == report.computed - 1, "the last token is always computed"


def test_a_restore_that_looks_too_slow_is_tried_again() -> None:
    pace = Pace(prefill=1e-4, restore=1e-2)
    for _ in range(40):
        pace.passed_over()
    assert pace.costs.restore < pace.costs.prefill


def test_one_measurement_changes_little() -> None:
    pace = Pace(prefill=1e-4, restore=1e-6)
    pace.restored(60.0, 10)
    assert pace.restore < 2e-6
