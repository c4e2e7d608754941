"""Overlap: how much of a sequence another one has too, wherever it stands there.

A run of items that both have counts, a shorter one is a coincidence. What ours has twice counts twice only if theirs has it
twice: a quotation of a text that is still there is new.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Odd numbers, so that no bit of an item is lost."""


def overlap(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], run: int) -> npt.NDArray[np.bool_]:
    """Which items of `ours` are part of a run that `theirs` has too, in O(n log n).

    Args:
        ours, theirs: integers; tokens, or the characters of a text.
        run: items that are no coincidence; at least 1.
    """
    if min(len(ours), len(theirs)) < run:
        return np.zeros(len(ours), np.bool_)
    mine, other = _runs(ours, run), np.sort(_runs(theirs, run))
    order = np.argsort(mine, kind="stable")
    mine = mine[order]
    times = np.searchsorted(other, mine, "right") - np.searchsorted(other, mine, "left")
    earlier = np.arange(len(mine)) - np.searchsorted(mine, mine, "left")  # of its equals in ours
    # Where a run begins one more covers each item, and behind its end one less.
    edges = np.zeros(len(ours) + 1, np.int64)
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
