"""The order of tests, which must be the same in every worker."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, KeysView, Sequence, Set

import pytest


def unordered(marks: Iterable[pytest.Mark]) -> str | None:
    """The names of the first `parametrize` mark whose values are a set; None if all have an order. Dicts have one."""
    for mark in marks:
        names, values, *_ = (*mark.args, mark.kwargs.get("argvalues"), None)
        if isinstance(values, Set) and not isinstance(values, KeysView | ItemsView):
            return str(names)
    return None


def own_order(files: Sequence[str], worker: int, workers: int) -> list[str]:
    """The files, beginning where this worker's share of them does."""
    first = worker * len(files) // workers
    return [*files[first:], *files[:first]]
