"""Kernel: a virtual clock, and tasks that share one thread. A seed decides which task runs next.

A task is what a thread is in production: it runs until it waits, in a greenlet. All waiting is virtual.
Tasks that become ready at nearly the same moment run in an order that the seed chooses, because each wait takes a little longer
or shorter.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

from greenlet import GreenletExit, getcurrent, greenlet

from headstart.testing.simulation.tasks import Killed, Process, Stuck, Task, Waiters

EPOCH = 1_800_000_000.0
"""The time of the wall clock at which a history begins, in seconds since 1970."""
HURRY = 20e-6
"""Most virtual seconds that a task which is woken waits until it runs."""
MOST_STEPS = 2_000_000
"""Switches of one history. If there are more, tasks wake each other for ever."""


class World:
    """One history's clock and tasks.

    Attributes:
        dice: decides everything that is left open.
        now: virtual seconds since the beginning.
        skew: seconds by which the wall clock was set forward.
        read: called when a program reads the wall clock next.
        task: the one that runs.
        errors: exceptions that ended a task, which must not happen.
        trace: gets a line about each call, for people.
        store: the shared store, if there is one.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        self.skew = 0.0
        self.read: Callable[[], None] | None = None
        self.task: Task | None = None
        self.errors: list[tuple[str, BaseException]] = []
        self.steps = 0
        self.trace: Callable[[str], None] | None = None
        self.store: object = None
        self._heap: list[tuple[float, int, Task, int, bool]] = []
        self._order = count()
        self._pids = count(100)
        self._dying: list[Process] = []
        self._hub = getcurrent()
        self._leave: Callable[[], object] = self._hub.switch
        self._random = self.dice.random

    @property
    def wall(self) -> float:
        """The wall clock, in seconds since 1970."""
        return EPOCH + self.now + self.skew

    def time(self) -> float:
        """The wall clock, for a program."""
        if self.read is not None:
            read, self.read = self.read, None
            read()
        return self.wall

    def say(self, what: str) -> None:
        """A line for `--trace`."""
        if self.trace is not None:
            task = "" if self.task is None else f"{self.task.process.name}/{self.task.name}"
            self.trace(f"{self.now:12.6f} {task:32} {what}")

    # ── processes and tasks ──────────────────────────────────────────────────────────────────────────────────────────

    def process(self, name: str) -> Process:
        return Process(name, next(self._pids))

    def spawn(self, call: Callable[[], object], name: str, process: Process) -> Task:
        """Starts a task. It runs when the present one waits."""
        task = Task(name, process)

        def run() -> None:
            try:
                call()
            except GreenletExit:
                pass
            except BaseException as error:
                self.errors.append((name, error))
            finally:
                task.ended = True
                process.tasks.discard(task)
                self.wake(task.waiters)

        task.greenlet = greenlet(run, self._hub)
        process.tasks.add(task)
        self._push(self.now + self._random() * HURRY, task, True)
        return task

    def kill(self, process: Process) -> None:
        """Kills a process. A task of its own must then call `alive`."""
        if process.alive:
            process.alive = False
            self._dying.append(process)

    def alive(self) -> None:
        """Raises Killed in a task of a dead process."""
        if self.task is not None and not self.task.process.alive:
            raise Killed

    def _end_processes(self) -> None:
        while self._dying:
            process = self._dying.pop()
            for task in sorted(process.tasks, key=lambda task: task.name):
                self.task = task
                while not task.greenlet.dead:  # some code catches everything once
                    task.greenlet.throw(Killed)
                task.ended = True  # one that had not run yet has not said so
                task.ticket += 1
            self.task = None
            for leave in process.exits:
                leave()

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _push(self, at: float, task: Task, woken: bool) -> None:
        heapq.heappush(self._heap, (at, next(self._order), task, task.ticket, woken))

    def sleep(self, seconds: float) -> None:
        """The present task waits for so many virtual seconds."""
        task, at = self.task, self.now + seconds
        assert task is not None
        if not task.process.alive:
            raise Killed
        if not self._dying and (not self._heap or self._heap[0][0] > at):
            self.now = at  # nothing else happens before
            self.steps += 1
            return
        self._push(at, task, False)
        self._switch(task)

    def pause(self, most: float) -> None:
        """Waits for at most so many seconds, as the seed says."""
        self.sleep(self._random() * most)

    def park(self, waiters: Waiters, timeout: float | None) -> bool:
        """Waits until somebody wakes these waiters. False after the timeout."""
        task = self.task
        assert task is not None
        if not task.process.alive:
            raise Killed
        waiters.append((task, task.ticket))
        if timeout is not None:
            self._push(self.now + max(0.0, timeout), task, False)
        self._switch(task)
        return task.woken

    def _switch(self, task: Task) -> None:
        self._leave()
        if not task.process.alive:
            raise Killed

    def wake(self, waiters: Waiters, most: int | None = None) -> None:
        """Wakes the first of these waiters, or all."""
        while waiters and most != 0:
            task, ticket = waiters.pop(0)
            if task.ticket == ticket and not task.ended:
                self._push(self.now + self._random() * HURRY, task, True)
                most = None if most is None else most - 1

    def join(self, task: Task, timeout: float | None = None) -> bool:
        """Waits for the end of a task. False after the timeout."""
        ends = None if timeout is None else self.now + timeout
        while not task.ended:
            if ends is not None and self.now >= ends:
                return False
            self.park(task.waiters, None if ends is None else ends - self.now)
        return True

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, until: Callable[[], bool], most: float) -> None:
        """Runs tasks until a condition holds. Raises Stuck if it does not within `most` virtual seconds."""
        ends, heap = self.now + most, self._heap
        while not until():
            if self._dying:
                self._end_processes()
                continue
            if not heap:
                raise Stuck("no task can run any more")
            at, _, task, ticket, woken = heapq.heappop(heap)
            if task.ticket != ticket or task.ended:
                continue
            if at > ends:
                raise Stuck(f"not over after {most:.0f} seconds")
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise Stuck("tasks wake each other for ever")
            if at > self.now:
                self.now = at
            task.ticket += 1
            task.woken = woken
            self.task = task
            task.greenlet.switch()
            self.task = None

    def stop(self) -> None:
        """Ends everything."""
        self._end_processes()


_worlds: list[World] = []


def world() -> World:
    """The world that runs."""
    return _worlds[-1]


def enter(entered: World) -> None:
    _worlds.append(entered)


def leave() -> None:
    _worlds.pop()
