"""A small canvas for the drawings of the docs: boxes, lines, arrows and texts as SVG, in light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 } .head { font-weight: 600 } .small { font-size: 12px; fill: #57606a }
.middle { text-anchor: middle } .end { text-anchor: end }
.plain { fill: none; stroke: #8c959f } .live { fill: #c3d4e8 } .restored { fill: #6f9ecf } .computed { fill: #e8590c }
.derived { fill: #f6c9a8 } .box { fill: #eef3f9; stroke: #6f9ecf } .mark { fill: #1a7f5a } .wash { fill: #f3f4f6 }
.line { stroke: #57606a; fill: none } .dashed { stroke-dasharray: 5 4 } .tip { fill: #57606a }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b3 } .plain { stroke: #6e7681 } .live { fill: #36485e } .restored { fill: #5b8fc7 }
  .computed { fill: #ff8b3d } .derived { fill: #7a4b2a } .box { fill: #1c2a3a; stroke: #5b8fc7 } .mark { fill: #3fb983 }
  .wash { fill: #20262d } .line { stroke: #9da7b3 } .tip { fill: #9da7b3 }
}
"""


class Canvas:
    """Collects shapes. All positions and sizes are in pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
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

    def rect(self, x: float, y: float, width: float, height: float, kind: str, round_by: int = 0) -> None:
        corner = f' rx="{round_by}"' if round_by else ""
        self._lines.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{corner}/>')

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "box") -> None:
        """A box with lines of text in its middle; the first is its name."""
        self.rect(x, y, width, height, kind, 6)
        top = y + height / 2 - 17 * (len(lines) - 1) / 2 + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * number, line, "middle head" if not number else "middle small")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> None:
        self._lines.append(f'<path class="{kind}" d="M{x1:.0f} {y1:.0f} {x2:.0f} {y2:.0f}"/>')

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
