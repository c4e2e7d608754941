"""Pieces: a rendered text between its control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from headstart.core.escape import Escaper
from headstart.engines.base import Control

_SPACE = " \t\n\v\f\r"
"""What control tokens swallow: C's `isspace`, as in llama.cpp; Python's own notion is wider."""


class Pieces:
    """Splits rendered texts at the spellings of control tokens. `controls`: the longest spelling first."""

    def __init__(self, controls: Sequence[Control]) -> None:
        self._controls = {control.text: control for control in controls if control.text}
        self._split = re.compile("|".join(map(re.escape, self._controls))) if self._controls else None

    def of(self, rendered: str) -> Iterator[tuple[int, str, Control | None]]:
        """Plain pieces, unescaped, each with where it begins and the control token that follows it."""
        position = 0
        strip_left = False
        if self._split is not None:
            for found in self._split.finditer(rendered):
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
