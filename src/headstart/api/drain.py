"""Drain: what a server that stops still has to answer.

begin ──▶ what waits is ended, new requests are refused, what runs goes on ──▶ end ──▶ what runs is ended
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
"""Seconds after which a client may try again: by then there is another server, or none."""


class Ending(Protocol):
    """A call that can be ended. `running`: the engine is at it."""

    @property
    def running(self) -> bool: ...

    def end(self, error: Unavailable) -> None: ...


class Drain:
    """For the event loop only, but for `begun` and `left`.

    Attributes:
        begun: the server stops.
        open: requests that came before that and are not answered yet.
        calls: those of them that the engine has or gets.
        finished, ended, refused: requests, since it began, by how they ended.
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
        """Calls that the engine is at."""
        return sum(call.running for call in self.calls)

    @property
    def left(self) -> float | None:
        """Seconds that are left for all that has to be done; None as long as nobody says."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def check(self) -> None:
        """Raises Unavailable if the server stops."""
        if self.begun:
            raise refusal()

    def begin(self, seconds: float) -> None:
        """Ends what the engine is not at. `seconds`: for all, the disk included."""
        self.begun = True
        self._ends = time.monotonic() + seconds
        for limit in self._bodies:
            limit.reschedule(0.0)
        for call in [call for call in self.calls if not call.running]:
            call.end(refusal())

    def end(self) -> None:
        """Ends what still runs."""
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
        """While a request's body comes in, for which a server that stops does not wait. Raises Unavailable."""
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
    """What is told to whoever is not served any more."""
    return Unavailable(f"{STOPPING}; try again in {RETRY_AFTER:.0f} s.", retry_after=RETRY_AFTER)
