"""The lines of `headstart top`: each state that an event can carry is known, and a prefill says how long it still takes."""

from __future__ import annotations

import pytest

from headstart.cli.top.state import TopState
from headstart.cli.top.text import STYLES, request_line, slot_line
from headstart.events.source import Activity
from headstart.events.tap import RequestState
from scripted_top import batch, request, words_of


def test_every_state_is_known() -> None:
    states = words_of(RequestState)
    assert states == STYLES.keys()
    for state in states:
        assert f" {state} " in request_line(TopState().then(batch(("requests", [request(1, state)]))).requests[1], 20).plain
    shown = {activity: shown_slot({"state": activity}) for activity in words_of(Activity)}
    assert {activity: line.removeprefix(f"  0 {activity}").strip() for activity, line in shown.items()} == {
        "idle": "holds 300 tokens",
        "prefill": "████░░░░░░░░ 300 of 1,000 (30%)",
        "reply": "7 tokens after a prompt of 1,000",
    }


def shown_slot(more: dict[str, object]) -> str:
    slot = {"slot": 0, "tokens": 300, "total": 1000, "reply": 7, **more}
    return slot_line(TopState().then(batch(("slots", [slot]))).slots[0], {}).plain


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "less than a second"), (1, "1 s"), (11.2, "12 s"), (99.5, "100 s"), (150, "3 min")],
)
def test_a_prefill_says_how_long_it_still_takes(seconds: float, words: str) -> None:
    assert shown_slot({"state": "prefill", "left": seconds}).endswith(f"(30%), {words} left")
