"""Values: JSON that somebody else wrote, read so that it can be written again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

DEPTH = 100
"""Most levels of a value in a text: what walks it may call itself."""

_LARGEST = 1024
"""Bits of a number, as floats have them. Python writes no integers of more than 4,300 digits."""


def json_value(text: str) -> Any:
    """The value of a JSON text; line breaks in strings, as models write them, are no fault. Halves of characters, as escapes
    can name them, are replaced.

    Raises ValueError: it is no JSON, has a number beyond all floats, or more than `DEPTH` levels.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
        if "\\u" in text:
            value = json.loads(paired(json.dumps(value, ensure_ascii=False)), strict=False)
    except RecursionError:
        raise ValueError("too many levels") from None
    if next(islice(levels(value), DEPTH, None), None) is not None:
        raise ValueError("too many levels")
    if not countable(value):
        raise ValueError("a number is too large")
    return value


def countable(value: Any) -> bool:
    """Whether all numbers in a value are such as can be written: a JSON text may have larger ones."""
    return all(map(_countable, (one for level in levels(value) for one in level)))


def paired(text: str) -> str:
    """The text with halves of characters, as JSON's escapes name them, put together; lone ones are replaced."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def levels(value: Any) -> Iterator[list[Any]]:
    """A value, then all that is right in it, and so on."""
    level = [value]
    while level:
        yield level
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [item for items in inner for item in items]


def _countable(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= _LARGEST
    return not isinstance(value, float) or math.isfinite(value)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
