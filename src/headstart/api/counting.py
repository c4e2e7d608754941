"""Counting: JSON bodies with very many values are refused before they are parsed.

All threads wait for each call that parses JSON or validates a body, so all streams pause. The pause is that of the number of
values, not of the bytes: a long text takes milliseconds, and ten million empty lists take seconds.
"""

from __future__ import annotations

import numpy as np

from headstart.api.errors import TooLarge

MOST_PARTS = 250_000
"""Most strings, lists and objects of a body. A conversation of 5,000 rounds with tool calls has fewer."""
MOST_COMMAS = 2_000_000
"""Most values behind a comma. Lists of token ids have many, and a number takes less time than a list."""
_PIECE = 1 << 18
"""Bytes that are counted in one call."""
_QUOTE, _COMMA, _LIST, _OBJECT = b'",[{'


def check_count(data: bytes) -> None:
    """Counts what a body has outside its strings. What is no JSON is counted somehow. Raises TooLarge."""
    if len(data) <= MOST_PARTS:
        return
    quotes = opened = commas = 0
    within = np.uint8(0)  # 1 inside a string
    escaped = False  # whether the next byte is
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        if escaped:
            piece = b" " + piece[1:]
        escaped = (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
        piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        text = np.frombuffer(piece, np.uint8)
        ends = text == _QUOTE
        inside = (np.cumsum(ends, dtype=np.uint8) + within) & 1
        within = inside[-1] if len(inside) else within
        outside = text[inside == 0]
        quotes += int(np.count_nonzero(ends))
        opened += int(np.count_nonzero((outside == _LIST) | (outside == _OBJECT)))
        commas += int(np.count_nonzero(outside == _COMMA))
        if quotes // 2 + opened > MOST_PARTS or commas > MOST_COMMAS:
            raise TooLarge(
                f"The body has more than {MOST_PARTS:,} strings, lists and objects, or more than {MOST_COMMAS:,} numbers: "
                "send fewer of them, for example fewer messages with longer texts, or several requests."
            )
