"""The clocked engine: the contract of an engine, and the time that its clock says."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from headstart.interfaces.engine import Step
from headstart.testing.clocked_engine import ClockedEngine, MachineClock
from headstart.testing.conformance import EngineUnderTest
from promises import PROMISES

FAST = MachineClock(0.0, 0.0, 0.0, 0.0)
SUBJECT = EngineUnderTest(lambda: ClockedEngine(FAST, slots=2, ctx=128))


@pytest.mark.parametrize("check", PROMISES)
def test_it_keeps_the_contract(check: Any) -> None:
    check(SUBJECT)


def test_a_curve_costs_more_behind_more_tokens() -> None:
    clock = MachineClock(1e-3, 1e-6)
    assert clock.prefill(0, 1000) == pytest.approx(1.5)
    assert clock.prefill(0, 400) + clock.prefill(400, 1000) == pytest.approx(clock.prefill(0, 1000))
    assert MachineClock(0, step=0.01, step_reply=0.002).decode(3) == pytest.approx(0.014)


def test_calls_take_at_least_their_time() -> None:
    engine = ClockedEngine(MachineClock(1e-4, step=0.02), slots=1, ctx=1024, batch=512)
    begun = time.perf_counter()
    engine.prefill(0, np.arange(500, dtype=np.int32) % 250, logits=True)
    prefilled = time.perf_counter()
    engine.decode([Step(0, 7)])
    assert prefilled - begun >= 0.05
    assert time.perf_counter() - prefilled >= 0.02


def test_rows_depend_on_all_tokens_before_and_not_on_the_calls() -> None:
    tokens = np.arange(100, dtype=np.int32)
    logits = []
    for sizes in ([100], [64, 36], [8] * 12 + [4]):
        engine, start = ClockedEngine(FAST, slots=1, ctx=128, batch=128), 0
        for size in sizes:
            engine.prefill(0, tokens[start : start + size], logits=True)
            start += size
        logits.append(engine.logits(0).tobytes())
    other = ClockedEngine(FAST, slots=1, ctx=128, batch=128)
    other.prefill(0, np.concatenate([tokens[:1] + 1, tokens[1:]]), logits=True)
    assert len({*logits}) == 1
    assert other.logits(0).tobytes() not in logits
