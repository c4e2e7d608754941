"""The collector's long passes freeze what survives them, and no garbage stays frozen for good."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing

import pytest

from headstart.api import garbage
from headstart.api.garbage import Garbage


class Cyclic:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def idle() -> list[bool]:
    return [True]


@pytest.fixture
def watched(idle: list[bool], monkeypatch: pytest.MonkeyPatch) -> Iterator[Garbage]:
    monkeypatch.setattr(garbage, "LONG", 0.0)
    with closing(Garbage(lambda: idle[0])) as made:
        yield made


def test_what_survives_a_long_pass_is_frozen(watched: Garbage) -> None:
    before = gc.get_freeze_count()
    kept = [[number] for number in range(1000)]
    gc.collect()
    assert gc.get_freeze_count() >= before + len(kept)
    assert watched.freezes == 1
    assert not any(isinstance(known, list) and known is kept[0] for known in gc.get_objects())


def test_the_first_pass_does_not_wait_for_a_quarter_of_what_was_frozen() -> None:
    old = [[number] for number in range(400_000)]
    with closing(Garbage(lambda: False)):
        before = gc.get_stats()[2]["collections"]
        new = [[number] for number in range(40_000)]
        assert gc.get_stats()[2]["collections"] > before
    assert len(old) + len(new) == 440_000


def test_a_short_pass_freezes_nothing(watched: Garbage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LONG", 1e6)
    gc.collect()
    assert watched.freezes == 0


def test_a_pass_over_the_young_freezes_nothing(watched: Garbage) -> None:
    gc.collect(0)
    gc.collect(1)
    assert watched.freezes == 0


def test_frozen_garbage_is_freed_when_the_server_is_idle(
    watched: Garbage, idle: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "FREEZES", 3)
    cycle = Cyclic()
    alive = weakref.ref(cycle)
    gc.collect()
    del cycle
    gc.collect()
    watched.look()
    assert alive() is not None, "it is frozen"
    gc.collect()
    idle[0] = False
    watched.look()
    assert alive() is not None, "somebody waits"
    idle[0] = True
    watched.look()
    assert alive() is None
    assert watched.freezes <= 1, "that pass was long too"


def test_afterwards_the_collector_works_as_before() -> None:
    callbacks, thresholds = list(gc.callbacks), gc.get_threshold()
    made = Garbage(lambda: True)
    assert gc.get_freeze_count()
    assert gc.get_threshold() != thresholds
    made.close()
    made.close()
    assert gc.callbacks == callbacks
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
