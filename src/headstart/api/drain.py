"""Drain: the requests that a stopping server still has to answer.

begin ──▶ waiting calls are ended, new requests are refused, running calls continue ──▶ end ──▶ running calls are ended
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from headstart.errors import Unavailable

STOPPING = "The server is stopping"
RETRY_AFTER = 5.0
"""Seconds after which a client may try again. By then another server runs, or none."""


class Ending(Protocol):
    """A call that can be ended. `running`: the engine has begun it."""

    @property
    def running(self) -> bool: ...

    def end(self, error: Unavailable) -> None: ...


class Drain:
    """The state of stopping. Only `begun` and `left` may be read outside the event loop.

    Attributes:
        begun: whether the server is stopping.
        open: unanswered requests that arrived before.
        calls: calls that were or will be submitted to the engine.
        finished, ended, refused: requests since the stop began, by how they ended.
    """

    def __init__(self) -> None:
        self.begun = False
        self.open = 0
        self.calls: set[Ending] = set()
        self.finished = self.ended = self.refused = 0
        self._bodies: set[asyncio.Timeout] = set()
        self._ends: float | None = None

    @property
    def running(self) -> int:
        """How many calls the engine has begun."""
        return sum(call.running for call in self.calls)

    @property
    def left(self) -> float | None:
        """Seconds left for stopping; None before it begins."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def check(self) -> None:
        """Raises Unavailable if the server is stopping."""
        if self.begun:
            raise refusal()

    def begin(self, seconds: float) -> None:
        """Ends the calls that the engine has not begun. `seconds`: for stopping, disk writes included."""
        self.begun = True
        self._ends = time.monotonic() + seconds
        for limit in self._bodies:
            limit.reschedule(0.0)
        for call in [call for call in self.calls if not call.running]:
            call.end(refusal())

    def end(self) -> None:
        """Ends all calls that still run."""
        for call in list(self.calls):
            call.end(Unavailable(f"{STOPPING}: this reply is not complete.", retry_after=RETRY_AFTER))

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from its first byte to the last of its answer."""
        late = self.begun
        self.open += not late
        try:
            yield
        finally:
            self.open -= not late

    @asynccontextmanager
    async def body(self) -> AsyncIterator[None]:
        """Around reading a request's body. A stopping server does not wait for it: raises Unavailable."""
        self.check()
        try:
            async with asyncio.timeout(None) as limit:
                self._bodies.add(limit)
                try:
                    yield
                finally:
                    self._bodies.discard(limit)
        except TimeoutError:
            self.check()
            raise


def refusal() -> Unavailable:
    """The error for requests that a stopping server refuses."""
    return Unavailable(f"{STOPPING}; try again in {RETRY_AFTER:.0f} s.", retry_after=RETRY_AFTER)
