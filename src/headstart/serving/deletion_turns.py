"""Deletion turns: deletions of one owner are carried out one after the other.

If two of a chain ran side by side, the second would find nothing and say so, while the disk or the shared store still has it.
Deletions of different owners do run side by side: a slow one delays nobody else.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from headstart.serving.portions import LongWork
from headstart.serving.scheduler import Scheduler

T = TypeVar("T")


class DeletionTurns:
    """Thread-safe."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._under_way: list[tuple[bytes | None, Future[None]]] = []  # owners and ends; for the engine thread

    def begin(self, owner: bytes | None, deletion: LongWork[T], end: Future[None]) -> Future[T]:
        """Carries out a deletion as soon as the earlier ones of its owner are over, also if nobody waits for its result.

        Args:
            owner: None for the operator, who may delete anybody's chains.
            end: to be set by `over`.
        """
        result: Future[T] = Future()

        def enter() -> None:
            earlier = [one for whose, one in self._under_way if owner is None or whose in (None, owner)]
            self._under_way.append((owner, end))

            def go_on(_: object = None) -> None:
                if all(one.done() for one in earlier):
                    self._scheduler.carry_out(deletion).add_done_callback(lambda done: _pass_on(done, result))

            for one in earlier:
                one.add_done_callback(go_on)
            if not earlier:
                go_on()

        self._scheduler.call(enter)
        return result

    def over(self, end: Future[None]) -> None:
        """A deletion has ended everywhere, or has failed. On the engine thread."""
        self._under_way = [(owner, one) for owner, one in self._under_way if one is not end]
        end.set_result(None)


def _pass_on(done: Future[T], result: Future[T]) -> None:
    if (error := done.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())
