"""Shrink: makes a failing history shorter, as long as it fails in the same way, and prints it as Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from headstart.testing.simulation.history import Happening, Scenario, Setup
from headstart.testing.simulation.run import Result, run


def kind(violation: str) -> str:
    """A violation without the numbers in it."""
    return "".join(character for character in violation if not character.isdigit())[:60]


def shrink(failed: Result, most: int = 600, log: Callable[[str], None] = lambda line: None) -> Result:
    """The shortest history that is found with at most so many runs, and its result."""
    best, wanted, left = failed, kind(failed.violation), most

    def tried(events: tuple[Happening, ...]) -> Result | None:
        nonlocal left
        left -= 1
        result = run(best.history.only(events))
        return result if kind(result.violation) == wanted else None

    size = max(1, len(best.history.events) // 2)
    while left > 0:
        at, shorter = 0, False
        while at < len(best.history.events) and left > 0:
            events = best.history.events
            if (found := tried(events[:at] + events[at + size :])) is not None:
                best, shorter = found, True
                log(f"{len(best.history.events)} events")
            else:
                at += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    for number, event in enumerate(best.history.events):  # simpler events
        for simpler in (
            replace(event, size=1),
            replace(event, reply=1),
            replace(event, how="turn" if event.what == "ask" else event.how),
        ):
            if simpler != event and left > 0:
                events = best.history.events
                if (found := tried((*events[:number], simpler, *events[number + 1 :]))) is not None:
                    best = found
    return best


def written(history: Scenario) -> str:
    """A history as Python, to be pasted into a test."""
    events = "".join(f"        {_short(event)},\n" for event in history.events)
    return f"Scenario(\n    {history.seed},\n    {_short(history.setup)},\n    (\n{events}    ),\n)"


def _short(value: Happening | Setup) -> str:
    """A value without the fields that have their defaults."""
    parts = [repr(round(value.at, 4)), repr(value.what)] if isinstance(value, Happening) else []
    for one in fields(value):
        given = getattr(value, one.name)
        if one.name not in ("at", "what") and given != one.default:
            parts.append(f"{one.name}={given!r}")
    return f"{type(value).__name__}({', '.join(parts)})"
