"""Tasks: what threads and processes are in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit


class Killed(GreenletExit):  # type: ignore[misc]
    """The process of this task is dead. Nothing that the task does from now on has an effect."""


class Stuck(Exception):
    """Nothing can happen any more, or it goes on for ever."""


class Process:
    """What dies together in a crash: tasks, and what they hold.

    Attributes:
        alive: whether it runs.
        exits: called once when it has died, after its tasks have ended.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.alive = True
        self.tasks: set[Task] = set()
        self.exits: list[Callable[[], None]] = []


class Task:
    """A thread of the simulation.

    Attributes:
        ticket: grows whenever it runs again. What was to wake it before is then void.
        woken: whether it was woken, and not only timed out.
    """

    __slots__ = ("ended", "greenlet", "name", "process", "ticket", "waiters", "woken")

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.ticket = 0
        self.woken = False
        self.ended = False
        self.waiters: list[tuple[Task, int]] = []
        self.greenlet: Any = None


Waiters = list[tuple[Task, int]]
