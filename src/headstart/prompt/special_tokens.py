"""Special tokens: splits a rendered text into the segments between its control tokens.

Example: `<|im_start|>user Hello<|im_end|>` has an empty segment, `<|im_start|>`, the segment `user Hello`, and `<|im_end|>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from headstart.interfaces.tokenizer import Control
from headstart.longest_match import longest_of
from headstart.prompt.escape import Escaper

_SPACE = " \t\n\v\f\r"
"""White space that control tokens remove: C's `isspace`, as in llama.cpp. Python's own definition is wider."""


class SpecialTokenSplitter:
    """Splits rendered texts at control tokens. Where several begin, the longest counts."""

    def __init__(self, controls: Iterable[Control]) -> None:
        self._controls = {control.text: control for control in controls if control.text}
        self._split = re.compile(longest_of(self._controls))
        self._partial = {text[:length] for text in self._controls for length in range(1, len(text))}
        self._longest = max(map(len, self._partial), default=0)

    def split(self, rendered: str, begin: int = 0, before: Control | None = None) -> Iterator[tuple[int, str, Control | None]]:
        """The segments, unescaped: where each begins, its text, and the control token after it.

        Args:
            begin: where the first segment begins.
            before: the control token directly before it.
        """
        position = begin
        strip_left = before is not None and before.rstrip
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
        """Whether every text with this beginning is split in the same way up to `position`, so no control token can span it."""
        shortest = max(0, position - self._longest)
        return self._partial.isdisjoint(rendered[at:position] for at in range(shortest, position))
