"""JSON values: reads JSON from models and clients, so that it can be written again."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

DEPTH = 100
"""Most levels of a value in a text: what walks it may call itself."""
MOST = 200_000
"""Most commas and brackets of a text. All threads wait while it is read, and a million lists take seconds."""

_LARGEST = 1024
"""Bits of a number, as floats have them. Python writes no integers of more than 4,300 digits."""


_SPECIAL = re.compile(r'["\\\x00-\x1f]')


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _integer(digits: str) -> int:
    if countable(value := int(digits)):
        return value
    raise ValueError("a number is too large")


def _float(digits: str) -> float:
    if countable(value := float(digits)):
        return value
    raise ValueError("a number is too large")


_read = json.JSONDecoder(strict=False, parse_int=_integer, parse_float=_float, parse_constant=_refuse).decode


def json_value(text: str) -> Any:
    """The value of a JSON text; line breaks in strings, as models write them, are no fault. Halves of characters, as escapes
    can name them, are replaced.

    Raises ValueError: it is no JSON, has a number beyond all floats, more than `DEPTH` levels, or more than `MOST` commas and
        brackets, those in strings included.
    """
    if len(text) > MOST and sum(map(text.count, ",[{")) > MOST:
        raise ValueError("too many values")
    try:
        value = _read(text)
        if "\\u" in text:
            value = json.loads(json_text(value), strict=False)
    except RecursionError:
        raise ValueError("too many levels") from None
    opened = text.count("[") + text.count("{")
    if opened >= DEPTH and next(islice(levels(value), DEPTH, None), None) is not None:
        raise ValueError("too many levels")
    return value


class ControlEscaper:
    """A JSON text in parts → the same with the control characters in its strings escaped. Models write line breaks there as
    they are, which most parsers of JSON refuse.
    """

    def __init__(self) -> None:
        self._quoted = False
        self._before = 0
        self._literal = -1  # the place of the character that a backslash escapes

    def feed(self, text: str) -> str:
        given = _SPECIAL.sub(self._given, text)
        self._before += len(text)
        return given

    def _given(self, found: re.Match[str]) -> str:
        at, char = self._before + found.start(), found[0]
        if at == self._literal:
            return char
        if char == '"':
            self._quoted = not self._quoted
        elif char == "\\" and self._quoted:
            self._literal = at + 1
        elif self._quoted:
            return json.dumps(char)[1:-1]
        return char


def countable(value: Any) -> bool:
    """Whether all numbers in a value are such as can be written: a JSON text may have larger ones."""
    inside = [value]
    for one in inside:  # which grows by what is in it
        if isinstance(one, str):  # most are
            continue
        if isinstance(one, dict):
            inside += one.values()
        elif isinstance(one, list):
            inside += one
        elif isinstance(one, int):
            if one.bit_length() > _LARGEST:
                return False
        elif isinstance(one, float) and not math.isfinite(one):
            return False
    return True


def paired(text: str) -> str:
    """The text with halves of characters, as JSON's escapes name them, put together; lone ones are replaced."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_text(value: Any) -> str:
    """A value as JSON, without halves of characters."""
    return paired(json.dumps(value, ensure_ascii=False))


def bytes_of(value: Any) -> int:
    """About how many bytes a value takes in memory."""
    if isinstance(value, Mapping):
        return 64 + sum(bytes_of(key) + bytes_of(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return 56 + sum(map(bytes_of, value))
    return sys.getsizeof(value)


def levels(value: Any) -> Iterator[list[Any]]:
    """A value, then all that is right in it, and so on."""
    level = [value]
    while level:
        yield level
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [item for items in inner for item in items]
