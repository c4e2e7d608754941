"""Connection: between one HTTP caller and the engine thread.

engine thread ──sink──▶ deque ──(one wake-up for all waiting events)──▶ event loop ──▶ caller
caller disconnects ──▶ all requests of the call are cancelled at once
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

from headstart.api.drain import Drain
from headstart.api.incoming import disconnected
from headstart.errors import HeadstartError, Overloaded
from headstart.observe.logs import Figures
from headstart.observe.metrics import Metrics
from headstart.observe.report import Summary, summarise
from headstart.serving.request import Delta, Event, Failed, Finished, Report, Request, Started
from headstart.serving.runtime import Handle, Runtime

CallResult = TypeVar("CallResult")


class Disconnected(Exception):
    """The caller closed the connection."""


class EngineCall:
    """The requests of one HTTP call, one for each prompt. Exit cancels those that are not done.

    Args:
        receive: from ASGI. The body has been read, so the next message is the disconnect.
        beat: seconds of silence after which `take` returns an empty list.
        arrived: when the call arrived, by `time.monotonic`.
        drain: keeps the call until it is over.

    Attributes:
        done: whether all requests have ended.
        failure: the error that ended the call, or None.
        stopped: whether the call failed because the server stops.
        reasons: how each finished choice ended.
    """

    def __init__(
        self,
        runtime: Runtime,
        receive: Receive,
        *,
        beat: float,
        metrics: Metrics,
        arrived: float,
        drain: Drain,
    ) -> None:
        self.done = False
        self.stopped = False
        self.failure: HeadstartError | None = None
        self.reasons: list[str] = []
        self.arrived = arrived
        self._runtime = runtime
        self._requests: Sequence[Request] = ()
        self._receive = receive
        self._beat = beat
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._slots = runtime.engine.shape.slots
        self._next = 0
        self._open: dict[int, Handle] = {}
        self._handles: list[Handle] = []
        self._reports: list[dict[int, Report]] = []
        self._ended: dict[int, int] = {}
        self._last_delta: dict[tuple[int, int], float] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self._events: deque[tuple[int, Event]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False
        self._quiet = True
        self._gone = False
        self._ending: HeadstartError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._drain = drain
        drain.calls.add(self)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submits the requests. Called once, from any thread, before `take`, so the engine need not wait for the event loop.

        Raises what `Runtime.submit` raises.
        """
        self._requests = requests
        self._reports = [{} for _ in requests]
        try:
            self._advance()
        except BaseException:
            self._cancel()  # the requests before the refused one
            raise
        if self._closed:
            self._cancel()

    def abandon(self) -> None:
        """Cancels all requests, also those that are submitted later: nobody reads the answer."""
        self._gone = True
        self._leave()

    @property
    def running(self) -> bool:
        """Whether the engine has begun one of its requests."""
        return any(handle.begun for handle in list(self._handles))

    def end(self, error: HeadstartError) -> None:
        """Cancels all requests, also those that are submitted later. `take` still returns the events before; then `error` is
        the call's failure, unless the call is complete."""
        self._ending = self._ending or error
        self._cancel()
        self._wake()

    async def unless_ended(self, work: Awaitable[CallResult]) -> CallResult:
        """The result of `work`. Raises the error of `end` at once; the work then continues in the background."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(_forget)
        while not task.done():
            if self._ending is not None:
                raise self._ending
            self._waiter = self._loop.create_future()
            task.add_done_callback(lambda _: self._wake())
            try:
                await self._waiter
            finally:
                self._waiter = None
        return task.result()

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch())
        self._timer = self._loop.call_later(self._beat, self._tick)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        self._leave()

    async def take(self) -> list[tuple[int, Event]]:
        """The new events, as (number of the prompt, event); empty after a beat of silence.

        Raises:
            Disconnected: the caller closed the connection; all requests are cancelled.
            Overloaded: the queue was full for a later prompt of the call.
        """
        if not self._events and not self._closed:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._gone:
            raise Disconnected
        batch = [self._events.popleft() for _ in range(len(self._events))]
        if batch:
            self._quiet = False
            self._follow(batch)
        if self._ending is not None and not self.done:
            self.done = True
            if len(self.reasons) < sum(request.params.choices for request in self._requests) or not self._requests:
                self.failure, self.stopped = self._ending, True
        return batch

    def summary(self) -> Summary:
        """The summary of a finished call."""
        return summarise([list(reports.values()) for reports in self._reports])

    def so_far(self) -> Figures:
        """The figures of an unfinished call."""
        reports = [report for choices in self._reports for report in choices.values()][:1]
        return Figures(
            prompt=sum(len(request.prompt) for request in self._requests),
            cached=reports[0].cached if reports else None,
            computed=reports[0].computed if reports else None,
            completion=sum(self._tokens.values()),
            seconds=self.seconds,
        )

    def summary_of(self, prompt: int, choice: int) -> Summary:
        """The summary of one finished choice."""
        return summarise([[self._reports[prompt][choice]]])

    @property
    def seconds(self) -> float:
        """Seconds since the call arrived."""
        return time.monotonic() - self.arrived

    # ── on the caller's thread, then on the event loop ───────────────────────────────────────────────────────────────

    def _advance(self) -> None:
        """Submits as many prompts as can run at the same time; each of the others follows when one has ended."""
        while not self._closed and self._next < len(self._requests) and len(self._open) < self._slots:
            number = self._next
            try:
                handle = self._runtime.submit(self._requests[number], partial(self._put, number))
            except Overloaded:
                if self._open:
                    return
                raise
            self._open[number] = handle
            self._handles.append(handle)
            self._next += 1
        over = not self._open  # read before `_ending`: `end` sets `_ending` first and then empties `_open`
        if self._ending is None:
            self.done = over

    @property
    def _closed(self) -> bool:
        return self._gone or self._ending is not None

    def _leave(self) -> None:
        self._drain.calls.discard(self)
        self._cancel()

    def _cancel(self) -> None:
        with suppress(KeyError):  # another thread may add or remove entries meanwhile
            while True:
                self._open.popitem()[1].cancel()

    # ── on the event loop ────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self, batch: Sequence[tuple[int, Event]]) -> None:
        now = 0.0
        for number, event in batch:
            if type(event) is Delta:
                now = now or time.monotonic()
                key = (number, event.choice)
                before = self._last_delta.get(key)
                if before is not None:
                    self._metrics.gap(now - before)
                self._last_delta[key] = now
                self._tokens[key] = event.tokens
            elif isinstance(event, Started):
                self._reports[number][event.choice] = event.report
            elif isinstance(event, Finished):
                self._reports[number][event.choice] = event.report
                self.reasons.append(event.reason)
                self._tokens[number, event.choice] = event.report.completion
                self._ended[number] = self._ended.get(number, 0) + 1
                if self._ended[number] == self._requests[number].params.choices:
                    self._open.pop(number, None)
                    if self.failure is None and self._ending is None:
                        self._advance()
            elif isinstance(event, Failed):
                self.failure = self.failure or event.error
                self._open.pop(number, None)
                self.done = True

    async def _watch(self) -> None:
        await disconnected(self._receive)
        self.abandon()
        self._wake()

    def _tick(self) -> None:
        if self._quiet:
            self._wake()
        self._quiet = True
        self._timer = self._loop.call_later(self._beat, self._tick)

    def _wake(self) -> None:
        self._woken = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ── on the engine thread ─────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, number: int, event: Event) -> None:
        self._events.append((number, event))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed
                return


def _forget(task: asyncio.Future[Any]) -> None:
    """Retrieves the task's exception, so that asyncio does not report it if nobody waits for the task."""
    if not task.cancelled():
        task.exception()
