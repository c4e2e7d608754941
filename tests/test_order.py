"""The order of tests, which must be the same in every worker."""

from __future__ import annotations

from typing import Any

import pytest

from order import own_order, unordered

TABLE = {"a": 1, "b": 2}


@pytest.mark.parametrize("values", [{"a", "b"}, frozenset("ab"), TABLE.keys() - {"a"}], ids=["set", "frozenset", "difference"])
def test_values_in_a_set_are_found(values: Any) -> None:
    mark = pytest.mark.parametrize
    assert unordered([mark("word", ["a"]).mark, mark("other", values).mark]) == "other"
    assert unordered([mark("other", argvalues=values).mark]) == "other"


@pytest.mark.parametrize("values", [["a", "b"], TABLE, TABLE.keys(), TABLE.items()], ids=["list", "dict", "keys", "items"])
def test_values_in_order_are_not(values: Any) -> None:
    assert unordered([pytest.mark.parametrize("word", values).mark]) is None


def test_each_worker_begins_with_another_share() -> None:
    assert [own_order("abcdef", worker, 3) for worker in range(3)] == [[*"abcdef"], [*"cdefab"], [*"efabcd"]]
