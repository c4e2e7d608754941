"""Lru: bounded by number and by weight; what is used stays."""

from __future__ import annotations

import pytest

from headstart.lru import Lru


def held(memory: Lru[str, int]) -> list[str]:
    return [key for key, _ in memory.items()]


def test_the_least_recently_used_value_goes_first() -> None:
    memory: Lru[str, int] = Lru(2)
    memory.put("a", 1)
    memory.put("b", 2)
    assert memory.get("a") == 1
    memory.put("c", 3)
    assert held(memory) == ["a", "c"] == memory.keys()
    assert memory.get("b") is None


def test_values_have_a_weight_in_all() -> None:
    memory: Lru[str, int] = Lru(9, 10, lambda value: value)
    for key, weight in (("a", 4), ("b", 4), ("c", 5)):
        memory.put(key, weight)
    assert held(memory) == ["b", "c"]
    assert memory.used == 9
    memory.put("b", 1)
    assert memory.used == 6
    memory.drop("c")
    memory.drop("nothing")
    assert memory.used == 1
    memory.clear()
    assert (memory.used, len(memory)) == (0, 0)


def test_a_value_above_the_weight_evicts_no_others() -> None:
    memory: Lru[str, int] = Lru(9, 10, lambda value: value)
    memory.put("a", 4)
    memory.put("b", 11)
    assert memory.items() == [("a", 4)]


@pytest.mark.parametrize("times", [1, 3])
def test_a_value_is_made_once(times: int) -> None:
    memory, made = Lru[str, int](1), list[int]()
    for _ in range(times):
        assert memory.first("a", lambda: made.append(1) or 7) == 7  # type: ignore[func-returns-value]
    assert made == [1]


def test_what_is_looked_through_is_not_used() -> None:
    memory: Lru[str, int] = Lru(2)
    memory.put("a", 1)
    memory.put("b", 2)
    assert memory.items() == [("a", 1), ("b", 2)]
    memory.forget(lambda key, value: value == 2)
    memory.put("c", 3)
    memory.put("d", 4)
    assert held(memory) == ["c", "d"]


def test_it_is_empty_before_all_is_freed() -> None:
    memory: Lru[int, int] = Lru(5000, 5000)
    for number in range(5000):
        memory.put(number, number)
    pieces = memory.clearing()
    next(pieces)
    assert (memory.used, len(memory), 1 in memory) == (0, 0, False)
    memory.put(7, 7)
    assert len(list(pieces)) == 5000 // 1024
    assert memory.items() == [(7, 7)]
