"""What system tests of the shared tier share: servers on one store that is never too slow, and histories over several."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness import Answer, Messages, ask, system, user
from headstart.config import Settings
from headstart.serving import scheduler, settle, shared_fetch
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.shared import opened
from headstart.tiers.shared.address import open_store
from headstart.tiers.shared.pace import StorePace
from histories import Lab

BLOCK_SIZE = 8
DELAY = 0.005
"""Seconds of each call of the fake engine: with less, computing is faster than fetching, which is then not done."""


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """For tests of what is found: a busy machine must not look like a slow store. Other tests show what happens then."""
    patch.setattr(shared_fetch, "STALL", 30.0)
    patch.setattr(StorePace, "seconds", lambda *_: 0.0)
    patch.setattr(opened, "open_store", lambda url: open_store(url, 30.0))
    be_brisk(patch)


def be_brisk(patch: pytest.MonkeyPatch) -> None:
    """For tests of what idle servers do: they begin sooner, and see sooner what is stored."""
    patch.setattr(settle, "AFTER", 0.02)
    patch.setattr(scheduler, "IDLE_SAVE", 0.01)
    patch.setattr(scheduler, "IDLE_POLL", 0.05)


def stored(rt: Runtime) -> None:
    """Waits until everything that was offered is stored."""
    until = time.monotonic() + 60
    while any(slot.dirty for slot in rt.scheduler.slots) or rt.cache.store.shared_offer.reading or not rt.scheduler.idle:
        assert time.monotonic() < until
        time.sleep(0.005)


def start(store: str, key_file: Path, **options: Any) -> Runtime:
    given: dict[str, Any] = {"reuse": "exact", "memory_budget": 1 << 20, **options}
    given |= {"shared": store, "shared_key_file": key_file}
    engine = given.pop("engine", lambda: FakeEngine(slots=2, ctx=512, block_size=BLOCK_SIZE, delay=DELAY))
    return Runtime(engine, Settings(**given))


def cold(engine: Any) -> Runtime:
    return Runtime(engine, Settings(reuse="exact", memory_budget=0, settle="off"))


def chat(words: str) -> list[dict[str, Any]]:
    return [system("You answer in the words of the house, and never in others. " * 4), user(words)]


def answer(rt: Runtime, words: str) -> Answer:
    return ask(rt, chat(words), max_tokens=4, keep_logits=True)


def same(one: Answer, other: Answer) -> None:
    assert one.logits is not None
    assert other.logits is not None
    assert one.text == other.text
    assert one.logits.tobytes() == other.logits.tobytes()


@dataclass
class FleetLab(Lab):
    """Histories whose requests go to servers by chance; the compared ones find what the others have stored by then.

    Attributes:
        fleet: the servers. They share one store.
    """

    fleet: Sequence[Runtime] = ()
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def _ask(self, dice: random.Random, chat: Messages, compared: bool = False) -> Answer:
        if compared:
            for runtime in self.fleet:
                if runtime is not self.runtime:  # a reply may be running at the one that is asked
                    stored(runtime)
        answer = super()._ask(dice, chat, compared)
        if compared:
            self.tally.events["shared"] += answer.report.tiers.get("shared", 0) > 0
        self.runtime = self.chance.choice(self.fleet)
        return answer
