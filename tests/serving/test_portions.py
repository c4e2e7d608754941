"""Long work is done in pieces: each step does little, several works take turns, and each has its result or its error."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from headstart.serving import portions
from headstart.serving.portions import MOST, LongWork, Portions, paced


def counting(pieces: int, done: list[int]) -> LongWork[int]:
    for number in range(pieces):
        done.append(number)
        yield
    return pieces


class Ticks:
    """A clock that goes on with each look."""

    def __init__(self, seconds: float) -> None:
        self._now, self._seconds = 0.0, seconds

    def __call__(self) -> float:
        self._now += self._seconds
        return self._now


def test_a_step_ends_with_its_time() -> None:
    work, done = Portions(Ticks(portions.BUDGET / 4)), list[int]()
    result = work.add(counting(100, done))
    assert work.step()
    assert done == [0, 1, 2, 3]
    assert not result.done()


def test_a_step_has_so_many_pieces_at_most() -> None:
    work, done = Portions(Ticks(0.0)), list[int]()
    result = work.add(counting(MOST + 1, done))
    assert work.step()
    assert len(done) == MOST
    assert not work.step()
    assert result.result(0) == MOST + 1


def test_works_take_turns() -> None:
    work, one, two = Portions(Ticks(0.0)), list[int](), list[int]()
    results = work.add(counting(5, one)), work.add(counting(MOST, two))
    work.step()
    assert (len(one), len(two)) == (5, MOST - 6)
    assert [result.done() for result in results] == [True, False]
    work.finish()
    assert [result.result(0) for result in results] == [5, MOST]
    assert not work.pending


def test_an_error_ends_one_work_only() -> None:
    def fails() -> LongWork[None]:
        yield
        raise ValueError("a reason")

    work, done = Portions(Ticks(0.0)), list[int]()
    results = work.add(fails()), work.add(counting(3, done))
    while work.step():
        pass
    with pytest.raises(ValueError, match="a reason"):
        results[0].result(0)
    assert results[1].result(0) == 3


def test_what_is_paced_is_the_same_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()
    monkeypatch.setattr(time, "monotonic", Ticks(portions.BUDGET / 4))
    monkeypatch.setattr(time, "sleep", pauses.append)

    def numbers() -> Iterator[int]:
        yield from range(20)

    assert [*paced(numbers())] == [*range(20)]
    assert pauses == [portions.BREAK] * 5
