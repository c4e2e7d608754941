"""Spawn: starts the processes of models, by a fork server where the system has one, and says how they ended."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

FORK = b"+"
"""What asks the fork server for a process."""
FORKS = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Whether processes are forked. Other systems have libraries that a fork breaks."""
UNKNOWN = 0x1000
"""The exit code of a process of which nobody could learn it."""
GONE = 0.05
"""Seconds between two looks at such a process."""


class StartedProcess(Protocol):
    """A process that was started here."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """Ends it at once. Idempotent."""

    async def wait(self) -> int:
        """Its exit code, negative for a signal, when it has ended; `UNKNOWN` if that cannot be known."""


class Spawner(Protocol):
    """Starts processes of models."""

    async def start(self) -> tuple[StartedProcess, socket.socket]:
        """A process that waits for its set-up, and the socket to it. Raises OSError."""

    async def close(self) -> None:
        """Ends what only helps to start. The processes have ended by then."""


def spawner(variables: Mapping[str, str] = MappingProxyType({})) -> Spawner:
    """The way to start processes on this system. `variables`: of their environment, beside those of this process."""
    return Forker(variables) if FORKS else Popener(variables)


class Popener:
    """Starts each process by itself: its imports take about a second."""

    def __init__(self, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._variables = variables

    async def start(self) -> tuple[StartedProcess, socket.socket]:
        process, front = await asyncio.to_thread(_popen, "headstart.models.child", self._variables)
        return PopenedProcess(process), front

    async def close(self) -> None:
        pass


class PopenedProcess:
    """A process that is a child of this one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        with suppress(OSError):
            self._process.kill()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)


class ForkedProcess:
    """A process that the fork server has started. `ended`: its exit code."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self._ended = ended
        self._gone = False

    def kill(self) -> None:
        unknown = not self._ended.done() or self._ended.result() == UNKNOWN
        if unknown and not self._gone:  # else the number may be another process's
            with suppress(OSError):
                os.kill(self.pid, 9)

    async def wait(self) -> int:
        code = await asyncio.shield(self._ended)
        while code == UNKNOWN and _is_there(self.pid):
            await asyncio.sleep(GONE)
        self._gone = True
        return code


class Forker:
    """Has a fork server. If it ends, the next start begins another one."""

    def __init__(self, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._variables = variables
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._begun: deque[asyncio.Future[ForkedProcess]] = deque()
        self._running: dict[int, asyncio.Future[int]] = {}
        self._rest = b""
        self._starting = asyncio.Lock()

    async def start(self) -> tuple[StartedProcess, socket.socket]:
        async with self._starting:
            if self._control is None:
                await self._open()
        loop = asyncio.get_running_loop()
        assert self._control is not None
        near, far = socket.socketpair()
        try:
            begun: asyncio.Future[ForkedProcess] = loop.create_future()
            socket.send_fds(self._control, [FORK], [far.fileno()])
            self._begun.append(begun)
            return await begun, near
        except BaseException:
            near.close()
            raise
        finally:
            far.close()

    async def close(self) -> None:
        self._lose()
        if self._server is not None:
            self._server.kill()
            await asyncio.to_thread(self._server.wait)

    async def _open(self) -> None:
        self._server, control = await asyncio.to_thread(_popen, "headstart.models.fork_server", self._variables)
        control.setblocking(False)
        self._control, self._rest = control, b""
        asyncio.get_running_loop().add_reader(control.fileno(), self._read)

    def _read(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for said in map(json.loads, lines):
            pid = said["pid"]
            if "code" in said:
                self._running.pop(pid).set_result(said["code"])
                continue
            ended = self._running[pid] = asyncio.get_running_loop().create_future()
            process, begun = ForkedProcess(pid, ended), self._begun.popleft()
            if not begun.done():
                begun.set_result(process)
            else:  # nobody waits for it any more
                process.kill()
        if not data:
            self._lose()

    def _lose(self) -> None:
        """The fork server has ended, or has to."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        for begun in self._begun:
            if not begun.done():
                begun.set_exception(OSError(None, "the process that starts others has ended"))
        self._begun.clear()
        for ended in self._running.values():
            ended.set_result(UNKNOWN)
        self._running.clear()


def _popen(module: str, variables: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    near, far = socket.socketpair()
    try:
        # A session of its own: the terminal's signals are for the front, which ends its processes itself.
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(far.fileno())],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        )
    except BaseException:
        near.close()
        raise
    finally:
        far.close()
    return process, near


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
