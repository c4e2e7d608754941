"""Server: uvicorn with a graceful end. uvicorn cancels running requests; here every client gets an answer.

signal ──▶ refuse new requests, end waiting ones ──▶ let calls run ──▶ end them ──▶ save, free the model ──▶ stop listening
second signal ─────────────────────────────────────────────────────▶ end them ──▶ end the process
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from headstart.api.served import Served

REPLIES, REPLIES_ALONE = 0.8, 0.95
"""Share of the stopping time for running replies, with and without a lower tier. The rest is for writing and last answers."""
LAST_WORDS = 1.0
"""Seconds in which ended clients must read their last bytes."""
TAKEN_IN = 0.05
"""Seconds until accepted sockets are in the list of connections."""
FRESH = 1.0
"""Seconds in which a new connection must send its request."""
AT_ONCE = 0.5
"""Seconds that clients always get, even if no stopping time is left."""
LOOK = 0.02
"""Seconds between two looks whether it is over, or a second signal has come."""
OVERTIME = 1.0
"""Seconds beyond the stopping time after which the process ends without freeing the model."""
INTERRUPTED = 130
"""Exit code after a second signal."""

log = structlog.get_logger("headstart")


def uvicorn_config(app: FastAPI, *, keep_alive: int, forwarded: str | None, dated: bool = True) -> uvicorn.Config:
    """How uvicorn serves an app. headstart writes its own log.

    Args:
        keep_alive: seconds after which an idle connection is closed.
        forwarded: the addresses whose word about a client's address is taken, as uvicorn writes them; None for its default.
        dated: whether answers have a date.
    """
    config = uvicorn.Config(
        app,
        loop="auto",
        http="httptools",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=dated,
        timeout_keep_alive=keep_alive,
        forwarded_allow_ips=forwarded,
    )
    config.load()
    return config


class Server(uvicorn.Server):
    """One server process.

    Args:
        service: of the app that is served.
        seconds: how long stopping may take after one signal.
        leave: ends the process at once, with an exit code. None if the process must not end.
    """

    def __init__(
        self, config: uvicorn.Config, service: Served, seconds: float, leave: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(config)
        self._service = service
        self._seconds = seconds
        self._leave = leave
        self._signals = 0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Counts signals, and does not raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1  # a signal interrupts any code, so it only counts: `main_loop` and `shutdown` poll it
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        begun, drain, serving = time.monotonic(), self._service.drain, self._service.failure is None
        early = set(self._connections)  # those that are idle by now need not be waited for
        running = drain.running
        if serving:
            log.info("stopping", running=running, waiting=drain.open - running, seconds=self._seconds)
        drain.begin(self._seconds)
        await self._until(lambda: not drain.open, self._seconds * (REPLIES if self._service.saves else REPLIES_ALONE))
        drain.end()
        await self._until(lambda: not drain.open, self._at_most(LAST_WORDS), hurried=True)
        for connection in [one for one in self._connections if _is_busy(one)]:
            connection.transport.abort()  # the client does not read its answer
        loading = self._service.loading
        how = "stopped" if await self._close() else f"stopped {'while loading' if loading else 'before all was saved'}"
        await self._hang_up(sockets, early)
        if serving:
            figures = {"finished": drain.finished, "ended": drain.ended, "refused": drain.refused}
            log.info(how, **figures, seconds=round(time.monotonic() - begun, 3))
        if self._leave is not None and (self._hurried or how != "stopped"):
            self._leave(INTERRUPTED if self._hurried else 0)

    def _protocol(self) -> asyncio.Protocol:
        """A protocol for a new connection, as uvicorn makes it."""
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    @property
    def _connections(self) -> list[Any]:
        return list(self.server_state.connections)

    @property
    def _hurried(self) -> bool:
        return self._signals > 1

    def _at_most(self, seconds: float) -> float:
        """`seconds`, or the stopping time that is left if that is less, but at least `AT_ONCE`."""
        left = self._service.drain.left
        return seconds if left is None else min(seconds, max(left, AT_ONCE))

    async def _until(self, over: Callable[[], bool], seconds: float, *, hurried: bool = False) -> bool:
        """Waits until `over()`, and returns its last value. Only with `hurried` it also waits after a second signal."""
        ends = time.monotonic() + seconds
        while not over() and time.monotonic() < ends and (hurried or not self._hurried):
            await asyncio.sleep(LOOK)
        return over()

    async def _close(self) -> bool:
        """Frees the model. False if that takes too long, so that the process must end without it."""
        closing = asyncio.ensure_future(self.lifespan.shutdown())
        if self._leave is None:
            await closing
            return True
        ends = time.monotonic() + (0.0 if self._service.loading else (self._service.drain.left or 0.0) + OVERTIME)
        while not closing.done() and time.monotonic() < ends and not self._hurried:
            await asyncio.wait((closing,), timeout=LOOK)  # a server of several models waits for this end
        closed: bool = closing.done()
        return closed

    async def _hang_up(self, sockets: list[socket.socket] | None, early: set[Any]) -> None:
        """Stops listening. Clients that have connected but are not accepted yet get an answer too."""
        # When a socket is closed, the kernel resets the connections that wait to be accepted.
        waiting = [client for bound in sockets or [] for client in _queue(bound)]
        for server in self.servers:
            server.close()
        for bound in sockets or []:
            bound.close()
        for client in waiting:
            with suppress(OSError):  # it has disconnected, or its TLS handshake failed
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, client, ssl=self.config.ssl)
        await asyncio.sleep(TAKEN_IN)

        def asked() -> bool:
            return all(connection.cycle is not None or connection in early for connection in self._connections)

        await self._until(asked, self._at_most(FRESH), hurried=True)
        for connection in self._connections:
            connection.shutdown()
        await self._until(lambda: not self.server_state.connections, self._at_most(LAST_WORDS), hurried=True)


def _queue(bound: socket.socket) -> list[socket.socket]:
    """The clients that have connected to a socket and are not accepted yet."""
    bound.setblocking(False)
    found: list[socket.socket] = []
    with suppress(OSError):
        while True:
            found.append(bound.accept()[0])
            found[-1].setblocking(False)
    return found


def _is_busy(connection: Any) -> bool:
    return connection.cycle is not None and not connection.cycle.response_complete
