"""Canvas: boxes, lines, arrows and texts as SVG, in light and dark. Plots and the drawings of the docs have one look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from string import Template

from headstart.cli.look import GOOD, INK, LOOKS, PALE

_PAIRS = {name: (look.light, look.dark) for name, look in LOOKS.items()} | {"ink": INK, "pale": PALE, "good": GOOD}
COLOURS = {name: light for name, (light, _) in _PAIRS.items()} | {f"{name}_dark": dark for name, (_, dark) in _PAIRS.items()}
"""The colours of `look`, by name; with `_dark` those on dark ground."""

STYLE = Template("""
text { font: 13px system-ui, sans-serif; fill: $ink }
.title { font-size: 16px; font-weight: 600 } .head { font-weight: 600 } .small { font-size: 12px; fill: $pale }
.middle { text-anchor: middle } .end { text-anchor: end }
.plain { fill: none; stroke: #8c959f } .live { fill: $live } .restored { fill: $memory } .computed { fill: $computed }
.derived { fill: #f6c9a8 } .box { fill: #eef3f9; stroke: $memory } .mark { fill: $good } .wash { fill: #f3f4f6 }
.line { stroke: $pale; fill: none } .dashed { stroke-dasharray: 5 4 } .tip { fill: $pale }
@media (prefers-color-scheme: dark) {
  text { fill: $ink_dark } .small { fill: $pale_dark } .plain { stroke: #6e7681 } .live { fill: $live_dark } .restored { fill: $memory_dark }
  .computed { fill: $computed_dark } .derived { fill: #7a4b2a } .box { fill: #1c2a3a; stroke: $memory_dark } .mark { fill: $good_dark }
  .wash { fill: #20262d } .line { stroke: $pale_dark } .tip { fill: $pale_dark }
}
""").substitute(COLOURS)  # noqa: E501


class Canvas:
    """Collects shapes. All positions and sizes are in pixels from the top left.

    Args:
        style: of further kinds of shapes.
    """

    def __init__(self, width: int, height: int, title: str, style: str = "") -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}{style}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
        ]
        self.text(12, 24, title, "title")

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """One line of text that begins at `x`; with the kind `middle` or `end` it is centred there, or ends there."""
        mark = f' class="{kind}"' if kind else ""
        self._lines.append(f'<text{mark} x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>')

    def texts(self, x: float, y: float, lines: Iterable[str], kind: str = "", step: int = 17) -> None:
        """Lines below each other."""
        for number, line in enumerate(lines):
            self.text(x, y + step * number, line, kind)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, round_by: int = 0, *, about: str = "") -> None:
        """A rectangle. `about`: what a reader sees who points at it."""
        corner = f' rx="{round_by}"' if round_by else ""
        shape = f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{corner}'
        self._lines.append(f"{shape}><title>{escape(about)}</title></rect>" if about else f"{shape}/>")

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "box") -> None:
        """A box with lines of text in its middle; the first is its name."""
        self.rect(x, y, width, height, kind, 6)
        top = y + height / 2 - 17 * (len(lines) - 1) / 2 + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * number, line, "middle head" if not number else "middle small")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> None:
        self._lines.append(f'<path class="{kind}" d="M{x1:.0f} {y1:.0f} {x2:.0f} {y2:.0f}"/>')

    def curve(self, points: Sequence[tuple[float, float]], kind: str, about: str = "") -> None:
        """A line through points, each with a dot. `about`: what a reader sees who points at it."""
        way = " ".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._lines.append(f'<g class="{kind}"><title>{escape(about)}</title><path d="M{way}"/>')
        self._lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points]
        self._lines.append("</g>")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, label: str = "", *, dashed: bool = False) -> None:
        """An arrow from the first point to the second; its label is centred above its middle."""
        kind = "line dashed" if dashed else "line"
        self._lines.append(f'<path class="{kind}" marker-end="url(#tip)" d="M{x1:.0f} {y1:.0f} {x2:.0f} {y2:.0f}"/>')
        if label:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 5, label, "middle")

    def flag(self, x: float, y: float) -> None:
        """A triangle that points down at a position: a checkpoint."""
        self._lines.append(f'<path class="mark" d="M{x - 6:.0f} {y - 11:.0f}h12l-6 11z"/>')

    def svg(self) -> str:
        return "\n".join([*self._lines, "</svg>", ""])
