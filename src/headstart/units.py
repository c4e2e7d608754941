"""Units: sizes, shares, times and counts in the form that people write and read."""

from __future__ import annotations

import re

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B|)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512 MiB`, `2G`, `1.5g`, `1000000` (powers of 1024, except for `4GB`: powers of 1000).

    Raises:
        ValueError: it is not a size.
    """
    found = _SIZE.fullmatch(text)
    if found is None or (not found[2] and found[3].upper() == "IB"):
        raise ValueError(f"'{text}' is not a size; write it like 4GiB, 512MiB or 2G")
    base = 1000 if found[2] and found[3].upper() == "B" else 1024
    size = float(found[1]) * base ** _POWERS[found[2].upper()]
    if size >= 1 << 60:
        raise ValueError(f"'{text[:20]}…' is more than any machine has")
    return int(size)


def parse_portion(text: str) -> float:
    """For `25%` or `0.25` a share as a number up to 1; for a size as in `parse_size` its bytes.

    Raises:
        ValueError: it is neither, or zero.
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 2.0
    found = share if percent or share <= 1 else float(parse_size(text))
    if found <= 0 or (percent and found > 1):
        raise ValueError(f"'{text[:20]}' is no share; write it like 25%, 0.25 or 2GiB")
    return found


_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)\s*")


def parse_time(text: str) -> float:
    """Seconds of `7d`, `12 h`, `90min` or `90m`, `30s`, `2w`.

    Raises:
        ValueError: it is not a time, or zero.
    """
    found = _TIME.fullmatch(text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds < 1e11:
        raise ValueError(f"'{text[:20]}' is not a time; write it like 7d, 12h or 90min")
    return seconds


def show_time(seconds: float) -> str:
    """A time in the largest unit that leaves it whole, or else in seconds."""
    for unit in ("w", "d", "h", "min"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:,.0f} {unit}"
    return f"{_short(seconds)} s"


def show_span(seconds: float) -> str:
    """About how long: in the largest of `d`, `h`, `min` and `s` that it reaches."""
    unit = next((unit for unit in ("d", "h", "min") if seconds >= _SECONDS[unit]), "s")
    return f"{seconds / _SECONDS[unit]:.0f} {unit}"


def count(number: int, noun: str) -> str:
    """`1 thread`, `2,048 threads`. For nouns that take an `s`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_size(size: float) -> str:
    """`size` bytes with three digits or four, and a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{_short(size)} {unit}"
        size /= 1024
    return f"{_short(size)} GiB"


def _short(number: float) -> str:
    """With three digits, or all digits before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
