"""Warm prompts against cold ones: what is right is found right, and what is not is counted."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.serving.warm_check import WarmWalk, compute
from headstart.testing.fake_engine import FakeEngine


class LosesBits(FakeEngine):
    """Of what is imported."""

    def _put(self, held: Any, segments: Any) -> None:
        super()._put(held, segments)
        held.low[0] ^= 1


def walked(engine: FakeEngine, prompts: int = 12) -> WarmWalk:
    with Runtime(lambda: engine, Settings(reuse="exact", memory_budget=1 << 16)) as runtime:
        walk = WarmWalk(runtime, 60, reply=3)
        for _ in range(prompts):
            walk.step()
    assert walk.compared + walk.failed == prompts
    return walk


@pytest.mark.parametrize("sliceable", [True, False])
def test_an_exact_engine_differs_nowhere(sliceable: bool) -> None:
    walk = walked(FakeEngine(sliceable=sliceable, slots=2, ctx=128))
    assert (walk.wrong, walk.failed) == (0, 0)
    assert walk.prompted > walk.cached > walk.restored > 0


def test_lost_bits_are_counted() -> None:
    assert walked(LosesBits(slots=2, ctx=128)).wrong > 0


def test_a_request_that_fails_is_counted_and_the_walk_goes_on() -> None:
    engine = FakeEngine(slots=2, ctx=128)
    engine.fail_next("prefill")
    walk = walked(engine)
    assert (walk.failed, walk.wrong) == (1, 0)


def test_without_reuse_nothing_comes_from_the_cache() -> None:
    with Runtime(lambda: FakeEngine(ctx=128), Settings(memory_budget=1 << 16)) as runtime:
        prompt = runtime.text_prompt("It was the best of times.")
        first = compute(runtime, prompt, reply=3)
        again, cold = compute(runtime, prompt, reply=3), compute(runtime, prompt, reuse=False, reply=3)
    assert again.report.cached > 0 == cold.report.cached
    assert len(first.reply) == 3
    assert cold.same(first)
