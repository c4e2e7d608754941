"""Deletion turns: deletions of one owner are carried out one after the other.

If two of a chain ran side by side, the second would find nothing and say so, while the disk or the shared store still has it.
Deletions of different owners run side by side, so a slow one delays no other owner. A deletion whose owner is not known waits
for all earlier ones, and all later ones wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from headstart.errors import Unavailable
from headstart.futures import pass_on
from headstart.serving.portions import LongWork
from headstart.serving.scheduler import Scheduler

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class DeletionTurn:
    """The turn of one deletion. `owner`: whose entries it deletes, since it was asked for; None if that is not known."""

    owner: bytes | None = None

    def waits_for(self, other: DeletionTurn) -> bool:
        """Whether both may delete the same."""
        return self.owner is None or other.owner in (None, self.owner)


class DeletionTurns:
    """For the engine thread, except for `begin`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._under_way: list[DeletionTurn] = []
        self._waiting: list[tuple[DeletionTurn, Callable[[], None], Callable[[], None]]] = []  # with what begins or refuses it

    def begin(self, turn: DeletionTurn, owner: Callable[[], bytes | None], deletion: LongWork[T]) -> Future[T]:
        """Carries out a deletion as soon as the earlier ones of its owner are `over`, also if nobody waits for its result.

        The result is Unavailable if the server stops before.

        Args:
            owner: whose entries it deletes; called on the engine thread.
        """
        result: Future[T] = Future()

        def begin() -> None:
            self._scheduler.carry_out(deletion).add_done_callback(lambda done: pass_on(done, result))

        def refuse() -> None:
            result.set_exception(Unavailable("The server is stopping."))

        def enter() -> None:
            turn.owner = owner()
            self._waiting.append((turn, begin, refuse))
            self._advance()

        self._scheduler.call(enter)
        return result

    def over(self, turn: DeletionTurn) -> None:
        """A deletion that has begun has ended everywhere, or has failed."""
        self._under_way = [one for one in self._under_way if one is not turn]
        self._advance()

    def _advance(self) -> None:
        """Begins what need not wait any longer."""
        asked, self._waiting = self._waiting, []
        if not self._scheduler.alive:
            for _, _, refuse in asked:
                refuse()
            return
        begins, before = list[Callable[[], None]](), list(self._under_way)
        for turn, begin, refuse in asked:
            if any(turn.waits_for(one) for one in before):
                self._waiting.append((turn, begin, refuse))
            else:
                self._under_way.append(turn)
                begins.append(begin)
            before.append(turn)
        for begin in begins:
            begin()
