"""Draws the pictures of the docs: `make docs`.

docs/demo.svg shows one bar a request of `make demo`, and which of its tokens were computed. docs/demo.json has the data: the
tokens that `headstart demo --json` prints. They are the same in every run. Times are not: README.md has those of one run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

WIDTH, LEFT, RIGHT, TOP, STEP, BAR = 900, 250, 116, 62, 22, 14
PARTS = (("live", "still in its slot"), ("restored", "restored from memory or disk"), ("computed", "computed"))

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 } .count { font-variant-numeric: tabular-nums } .end { text-anchor: end }
.live { fill: #c3d4e8 } .restored { fill: #6f9ecf } .computed { fill: #e8590c }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .live { fill: #36485e } .restored { fill: #5b8fc7 } .computed { fill: #ff8b3d }
}
"""


def drawing(turns: list[dict[str, Any]]) -> str:
    """The picture as SVG.

    Args:
        turns: requests in order, each with `user`, `kind`, and its `prompt`, `cached`, `restored` and `computed` tokens.
    """
    height = TOP + STEP * len(turns) + 12
    scale = (WIDTH - LEFT - RIGHT) / max(turn["prompt"] for turn in turns)
    prompt, computed = (sum(turn[name] for turn in turns) for name in ("prompt", "computed"))
    title = f"{len(turns)} requests, {prompt:,} prompt tokens: {computed:,} computed, {prompt - computed:,} reused"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="12" y="24">{escape(title)}</text>',
        *_legend(),
    ]
    for row, turn in enumerate(turns):
        lines += _bar(turn, TOP + STEP * row, scale)
    return "\n".join([*lines, "</svg>", ""])


def _legend() -> Iterator[str]:
    x = LEFT
    for name, meaning in PARTS:
        yield f'<rect class="{name}" x="{x}" y="36" width="12" height="12"/>'
        yield f'<text x="{x + 18}" y="47">{meaning}</text>'
        x += 44 + 7 * len(meaning)


def _bar(turn: dict[str, Any], y: int, scale: float) -> Iterator[str]:
    live = turn["cached"] - turn["restored"]
    yield f'<text class="end" x="{LEFT - 10}" y="{y + 12}">{escape(turn["user"])} {escape(turn["kind"])}</text>'
    x = float(LEFT)
    for name, tokens in (("live", live), ("restored", turn["restored"]), ("computed", turn["computed"])):
        if tokens:
            width = max(tokens * scale, 2)  # one token is a sliver, and to be seen all the same
            yield f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>'
            x += width
    yield f'<text class="count" x="{x + 8:.1f}" y="{y + 12}">{turn["computed"]:,} computed</text>'


def demo() -> str:
    return drawing(json.loads((HERE / "demo.json").read_text("utf-8")))


DRAWINGS: dict[str, Callable[[], str]] = {"demo.svg": demo}

if __name__ == "__main__":
    for name, made in DRAWINGS.items():
        (HERE / name).write_text(made(), "utf-8")
