"""Process: the process of a model, seen from the front. It starts it, asks it for connections, and hears how it is."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headstart.api.openai_responses.handover import Handover
from headstart.errors import HeadstartError
from headstart.models import channel
from headstart.models.channel import ProcessSetup, ReadyReport
from headstart.models.spawn import UNKNOWN, Spawner, StartedProcess
from headstart.models.upstream import UpstreamConnection

GRACE = 5.0
"""Seconds beyond its stopping time after which a process is killed."""
IDLE = 32
"""Most connections to one process that wait for the next request."""


class LoadFailed(HeadstartError):
    """The process could not load its model. The message says why."""


class ModelProcess:
    """A process that has its imports done and waits for a set-up; then the process of that model.

    Attributes:
        progress: of the load, from 0 to 1.
        cause: why it has ended; "" if it was asked to, or has not ended.
        handed: what it has handed over when it was unloaded.
    """

    def __init__(self, process: StartedProcess, front: socket.socket) -> None:
        self.progress = 0.0
        self.cause = ""
        self._process = process
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ReadyReport] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._stopping = False
        self._idle: list[UpstreamConnection] = []
        self._said = channel.Sayings()
        self._noticed: Callable[[], None] = lambda: None
        front.setblocking(False)
        self._loop.add_reader(front.fileno(), self._read)

    @classmethod
    async def start(cls, spawner: Spawner) -> ModelProcess:
        """Starts a process. Raises OSError."""
        return cls(*await spawner.start())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def handed(self) -> Handover:
        return self._said.handed

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Calls a function when the process has ended."""
        self._noticed = call
        if self.ended:
            self._loop.call_soon(call)

    async def load(self, setup: ProcessSetup) -> ReadyReport:
        """Loads a model. Called once.

        Raises:
            LoadFailed: it cannot be loaded, or the process has ended.
        """
        copy = self._front.dup()  # the event loop may close the other one meanwhile
        try:
            await asyncio.to_thread(_send, copy, setup)
        except OSError as error:
            raise LoadFailed(self.cause or "its process ended") from error
        finally:
            copy.close()
        return await asyncio.shield(self._ready)

    async def connection(self) -> UpstreamConnection:
        """A connection for one request. Raises OSError if the process has ended."""
        while self._idle:
            if (found := self._idle.pop()).open:
                return found
        near, far = socket.socketpair()
        try:
            near.setblocking(False)
            while True:
                try:
                    socket.send_fds(self._front, [channel.CONNECTION], [far.fileno()])
                    break
                except BlockingIOError:  # it is busy taking others
                    await asyncio.sleep(0.001)
            _, protocol = await self._loop.create_unix_connection(UpstreamConnection, sock=near)
        except BaseException:
            near.close()
            raise
        finally:
            far.close()
        return protocol

    def put_back(self, connection: UpstreamConnection) -> None:
        """Takes a connection back. It is closed if it cannot be used again."""
        if connection.free and connection.open and len(self._idle) < IDLE and not self._stopping:
            self._idle.append(connection)
        else:
            connection.close()

    async def stop(self, seconds: float, *, hand_over: bool = False) -> None:
        """Ends the process: running requests go on for a while, what it has computed is settled and saved. At most
        `seconds`, and a little more; then it is killed. Returns when it has ended.

        Args:
            hand_over: whether it hands over what a later process of this model needs (`handed`).
        """
        self._stopping = True
        with suppress(OSError):
            self._front.send(b"%s %f\n" % (channel.UNLOAD if hand_over else channel.STOP, seconds))
        try:
            async with asyncio.timeout(seconds + GRACE):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        self._process.kill()

    # ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        try:
            data = self._front.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for said in self._said.take(data):
            self._hear(said)
        if not data:
            self._loop.remove_reader(self._front.fileno())
            self._front.close()
            asyncio.ensure_future(self._wait())  # noqa: RUF006  (it ends with the process)

    def _hear(self, said: dict[str, Any]) -> None:
        self.progress = said.get("progress", self.progress)
        if "ready" in said and not self._ready.done():
            self.progress = 1.0
            self._ready.set_result(ReadyReport.of_json(said["ready"]))
        if "failed" in said:
            self.cause = str(said["failed"])

    async def _wait(self) -> None:
        code = await self._process.wait()
        if not self._stopping:
            self.cause = self.cause or _why(code)
        if not self._ready.done():
            self._ready.set_exception(LoadFailed(self.cause or "it was stopped"))
            self._ready.exception()  # so that asyncio does not report it if nobody waits
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._ended.set()
        self._noticed()


def _send(to: socket.socket, setup: ProcessSetup) -> None:
    to.setblocking(True)
    channel.send_setup(to, setup)
    to.setblocking(False)


def _why(code: int) -> str:
    """Why a process ended that was not asked to."""
    if code == UNKNOWN:
        return "its process ended"
    if code >= 0:
        return f"its process ended with code {code}"
    try:
        return f"its process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was ended by signal {-code}"
