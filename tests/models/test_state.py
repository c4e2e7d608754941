from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.models.state import FIRST_PAUSE, HOLDING, LONGEST_PAUSE, Lifecycle, Phase, WrongPhase

STEPS = ("load", "loaded", "begin", "finish", "finish earlier", "drain", "resume", "unload", "ended")


def step(state: Lifecycle, name: str, now: float) -> Lifecycle:
    if name == "load":
        return state.load(now)
    if name.startswith("finish"):
        return state.finish(state.run - (name == "finish earlier"))
    if name == "ended":
        return state.ended("crash", now)
    found: Lifecycle = getattr(state, name)()
    return found


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.floats(0, 100)), max_size=40))
def test_no_history_leaves_the_rules(history: list[tuple[str, float]]) -> None:
    state, now = Lifecycle(), 0.0
    for name, passed in history:
        now += passed
        before = state
        try:
            state = step(state, name, now)
        except WrongPhase:
            continue
        assert 0 <= state.running <= before.running + 1
        assert not state.running or state.phase in (Phase.READY, Phase.DRAINING)
        assert state.run >= before.run
        assert (state.run > before.run) == (name == "load")
        assert (state.phase is Phase.FAILED) <= (state.failures > 0 and state.cause != "")
        assert name != "begin" or before.phase is Phase.READY
        assert name != "unload" or before.running == 0
        assert not (state.holds and not before.holds) or name == "load"
        assert not (before.holds and not state.holds) or name == "ended"
        assert before.phase is not Phase.FAILED or name != "load" or now >= before.due


@given(st.lists(st.sampled_from(STEPS), max_size=40))
def test_from_everywhere_a_model_can_be_loaded_again(history: list[str]) -> None:
    """Whatever has happened: when its process ends, and some time passes, the next request gets it."""
    state = Lifecycle()
    for name in history:
        try:
            state = step(state, name, 0.0)
        except WrongPhase:
            continue
    if state.holds:
        state = state.ended("crash", 0.0)
    assert state.load(LONGEST_PAUSE + 1).loaded().begin().running == 1


def test_failed_loads_wait_longer_each_time() -> None:
    state, pauses = Lifecycle(), []
    for _ in range(10):
        state = state.load(state.due).ended("no memory", state.due)
        pauses.append(state.due)
        assert not state.may_load(state.due - 0.1)
    gaps = [after - before for before, after in zip([0.0, *pauses], pauses, strict=False)]
    assert gaps[0] == FIRST_PAUSE
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_PAUSE
    assert state.load(state.due).loaded().failures == 0


def test_a_crash_while_it_answers_does_not_make_the_next_request_wait() -> None:
    state = Lifecycle().load(0).loaded().begin().ended("killed", 5.0)
    assert (state.phase, state.running, state.cause) == (Phase.ABSENT, 0, "killed")
    assert state.load(5.0).loaded().begin().finish(run=1).running == 1  # a request of the dead process ends late


def test_what_holds_memory_is_counted() -> None:
    assert Phase.DRAINING in HOLDING
    assert not Lifecycle().holds
    with pytest.raises(WrongPhase):
        Lifecycle().begin()
