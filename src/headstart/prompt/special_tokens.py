"""Pieces: a rendered text between its control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from headstart.interfaces.engine import Control
from headstart.prompt.escape import Escaper

_SPACE = " \t\n\v\f\r"
"""What control tokens swallow: C's `isspace`, as in llama.cpp; Python's own notion is wider."""


class SpecialTokenSplitter:
    """Splits rendered texts at the spellings of control tokens. `controls`: the longest spelling first."""

    def __init__(self, controls: Sequence[Control]) -> None:
        self._controls = {control.text: control for control in controls if control.text}
        self._split = re.compile("|".join(map(re.escape, self._controls))) if self._controls else None
        self._partial = {text[:length] for text in self._controls for length in range(1, len(text))}
        self._longest = max(map(len, self._partial), default=0)

    def split(self, rendered: str, begin: int = 0, before: Control | None = None) -> Iterator[tuple[int, str, Control | None]]:
        """Plain pieces, unescaped, each with where it begins and the control token that follows it.

        Args:
            begin: where the first one begins.
            before: the control token right before that.
        """
        position = begin
        strip_left = before is not None and before.rstrip
        if self._split is not None:
            for found in self._split.finditer(rendered, begin):
                control = self._controls[found[0]]
                plain = Escaper.unescape(rendered[position : found.start()])
                if strip_left:
                    plain = plain.lstrip(_SPACE)
                yield position, (plain.rstrip(_SPACE) if control.lstrip else plain), control
                position, strip_left = found.end(), control.rstrip
        rest = Escaper.unescape(rendered[position:])
        if strip_left:
            rest = rest.lstrip(_SPACE)
        if rest:
            yield position, rest, None

    def splits_at(self, rendered: str, position: int) -> bool:
        """Whether all texts with this beginning are split alike before `position`: no control token can reach over it."""
        shortest = max(0, position - self._longest)
        return self._partial.isdisjoint(rendered[at:position] for at in range(shortest, position))
