"""Charts: plots of figures as SVG, with the look of the drawings. Pure: numbers in, a text out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from headstart.cli.canvas import COLOURS, Canvas
from headstart.cli.look import LOOKS
from headstart.units import show_size, show_span, show_time

STYLE = Template(
    """
.memory { fill: $memory } .disk { fill: $disk } .shared { fill: $shared } .thin { stroke: $pale; stroke-width: 0.5; fill: none }
.first path { stroke: $computed } .second path { stroke: $memory } .best path { stroke: $ink; stroke-dasharray: 6 4 }
.other path { stroke: $pale; stroke-opacity: 0.5 }
g path { fill: none; stroke-width: 2 } .first circle { fill: $computed } .second circle { fill: $memory }
.best circle { fill: $ink } .other circle { fill: $pale; fill-opacity: 0.5 }
@media (prefers-color-scheme: dark) {
  .memory { fill: $memory_dark } .disk { fill: $disk_dark } .shared { fill: $shared_dark } .thin { stroke: $pale_dark }
  .first path { stroke: $computed_dark } .second path { stroke: $memory_dark } .best path { stroke: $ink_dark }
  .first circle { fill: $computed_dark } .second circle { fill: $memory_dark } .best circle { fill: $ink_dark }
}
"""
).substitute(COLOURS)
WIDTH = 920


# ── ratios ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Ratio:
    """What is measured of two programs in turn: the median of the ratios within pairs, and the least and the greatest."""

    name: str
    median: float
    least: float
    most: float


RATIO_TICKS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16)


def ratios(rows: Sequence[Ratio], peer: str) -> str:
    """A bar a figure from 1 to the median, and a line from the least to the greatest, on a logarithmic scale."""
    left, right, top, step = 370, 130, 62, 26
    canvas = Canvas(WIDTH, top + step * len(rows) + 34, f"headstart / {peer}: 1 is equal, and less is to the left", STYLE)
    low, high = math.log(RATIO_TICKS[0]), math.log(RATIO_TICKS[-1])

    def place(value: float) -> float:
        share = (math.log(value) - low) / (high - low)
        return left + (WIDTH - left - right) * min(1.0, max(0.0, share))

    bottom = top + step * len(rows)
    for tick in RATIO_TICKS:
        canvas.line(place(tick), top - 8, place(tick), bottom, "line" if tick == 1 else "thin")
        canvas.text(place(tick), bottom + 18, f"{tick:g}", "middle small")
    for number, row in enumerate(rows):
        y, (start, end) = top + step * number, sorted((place(1), place(row.median)))
        canvas.text(left - 10, y + 12, row.name, "end")
        canvas.rect(start, y, max(end - start, 2), 14, "memory", about=f"{row.name}: {row.median:g}")
        if row.least < row.most:
            canvas.line(place(row.least), y + 7, place(row.most), y + 7)
        spread = f" ({row.least:g} – {row.most:g})" if row.least < row.most else ""
        canvas.text(WIDTH - right + 10, y + 12, f"{row.median:g}{spread}")
    return canvas.svg()


# ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CurvePanel:
    """Curves over the same few places: `curves` has a value a place, or None where there is none."""

    title: str
    places: Sequence[str]
    curves: Mapping[str, Sequence[float | None]]


def curve_panels(title: str, panels: Sequence[CurvePanel], kinds: Mapping[str, str], *, percent: bool = True) -> str:
    """Three panels a row.

    Args:
        kinds: of each curve: `first`, `second`, `best` or `other`.
        percent: whether the values are shares.
    """
    across, height = 3, 250
    canvas = Canvas(WIDTH, 70 + height * math.ceil(len(panels) / across), title, STYLE)
    _legend(canvas, kinds)
    for number, panel in enumerate(panels):
        left, top = 60 + 300 * (number % across), 84 + height * (number // across)
        _curves(canvas, panel, kinds, (left, top, 220, 170), percent=percent)
    return canvas.svg()


def _legend(canvas: Canvas, kinds: Mapping[str, str]) -> None:
    x = 60.0
    for name, kind in kinds.items():
        canvas.curve([(x, 45), (x + 24, 45)], kind, name)
        canvas.text(x + 32, 49, name)
        x += 60 + 8 * len(name)


def _curves(
    canvas: Canvas,
    panel: CurvePanel,
    kinds: Mapping[str, str],
    box: tuple[float, float, float, float],
    *,
    percent: bool = False,
) -> None:
    left, top, width, height = box
    canvas.text(left, top - 8, panel.title, "head")
    known = [value for values in panel.curves.values() for value in values if value is not None]
    most = _round_up(max(known, default=0.0)) or 1.0
    for part in range(5):
        y = top + height * (1 - part / 4)
        canvas.line(left, y, left + width, y, "thin")
        canvas.text(left - 6, y + 4, f"{most * part / 4:.0%}" if percent else f"{most * part / 4:g}", "end small")
    step = width / max(1, len(panel.places) - 1)
    for at, place in enumerate(panel.places):
        if place:
            canvas.text(left + step * at, top + height + 17, place, "middle small")
    for name, values in panel.curves.items():
        shown = ", ".join("–" if value is None else f"{value:.1%}" if percent else f"{value:g}" for value in values)
        for run in _runs(values):
            points = [(left + step * at, top + height * (1 - value / most)) for at, value in run]
            canvas.curve(points, kinds[name], f"{name}: {shown}")


def _runs(values: Sequence[float | None]) -> Iterator[list[tuple[int, float]]]:
    """The parts of a curve that have no gap, each with the places of its values."""
    run: list[tuple[int, float]] = []
    for at, value in enumerate([*values, None]):
        if value is not None:
            run.append((at, value))
        elif run:
            yield run
            run = []


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8, 10 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(found for factor in (1, 2, 4, 5, 8, 10, 20) if (found := factor * power) >= value * 0.9999)


# ── what a server has saved ──────────────────────────────────────────────────────────────────────────────────────────


def stats_chart(stats: Mapping[str, Any]) -> str:
    """What reuse has saved: an answer of `/headstart/stats`. Tokens by tier and over time, first tokens, causes, and tiers."""
    cached, prompt = stats["cached"], stats["prompt"]
    share = cached / prompt if prompt else 0.0
    title = f"{stats['requests']:,} requests: {cached:,} of {prompt:,} prompt tokens were cached ({share:.0%})"
    causes = sorted(stats["recomputed"].items(), key=lambda item: -item[1])[:6]
    canvas = Canvas(WIDTH, 640 + 22 * max(len(causes), len(stats["stored"])), title, STYLE)
    since = show_span(stats["seconds"])
    saved = stats["saved_seconds"]
    seconds = "" if saved is None else f"; about {saved:,.1f} s of prefill saved"
    canvas.text(12, 46, f"in {since}{seconds}", "small")
    _origins(canvas, {**stats["tiers"], "computed": stats["computed"]}, 66)
    _over_time(canvas, stats["steps"], 160)
    ttft = CurvePanel(
        f"Seconds to the first token (median {_median(stats, 'warm')} warm, {_median(stats, 'cold')} cold)",
        _times(stats["steps"]),
        {name: stats["steps"][name] for name in ("warm", "cold")},
    )
    _curves(canvas, ttft, {"warm": "second", "cold": "first"}, (60, 400, 840, 140))
    _keys(canvas, 400, {"warm": "memory", "cold": "computed"})
    canvas.text(60, 600, "Tokens computed again, by cause" + ("" if causes else ": none"), "head")
    _rows(canvas, 60, 616, {name: (tokens, f"{tokens:,}") for name, tokens in causes}, "computed")
    canvas.text(500, 600, "Budget in use", "head")
    levels = {name: _level(size) for name, size in stats["stored"].items()}
    _rows(canvas, 500, 616, levels, None, 1.0)
    return canvas.svg()


def _level(size: Mapping[str, int]) -> tuple[float, str]:
    """How full a tier is."""
    used, budget = size["used"], size["budget"]
    return used / budget if budget else 0.0, f"{show_size(used)} of {show_size(budget)}"


def _median(stats: Mapping[str, Any], name: str) -> str:
    value = stats["ttft"][name]["median"]
    return "–" if value is None else f"{value:.2f}"


def _origins(canvas: Canvas, parts: Mapping[str, int], y: float) -> None:
    """One bar: prompt tokens by where they came from."""
    total, x, legend = sum(parts.values()), 60.0, 60.0
    for name, look in LOOKS.items():
        if tokens := parts.get(name, 0):
            size = 840 * tokens / total
            canvas.rect(x, y, size, 26, name, about=f"{look.place}: {tokens:,} tokens")
            canvas.rect(legend, y + 38, 12, 12, name)
            canvas.text(legend + 18, y + 49, f"{look.place} {tokens:,}")
            x, legend = x + size, legend + 60 + 7 * len(f"{look.place} {tokens:,}")


def _over_time(canvas: Canvas, steps: Mapping[str, Any], top: float) -> None:
    """A bar a step: cached and computed tokens."""
    height, cached, computed = 170, steps["cached"], steps["computed"]
    canvas.text(60, top - 8, f"Prompt tokens, each {show_time(steps['seconds'])}", "head")
    _keys(canvas, top, {"cached": "memory", "computed": "computed"})
    most = _round_up(max(map(sum, zip(cached, computed, strict=True)), default=0)) or 1.0
    width = 840 / max(1, len(cached))
    for part in range(5):
        y = top + height * (1 - part / 4)
        canvas.line(60, y, 900, y, "thin")
        canvas.text(54, y + 4, f"{most * part / 4:,.0f}", "end small")
    for at, place in enumerate(_times(steps)):
        x, y = 60 + width * at, top + float(height)
        for kind, tokens in (("computed", computed[at]), ("memory", cached[at])):
            if tokens:
                y -= height * tokens / most
                what = "cached" if kind == "memory" else kind
                canvas.rect(x, y, max(0.5, width - 1), height * tokens / most, kind, about=f"{what}: {tokens:,} tokens")
        if place:
            canvas.text(x, top + height + 17, place, "middle small")


def _keys(canvas: Canvas, top: float, kinds: Mapping[str, str]) -> None:
    """What the colours of a chart mean, above it on the right."""
    for number, (name, kind) in enumerate(kinds.items()):
        canvas.rect(720 + 90 * number, top - 18, 12, 12, kind)
        canvas.text(738 + 90 * number, top - 8, name)


def _times(steps: Mapping[str, Any]) -> list[str]:
    """The time since the start below some of the steps."""
    count = len(steps["cached"])
    each = max(1, math.ceil(count / 8))
    return [show_time(round(at * steps["seconds"])) if at and not at % each else "" for at in range(count)]


def _rows(
    canvas: Canvas, x: float, top: float, rows: Mapping[str, tuple[float, str]], kind: str | None, whole: float | None = None
) -> None:
    """Bars with names and values. `kind`: of all bars; None: of each its own name."""
    most = whole or max((value for value, _ in rows.values()), default=0) or 1
    for number, (name, (value, shown)) in enumerate(rows.items()):
        y = top + 22 * number
        canvas.text(x + 130, y + 12, name, "end small")
        canvas.rect(x + 138, y, max(1, 130 * value / most), 14, kind or name, about=f"{name}: {shown}")
        canvas.text(x + 276, y + 12, shown, "small")
