"""Overlap: how much of one sequence also occurs in another one, at any position.

Only runs of at least `run` items count; a shorter run is a coincidence. A run that occurs twice in `current` counts twice only
if it occurs twice in `previous`: a quotation of text that is still there is new text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Odd numbers, so that no bit of an item is lost."""


def overlap(current: npt.NDArray[Any], previous: npt.NDArray[Any], run: int) -> npt.NDArray[np.bool_]:
    """Marks the items of `current` that lie in a run of `previous`. Takes O(n log n).

    Args:
        current, previous: integers (tokens, or the characters of a text), one dimension.
        run: length of the shortest run that is no coincidence; at least 1.

    Returns:
        One boolean for each item of `current`.
    """
    if min(len(current), len(previous)) < run:
        return np.zeros(len(current), np.bool_)
    mine, other = _runs(current, run), np.sort(_runs(previous, run))
    order = np.argsort(mine, kind="stable")
    mine = mine[order]
    times = np.searchsorted(other, mine, "right") - np.searchsorted(other, mine, "left")
    earlier = np.arange(len(mine)) - np.searchsorted(mine, mine, "left")  # equal runs before it in `current`
    # Where a run begins one more covers each item, and behind its end one less.
    edges = np.zeros(len(current) + 1, np.int64)
    begins = order[earlier < times]
    edges[begins] += 1
    edges[begins + run] -= 1
    return np.cumsum(edges[:-1]) > 0


def characters(text: str) -> npt.NDArray[np.uint32]:
    """A text as integers."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _runs(items: npt.NDArray[Any], run: int) -> npt.NDArray[np.uint64]:
    """A digest of each run of so many items: that of its first part and that of its last one, which may overlap."""
    found = items.astype(np.uint64)
    size = 1
    while size < run:
        step = min(size, run - size)
        found = found[:-step] * np.uint64(_FACTORS[size.bit_length() % len(_FACTORS)]) + found[step:]
        found ^= found >> np.uint64(29)
        size += step
    return found
