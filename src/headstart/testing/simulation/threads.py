"""Threads: stand-ins for `threading`, `queue`, `time` and futures. They wait in virtual time."""

from __future__ import annotations

import concurrent.futures
import queue
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from headstart.testing.simulation.kernel import world
from headstart.testing.simulation.tasks import Task, Waiters

T = TypeVar("T")
HANDOVER = 10e-6
"""Most virtual seconds that a hand-over to another thread takes. Others may run meanwhile."""
STARTED = 1000.0
"""What the monotonic clock says at the beginning."""


class SimulatedLock:
    def __init__(self) -> None:
        self._held: Task | None = None
        self._waiters: Waiters = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        here = world()
        here.alive()
        ends = None if timeout < 0 else here.now + timeout
        while self._held is not None:
            if not blocking or (ends is not None and here.now >= ends):
                return False
            here.park(self._waiters, None if ends is None else ends - here.now)
        self._held = here.task or _NOBODY
        return True

    def release(self) -> None:
        self._held = None  # a killed task may not hold it any more
        world().wake(self._waiters, 1)

    def locked(self) -> bool:
        return self._held is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedEvent:
    def __init__(self) -> None:
        self._set = False
        self._waiters: Waiters = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        world().wake(self._waiters)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        here = world()
        ends = None if timeout is None else here.now + timeout
        while not self._set and (ends is None or here.now < ends):
            here.park(self._waiters, None if ends is None else ends - here.now)
        return self._set


class Condition:
    def __init__(self) -> None:
        self._lock = SimulatedLock()
        self._waiters: Waiters = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def notify(self, n: int = 1) -> None:
        world().wake(self._waiters, n)

    def notify_all(self) -> None:
        world().wake(self._waiters)

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        here = world()
        ends = None if timeout is None else here.now + timeout
        while not (found := predicate()) and (ends is None or here.now < ends):
            self._lock.release()
            here.park(self._waiters, None if ends is None else ends - here.now)
            self._lock.acquire()
        return found


class Thread:
    """A thread is a task of the process that starts it."""

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool = False) -> None:
        self.name = name
        self._target = target
        self._task: Task | None = None

    def start(self) -> None:
        here = world()
        assert here.task is not None
        self._task = here.spawn(self._target, self.name, here.task.process)

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        world().join(self._task, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended


class Queue(Generic[T]):
    """`queue.Queue` and `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiters: Waiters = []

    def put(self, item: T) -> None:
        here = world()
        self._items.append(item)
        here.wake(self._waiters, 1)
        if here.task is not None:
            here.pause(HANDOVER)

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        here = world()
        ends = None if timeout is None else here.now + timeout
        while not self._items:
            if not block or (ends is not None and here.now >= ends):
                raise queue.Empty
            here.park(self._waiters, None if ends is None else ends - here.now)
        here.alive()
        return self._items.popleft()

    def get_nowait(self) -> T:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Future(concurrent.futures.Future[T]):
    def __init__(self) -> None:
        super().__init__()
        self._sleepers: Waiters = []
        self.add_done_callback(lambda _: world().wake(self._sleepers))

    def _wait(self, timeout: float | None) -> None:
        here = world()
        ends = None if timeout is None else here.now + timeout
        while not self.done():
            if ends is not None and here.now >= ends:
                raise TimeoutError
            here.park(self._sleepers, None if ends is None else ends - here.now)

    def result(self, timeout: float | None = None) -> T:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)


class Executor:
    """`ThreadPoolExecutor`. Its threads are tasks of the process that submits first."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._most = max_workers
        self._name = thread_name_prefix
        self._works: Queue[tuple[Future[Any], Callable[[], Any]] | None] = Queue()
        self._threads: list[Thread] = []
        self._idle = 0

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        done: Future[T] = Future()
        self._works.put((done, lambda: function(*arguments)))
        if not self._idle and len(self._threads) < self._most:
            self._threads.append(Thread(target=self._work, name=f"{self._name}_{len(self._threads)}"))
            self._threads[-1].start()
        return done

    def _work(self) -> None:
        while True:
            self._idle += 1
            work = self._works.get()
            self._idle -= 1
            if work is None:
                self._works.put(None)  # for the next one
                return
            done, call = work
            if not done.set_running_or_notify_cancel():
                continue
            try:
                found = call()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(found)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures and not self._works.empty():
            if (work := self._works.get_nowait()) is not None:
                work[0].cancel()
        self._works.put(None)
        for thread in self._threads if wait else ():
            thread.join()


class StandIn:
    """A module of which only these names are simulated. Any other name is an error: production must not escape."""

    def __init__(self, name: str, names: Mapping[str, Any]) -> None:
        self._name = name
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._name}.{name} is not simulated")


class _Nobody(Task):
    """Holds locks before the first task runs."""

    def __init__(self) -> None:
        pass


_NOBODY = _Nobody()

THREADING = StandIn("threading", {"Lock": SimulatedLock, "Event": SimulatedEvent, "Condition": Condition, "Thread": Thread})
QUEUE = StandIn("queue", {"Queue": Queue, "SimpleQueue": Queue, "Empty": queue.Empty})
RANDOM = StandIn("random", {"random": lambda: world().dice.random(), "Random": random.Random})
TIME = StandIn(
    "time",
    {
        "time": lambda: world().time(),
        "monotonic": lambda: STARTED + world().now,
        "perf_counter": lambda: STARTED + world().now,
        "sleep": lambda seconds: world().sleep(seconds),
    },
)
