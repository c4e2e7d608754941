"""Look: how terminals and plots show tiers: a letter, and a colour on light and on dark ground."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """How tokens of one origin are shown.

    Attributes:
        letter: for those who see no colours.
        place: where the tokens came from.
        light: the colour on light ground.
        dark: on dark ground.
        terminal: the style of rich for a letter in a bar, readable on any ground.
    """

    letter: str
    place: str
    light: str
    dark: str
    terminal: str


LOOKS: Mapping[str, Look] = {
    "live": Look("L", "slot", "#c3d4e8", "#36485e", "#10151b on #c3d4e8"),
    "memory": Look("M", "memory", "#6f9ecf", "#5b8fc7", "#10151b on #6f9ecf"),
    "disk": Look("D", "disk", "#37608c", "#3f6fa3", "#ffffff on #37608c"),
    "shared": Look("S", "shared store", "#7d5ba6", "#9a7bc4", "#ffffff on #7d5ba6"),
    "computed": Look("C", "computed", "#e8590c", "#ff8b3d", "#10151b on #ff8b3d"),
}
"""In the order in which bars show them: the fastest tier first."""

INK, PALE, GOOD = ("#24292f", "#e6edf3"), ("#57606a", "#9da7b3"), ("#1a7f5a", "#3fb983")
"""Other colours on light and on dark ground: text, small text and lines, and what is marked."""


def cells(parts: Mapping[str, int], width: int) -> dict[str, int]:
    """The cells of a bar of this width for each part, in proportion. Each part that is not empty gets one at least."""
    shown = {name: parts[name] for name in LOOKS if parts.get(name, 0) > 0}
    total, found = sum(shown.values()), dict[str, int]()
    for left, (name, size) in zip(range(len(shown) - 1, -1, -1), shown.items(), strict=True):
        most = width - sum(found.values()) - left  # a cell stays for each part that follows
        found[name] = max(1, min(most, round(width * size / total)) if left else most)
    return found


def plain(text: str) -> str:
    """A text without anything that a terminal obeys: invisible characters become escapes like `\\x1b`."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text)
