"""Processes that are started by themselves, and by a fork server that may end at any time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from headstart.models.spawn import FORKS, UNKNOWN, ForkedProcess, Forker, Popener, Spawner, StartedProcess

pytestmark = pytest.mark.slow  # each starts a process with all imports


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


async def killed(process: StartedProcess) -> int:
    process.kill()
    return await asyncio.wait_for(process.wait(), 30)


@pytest.mark.parametrize("kind", [Popener, pytest.param(Forker, marks=pytest.mark.skipif(not FORKS, reason="Linux only"))])
def test_a_process_ends_with_its_socket_and_says_how(kind: type[Spawner]) -> None:
    async def test() -> None:
        spawner = kind()
        first, near = await spawner.start()
        second, other = await spawner.start()
        assert first.pid != second.pid
        near.close()  # before its set-up: it has nothing to do
        assert await asyncio.wait_for(first.wait(), 30) == 0
        assert await killed(second) == -signal.SIGKILL
        second.kill()
        other.close()
        await spawner.close()

    run(test)


@pytest.mark.skipif(not FORKS, reason="Linux only")
def test_a_process_that_hangs_is_killed_without_its_fork_server() -> None:
    """Fault: with its fork server gone, a model's process could not be killed, and the shutdown waited for it for ever."""

    async def test() -> None:
        forker = Forker()
        process, near = await forker.start()
        assert forker._server is not None
        os.kill(forker._server.pid, signal.SIGKILL)
        waiting = asyncio.ensure_future(process.wait())
        await asyncio.to_thread(forker._server.wait)
        os.kill(process.pid, signal.SIGSTOP)  # before, the server's end would have woken it
        await asyncio.sleep(0.2)
        assert not waiting.done()
        process.kill()
        assert await asyncio.wait_for(waiting, 30) == UNKNOWN
        near.close()
        await forker.close()

    run(test)


@pytest.mark.skipif(not FORKS, reason="Linux only")
def test_another_fork_server_takes_the_place_of_one_that_was_killed() -> None:
    async def test() -> None:
        forker = Forker()
        before, near = await forker.start()
        assert isinstance(before, ForkedProcess)
        assert forker._server is not None
        server = forker._server
        os.kill(server.pid, signal.SIGKILL)
        waiting = asyncio.ensure_future(before.wait())
        await asyncio.to_thread(server.wait)
        await asyncio.sleep(0.2)
        assert not waiting.done()  # the process goes on
        after, other = await forker.start()
        assert forker._server is not server
        near.close()
        assert await asyncio.wait_for(waiting, 30) == UNKNOWN
        other.close()
        assert await asyncio.wait_for(after.wait(), 30) == 0
        await forker.close()

    run(test)
