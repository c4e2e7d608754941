"""The screen, driven as a user drives it: keys, sizes, and a server whose words a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from headstart.cli.top.app import ExplainScreen, Requests, TopApp
from headstart.cli.top.feed import Trouble, Update
from headstart.cli.top.savings import Savings
from headstart.errors import ConfigError
from scripted_top import Script, chat, entry, request, soon, state

HOSTILE = "\x1b[2J\x1b]52;c;aGk=\x07[bold]hi[/bold][@click=app.quit]x[/]\x9b31m\u202e"
SLOTS = [
    {"slot": 0, "state": "prefill", "tokens": 512, "total": 1024, "reply": 0, "request": 2},
    {"slot": 1, "state": "reply", "tokens": 1007, "total": 1000, "reply": 7, "request": 3},
    {"slot": 2, "state": "idle", "tokens": 0},
    {"slot": 3, "state": "busy"},
]
TREE = [*chat(4, pinned=True), *chat(3, first=10, parent=3, tiers="disk"), *chat(2, first=20, parent=3)]
SIZES = {"yours": {}, "others": {"entries": 1, "tokens": 77}, "tiers": {"memory": {"used": 1 << 20, "budget": 4 << 20}}}
ROWS = [request(1, cause="system_changed", recomputed=40), request(2, "prefill"), request(3, "reply")]
FULL = state(
    ("tree", TREE), ("requests", ROWS), ("slots", SLOTS), ("evicted_next", [soon(20)]), ("sizes", SIZES)
)  # fmt: skip
EXPLANATION = {
    "cause": "system_changed",
    "what": "The system prompt differs.",
    "hint": "Keep changing text out of it.",
    "where": "system",
    "message": 0,
    "character": 30,
    "token": 398,
    "before": "Today is ",
    "current": HOSTILE,
    "previous": "Monday",
    "recomputed": 40,
    "seconds": 0.5,
}


def answer(name: str = "req_1") -> dict[str, Any]:
    return {
        "id": name,
        "seconds_ago": 4.0,
        "prompt": 1000,
        "cached": 900,
        "live": 500,
        "tiers": {"memory": 400},
        "computed": 100,
        "mode": "fast",
        "explanation": EXPLANATION,
        "anthropic": {"type": "system_changed"},
        "responses": {"type": "input_changed"},
    }


def screen(app: TopApp) -> str:
    """What a user sees."""
    return "\n".join("".join(part.text for part in strip) for strip in app.screen._compositor.render_strips())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await pilot.pause(0.02)
    raise AssertionError(screen(pilot.app))  # type: ignore[arg-type]


Steps = Callable[[TopApp, Pilot[None], Script], Awaitable[None]]


def drive(
    steps: Steps,
    *updates: Update,
    size: tuple[int, int] = (140, 40),
    ask: Callable[[str], dict[str, Any]] = answer,
) -> None:
    """Runs a screen, and does the steps once it shows the first updates."""

    async def run() -> None:
        script = Script(*updates)
        app = TopApp(script, "http://host:1", ask)
        async with app.run_test(size=size) as pilot:
            assert script._ready.wait(60)
            await pilot.pause(0.05)
            await steps(app, pilot, script)
        assert script.stopped.wait(60)

    asyncio.run(run())


@pytest.mark.parametrize("size", [(80, 24), (140, 40), (200, 60)])
def test_every_panel_shows_what_is(size: tuple[int, int]) -> None:
    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        await until(pilot, lambda: "system" in screen(app))
        shown = screen(app)
        for text in ("http://host:1", "512 of 1,024 (50%)", "7 tokens after a prompt of 1,000", "3 busy"):
            assert text in shown
        assert "██████░░░░░░ 512" in shown
        assert "stored: 576 tokens in 9 entries; 77 of others" in shown
        assert "MMMM 256  pinned" in shown
        assert "DDD 192" in shown or size == (80, 24)
        assert "evicted next: 1 least_value" in shown
        assert "1 MiB of 4 MiB" in shown
        assert "system" in shown  # the cause

    drive(steps, FULL, size=size)


def test_resizing_moves_the_panels() -> None:
    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        await until(pilot, lambda: "512 of" in screen(app))

        def beside() -> bool:
            return any("slots" in line and "saved" in line for line in screen(app).splitlines())

        assert beside()
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: not beside())
        assert "system" in screen(app)
        await pilot.resize_terminal(20, 5)
        await pilot.pause()
        await pilot.resize_terminal(160, 50)
        await until(pilot, beside)
        assert "system_changed 40" in screen(app)

    drive(steps, FULL)


def test_enter_explains_the_chosen_request() -> None:
    asked = []

    def ask(name: str) -> dict[str, Any]:
        asked.append(name)
        return answer(name)

    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        await until(pilot, lambda: app.query_one(Requests).option_count == 3)
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, ExplainScreen))
        await until(pilot, lambda: "The system prompt differs." in screen(app))
        assert asked == ["req_1"]
        script.send(state(("requests", [*ROWS, request(4)])))  # what comes meanwhile is there afterwards
        await until(pilot, lambda: app.query_one(Requests).option_count == 4)
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, ExplainScreen))

    drive(steps, FULL, ask=ask)


def test_the_chosen_request_stays_chosen_when_others_come() -> None:
    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        listed = app.query_one(Requests)
        await until(pilot, lambda: listed.option_count == 3)
        await pilot.press("down")
        assert listed.highlighted_option is not None
        assert listed.highlighted_option.id == "2"
        script.send(state(("requests", [*ROWS, request(4), request(5)])))
        await until(pilot, lambda: listed.option_count == 5)
        assert listed.highlighted_option.id == "2"

    drive(steps, FULL)


def test_what_the_server_cannot_explain_is_said() -> None:
    def ask(name: str) -> dict[str, Any]:
        raise ConfigError(f"http://host:1 says: No request '{name}' is among the latest ones. \x1b[31m")

    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        await until(pilot, lambda: app.query_one(Requests).option_count == 3)
        await pilot.press("enter")
        await until(pilot, lambda: "No request 'req_3' is among" in screen(app))
        assert "\\x1b[31m" in screen(app)

    drive(steps, FULL, ask=ask)


def test_a_server_that_goes_away_and_comes_back() -> None:
    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        await until(pilot, lambda: "512 of" in screen(app))
        await pilot.resize_terminal(80, 24)
        script.send(Trouble("No server answers at http://127.0.0.1:12345 ([Errno 111] Connection refused)"))
        await until(pilot, lambda: "Connection refused)." in screen(app))
        assert "Trying again" in screen(app)
        assert "512 of" in screen(app)
        script.send(state(("slots", [{"slot": 0, "state": "idle", "tokens": 5}])))
        await until(pilot, lambda: "holds 5 tokens" in screen(app))
        assert "Trying again" not in screen(app)
        assert "system" not in screen(app)

    drive(steps, FULL)


def test_the_server_s_sums_are_shown() -> None:
    sums = Savings(700, 100_000, {"live": 70_000}, 30_000, 1234.5, 0.25, 4.0, 50.0)

    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        await until(pilot, lambda: "70,000 tokens (70%)" in screen(app))
        assert "saved since the server's start" in screen(app)
        assert "70,000 tokens (70%), about 1,234.5 s" in screen(app)
        assert "0.25 s warm, 4.00 s cold; then 50 tokens/s" in screen(app)

    drive(steps, FULL, sums)


def test_a_panel_can_fill_the_screen() -> None:
    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        await until(pilot, lambda: "512 of" in screen(app))
        await pilot.press("m")
        await until(pilot, lambda: "512 of" not in screen(app))
        await pilot.press("m")
        await until(pilot, lambda: "512 of" in screen(app))
        await pilot.press("tab", "tab", "q")

    drive(steps, FULL)


def test_untrusted_text_is_only_text() -> None:
    """Ids come from clients, and explanations have their prompts: neither moves the cursor, nor is it markup."""
    rows = [request(1, id=HOSTILE, cause=HOSTILE), request(2, HOSTILE, computed=None, seconds={})]
    slots = [{"slot": 0, "state": "reply", "tokens": 1, "total": 1, "reply": 1, "request": 1}]
    sizes = {"others": {}, "tiers": {HOSTILE: {"used": 1, "budget": 2}}}
    tree = [entry(1, tiers=HOSTILE.replace(" ", ""))]
    hostile = state(("requests", rows), ("slots", slots), ("sizes", sizes), ("tree", tree))

    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        def check() -> None:
            shown = screen(app)
            assert all(char.isprintable() for char in shown.replace("\n", ""))
            assert "[bold]hi[/bold]" in shown
            assert "\\x1b[2J" in shown

        await until(pilot, lambda: app.query_one(Requests).option_count == 2)
        check()
        script.send(Trouble(f"The server says: {HOSTILE}"))
        await until(pilot, lambda: "The server says" in screen(app))
        check()
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ExplainScreen))
        await until(pilot, lambda: "previous" in screen(app))
        check()
        assert app.is_running

    drive(steps, hostile)


def test_ten_thousand_entries_are_shown_at_once() -> None:
    tree = [entry(0), *(entry(number, 0) for number in range(1, 10_000))]

    async def steps(app: TopApp, pilot: Pilot[None], script: Script) -> None:
        await until(pilot, lambda: "640,000 tokens in 10,000 entries" in screen(app))
        assert "… 9,993 more: 639,552 tokens" in screen(app)

    drive(steps, state(("tree", tree)))
