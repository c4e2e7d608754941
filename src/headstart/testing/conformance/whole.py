"""Whole: the engine behind headstart's own runtime, on the runtime's thread. It needs the traits of exact mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from headstart.config import Settings
from headstart.engines.proof import most_tokens, prove
from headstart.errors import EngineError
from headstart.interfaces.engine import Engine
from headstart.interfaces.traits import BlockSizes
from headstart.prompt.builder import Prompt
from headstart.serving.runtime import Runtime
from headstart.serving.warm_check import ComputedPrompt, WarmWalk, compute
from headstart.testing.conformance.driver import DECODED, EngineUnderTest, expect

_BLOCKS, _CHECKPOINTS = 24, 12
"""How many of them the memory of the cache holds: too few for everything, so that some are evicted."""
_SHARE = 0.05
"""How often a call fails."""


def claims_are_proved(subject: EngineUnderTest) -> None:
    """The proof of exactness, with the block size that the engine claims, its largest call, and a long prefix."""
    engine, claimed = subject.engine, subject.engine.traits
    tokens = np.asarray(subject.tokens(most_tokens(engine.shape.batch)), np.int32)
    proved = prove(engine, tokens, sizes=BlockSizes((claimed.block_size,), (claimed.block_size,)))
    for name in ("canonical", "movable", "chunking", "decode_exact", "decode_is_prefill"):
        if getattr(claimed, name):
            expect(getattr(proved, name), f"the proof does not find {name}: {'; '.join(proved.notes)}")


def warm_answers_are_cold_ones(subject: EngineUnderTest) -> None:
    """In exact mode: random prompts that continue, branch off, shorten and repeat others."""
    with Runtime(subject.another, _settings(subject.engine)) as runtime:
        walk = WarmWalk(runtime, _longest(runtime), DECODED)
        while walk.compared + walk.failed < subject.prompts:
            walk.step()
    expect(not walk.failed, f"{walk.failed} of {subject.prompts} prompts failed")
    expect(not walk.wrong, f"{walk.wrong} of {walk.compared} prompts have other bits with the cache than without it")
    expect(walk.restored > 0, f"none of {walk.prompted} tokens were restored, and {walk.cached} were reused")


def answers_are_right_beside_failing_calls(subject: EngineUnderTest) -> None:
    """Calls of the engine fail at random, before or after they have done their work. A request fails then, or is right."""
    failing: list[FailingEngine] = []

    def make() -> Engine:
        failing.append(FailingEngine(subject.another(), _SHARE))
        return cast(Engine, failing[0])

    def cold(prompt: Prompt, reply: int) -> ComputedPrompt:
        failing[0].share = 0.0
        try:
            return compute(runtime, prompt, reuse=False, reply=reply)
        finally:
            failing[0].share = _SHARE

    with Runtime(make, _settings(subject.engine)) as runtime:
        walk = WarmWalk(runtime, _longest(runtime), DECODED, cold, seed=1)
        while walk.compared + walk.failed < subject.prompts:
            walk.step()
        failing[0].share = 0.0
    expect(walk.compared > 0, "every request failed")
    expect(not walk.wrong, f"{walk.wrong} of {walk.compared} prompts have other bits beside calls that failed")


def _longest(runtime: Runtime) -> int:
    return min(runtime.ctx - DECODED - 1, 8 * runtime.engine.traits.block_size)


def _settings(engine: Engine) -> Settings:
    shape = engine.shape
    kept = _BLOCKS * engine.traits.block_size * shape.kv_bytes_per_token + _CHECKPOINTS * shape.state_bytes
    return Settings(reuse="exact", memory_budget=shape.transfer_bytes + kept)


class FailingEngine:
    """An engine, some calls of which fail as the contract allows.

    Args:
        share: how often a call fails; may be changed at any time.
    """

    def __init__(self, engine: Engine, share: float) -> None:
        self._engine = engine
        self._dice = random.Random(0)
        self.share = share

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return self._sometimes(name, found) if name in _MAY_FAIL else found

    def _sometimes(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **options: Any) -> Any:
            if self._dice.random() >= self.share:
                return call(*given, **options)
            if self._dice.random() < 0.5:
                call(*given, **options)
            if name in _EMPTY_THE_SLOT:
                self._engine.truncate(given[0], 0)
            raise EngineError(f"injected: {name}")

        return made


_EMPTY_THE_SLOT = {"import_kv", "import_checkpoint", "rewind"}
_MAY_FAIL = {"prefill", "decode", "export_kv", "export_checkpoint"} | _EMPTY_THE_SLOT
