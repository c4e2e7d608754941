"""The plots, read as XML: what they draw is what the numbers say."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from headstart.cli.charts import RATIO_TICKS, CurvePanel, Ratio, curve_panels, ratios, stats_chart
from headstart.cli.look import LOOKS

SVG = "{http://www.w3.org/2000/svg}"


class Drawing:
    """An SVG's texts, bars and curves."""

    def __init__(self, svg: str) -> None:
        root = ElementTree.fromstring(svg)
        _, _, self.width, self.height = map(float, root.attrib["viewBox"].split())
        self.texts = ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]
        self.bars = [one.attrib | {"about": one.findtext(f"{SVG}title", "")} for one in root.iter(f"{SVG}rect")]
        self.curves = {one.findtext(f"{SVG}title", ""): one for one in root.iter(f"{SVG}g")}

    def bar(self, about: str) -> dict[str, str]:
        (found,) = [one for one in self.bars if one["about"] == about]
        return found

    def all_of(self, kind: str, about: str) -> list[float]:
        """The heights of bars of a kind, from left to right."""
        return [float(one["height"]) for one in self.bars if one["class"] == kind and re.fullmatch(about, one["about"])]

    def inside(self) -> bool:
        return all(
            float(one["x"]) >= 0 and float(one["x"]) + float(one["width"]) <= self.width + 0.1 and float(one["height"]) >= 0
            for one in self.bars
        )


def stats(**changed: Any) -> dict[str, Any]:
    steps = {
        "seconds": 5.0,
        "requests": [1, 0, 2],
        "cached": [0, 0, 900],
        "computed": [1000, 0, 100],
        "saved_seconds": [0.0, 0.0, 1.8],
        "warm": [None, None, 0.2],
        "cold": [2.0, None, None],
        "decode": [50.0, None, 50.0],
    }
    found = {
        "model": "demo",
        "seconds": 15.0,
        "requests": 3,
        "prompt": 2000,
        "cached": 900,
        "computed": 1100,
        "completion": 60,
        "tiers": {"live": 500, "memory": 300, "disk": 100},
        "saved_seconds": 1.8,
        "recomputed": {"system_changed": 40, "evicted": 80},
        "ttft": {"warm": {"requests": 2, "median": 0.2}, "cold": {"requests": 1, "median": 2.0}},
        "decode": 50.0,
        "running": 0,
        "waiting": 0,
        "slots": 2,
        "stored": {
            "memory": {"used": 1 << 20, "budget": 4 << 20, "reserved": 0, "entries": 9},
            "disk": {"used": 0, "budget": 0, "reserved": 0, "entries": 0},
        },
        "steps": steps,
    }
    return {**found, **changed}


def test_stats_are_drawn_in_proportion() -> None:
    drawing = Drawing(stats_chart(stats()))
    assert drawing.texts[0] == "3 requests: 900 of 2,000 prompt tokens were cached (45%)"
    assert "in 15 s; about 1.8 s of prefill saved" in drawing.texts
    widths = {name: float(drawing.bar(f"{LOOKS[name].place}: {size:,} tokens")["width"]) for name, size in ORIGINS}
    assert widths == {name: pytest.approx(840 * size / 2000, abs=0.1) for name, size in ORIGINS}
    assert drawing.inside()
    for text in ("slot 500", "computed 1,100", "system_changed", "40", "1 MiB of 4 MiB", "Prompt tokens, each 5 s"):
        assert text in drawing.texts
    again = {
        name: float(drawing.bar(f"{name}: {tokens}")["width"]) for name, tokens in (("evicted", 80), ("system_changed", 40))
    }
    assert again["evicted"] == 2 * again["system_changed"]


ORIGINS = (("live", 500), ("memory", 300), ("disk", 100), ("computed", 1100))


def test_stats_over_time() -> None:
    """A step has a bar of computed tokens below one of cached tokens. The scale ends at 1,000."""
    drawing = Drawing(stats_chart(stats()))
    assert drawing.all_of("computed", r"computed: [\d,]+ tokens") == pytest.approx([26, 170, 17])  # the first is of all
    assert drawing.all_of("memory", r"cached: [\d,]+ tokens") == pytest.approx([153])
    below, above = drawing.bar("computed: 100 tokens"), drawing.bar("cached: 900 tokens")
    assert float(above["y"]) + float(above["height"]) == pytest.approx(float(below["y"]))
    assert {"1,000", "500", "0"} <= set(drawing.texts)
    assert drawing.curves.keys() == {"warm: –, –, 0.2", "cold: 2, –, –"}


@pytest.mark.parametrize("steps", [0, 1, 240])
def test_stats_of_any_length(steps: int) -> None:
    lists = {name: [1] * steps for name in ("requests", "cached", "computed", "saved_seconds", "warm", "cold", "decode")}
    none = {"median": None, "requests": 0}
    empty = stats(
        requests=0,
        prompt=0,
        cached=0,
        computed=0,
        tiers={},
        recomputed={},
        ttft={"warm": none, "cold": none},
        steps={"seconds": 5.0, **lists},
        stored={},
    )
    drawing = Drawing(stats_chart(empty))
    assert drawing.texts[0] == "0 requests: 0 of 0 prompt tokens were cached (0%)"
    assert drawing.inside()


def test_ratios_are_on_a_logarithmic_scale() -> None:
    rows = [Ratio("half", 0.5, 0.4, 0.6), Ratio("same", 1, 1, 1), Ratio("far", 1000, 1, 2000)]
    drawing = Drawing(ratios(rows, "peer"))
    half, same, far = (drawing.bar(f"{row.name}: {row.median:g}") for row in rows)
    octave = 420 * math.log(2) / math.log(RATIO_TICKS[-1] / RATIO_TICKS[0])
    assert float(half["width"]) == pytest.approx(octave, abs=0.1)
    assert float(half["x"]) + float(half["width"]) == pytest.approx(float(same["x"]), abs=0.2)
    assert float(far["width"]) == pytest.approx(4 * octave, abs=0.2)  # the scale ends at 16
    assert drawing.inside()
    assert {"0.5 (0.4 – 0.6)", "1", "half", "headstart / peer: 1 is equal, and less is to the left"} <= set(drawing.texts)


def test_curves_go_through_their_values() -> None:
    panel = CurvePanel("traffic", ["5%", "10%", "25%"], {"value": [0.2, 0.4, 0.8], "lru": [0.1, None, 0.4]})
    drawing = Drawing(curve_panels("Hits", [panel], {"value": "first", "lru": "second"}))
    whole = drawing.curves["value: 20.0%, 40.0%, 80.0%"]
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in whole.iter(f"{SVG}circle")]
    assert dots == [(60.0, 211.5), (170.0, 169.0), (280.0, 84.0)]  # the scale ends at 80%
    assert whole.attrib["class"] == "first"
    assert "80%" in drawing.texts
    assert len(list(drawing.curves["lru: 10.0%, –, 40.0%"].iter(f"{SVG}circle"))) == 1  # a gap begins another curve


def test_text_is_no_markup() -> None:
    hostile = '"><script>alert(1)</script>&'
    drawing = Drawing(stats_chart(stats(recomputed={hostile: 5})))
    assert hostile in drawing.texts
