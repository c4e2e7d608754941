"""Child: the process of one model, an ordinary server of it that only the front can reach.

`python -m headstart.models.child DESCRIPTOR` waits for its set-up on a socket, loads the model, and serves the connections that
the front passes to it. It ends when the front says so, and when the front itself has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any

import structlog
import uvicorn

from headstart.api.app import create_app
from headstart.api.garbage import Garbage
from headstart.api.openai_responses.handover import Handover
from headstart.api.server import OVERTIME, Server, uvicorn_config
from headstart.api.service import Service
from headstart.engines import registry
from headstart.errors import HeadstartError
from headstart.library.headstart import load
from headstart.models import channel
from headstart.models.channel import Commands, ProcessSetup, ReadyReport
from headstart.models.passed import PassedKeys
from headstart.observe import logs, redaction, tracebacks
from headstart.observe.prefill import PrefillLog
from headstart.serving.runtime import Runtime

LATE = 2.0
"""Seconds beyond the stopping time after which the process ends, whatever it still does."""
FILES = 64
"""Most connections that are taken at once."""
STEP = 0.02
"""Least progress between two reports of it."""


class ChildServer(Server):
    """A server whose connections come from the front.

    Args:
        front: the socket to the front.
    """

    unloading = False
    """Whether the model is unloaded to be loaded again, so that the front wants what a later process needs."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float, front: socket.socket) -> None:
        super().__init__(config, service, seconds, leave=os._exit)
        self._front = front
        self._commands = Commands()
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Future[Any]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._front.setblocking(False)
        asyncio.get_running_loop().add_reader(self._front.fileno(), self._read)

    def _read(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._front, 4096, FILES)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        for kind, given in self._commands.take(data, files):
            if kind == "connection":
                self._keep(asyncio.ensure_future(self._connect(socket.socket(fileno=given))))
            else:
                self.unloading = kind == "unload"
                self._stop(given)
        if not data:  # the front has ended
            asyncio.get_running_loop().remove_reader(self._front.fileno())
            self._stop(self._seconds)

    async def main_loop(self) -> None:
        """Returns when the server must stop: at once when the front says so, because a request waits for that."""
        await self.on_tick(0)
        while not self.should_exit:  # a signal sets it too
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._stopping.wait()

    async def _connect(self, client: socket.socket) -> None:
        client.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(self._protocol, client)

    async def _hang_up(self, sockets: list[socket.socket] | None, early: set[Any]) -> None:
        """Nothing: nobody else can connect, all calls are answered, and the front closes its ends when the process has ended.
        A request for another model waits for that."""

    def _stop(self, seconds: float) -> None:
        self._seconds = seconds
        self.should_exit = True
        self._stopping.set()
        # The rest of the server is bounded in time too. This is for an engine that hangs.
        asyncio.get_running_loop().call_later(seconds + OVERTIME + LATE, os._exit, 1)

    def _keep(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def serve(setup: ProcessSetup, front: socket.socket) -> None:
    """Serves a model until the front ends it."""
    logs.configure(setup.log_format, fields={"model": setup.names[0]})
    tracebacks.install()
    if setup.settings.shared is not None:
        from headstart.tiers.shared.address import secrets

        redaction.hide(secrets())
    reported = 0.0

    def report(share: float) -> None:
        nonlocal reported
        if share >= reported + STEP:
            reported = share
            say(front, progress=round(share, 3))

    def loaded() -> Runtime:
        runtime = load(setup.settings, report, several=True, together=setup.together, proofs=setup.proofs).runtime
        runtime.watch(PrefillLog())
        return runtime

    def ready() -> None:
        service.take_over(setup.handed)
        say(front, ready=_card(service).as_json)
        ending.callback(Garbage(service.idle).close)

    def failed(error: HeadstartError) -> None:
        say(front, failed=error.with_flags)
        server.should_exit = True

    def before_close() -> None:
        if not server.unloading:
            return
        try:
            handed.append(service.hand_over())
        except Exception as error:  # the model must be closed all the same
            structlog.get_logger("headstart.models").error("responses were not handed over", exc_info=error)

    app = create_app(
        loaded,
        api_keys=PassedKeys(setup.known),
        isolate=setup.isolate,
        keep_noise=setup.keep_noise,
        model_id=setup.names[0],
        aliases=setup.names,
        hosts=("*",),
        page=False,
        replica_tag=setup.tag,
        settle_at_end=True,
        on_ready=ready,
        on_failure=failed,
        before_close=before_close,
    )
    service: Service = app.state.service
    config = uvicorn_config(app, keep_alive=1 << 30, forwarded="*", dated=False)  # the front closes what it does not need
    server, ending = ChildServer(config, service, setup.settings.drain, front), ExitStack()
    handed: list[Handover] = []
    with ending:
        server.run()
    for one in handed:
        with suppress(OSError):  # the front has ended
            front.setblocking(True)
            front.sendall(channel.handover_lines(one))


def say(front: socket.socket, **said: Any) -> None:
    """Tells the front something. If it has ended, nobody needs to know."""
    try:
        front.sendall(channel.line(**said))
    except OSError:
        return


def _card(service: Service) -> ReadyReport:
    runtime = service.ready()
    engine, stored, served = runtime.engine, runtime.cache.memory.budget, service.models.find(None)
    if engine.host is None:
        return ReadyReport((served.size or 0) + stored, served, engine.proofs)
    live = engine.host.live(engine.shape.ctx, engine.shape.slots)
    return ReadyReport(engine.host.fixed + live + stored, served, engine.proofs)


def main(descriptor: int) -> None:
    # The front's terminal sends signals to this process too, but only the front decides when it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    front = socket.socket(fileno=descriptor)
    registry.preload()
    setup = channel.receive_setup(front)
    if setup is not None:
        serve(setup, front)
    # The model is freed, and all is saved. The end of the interpreter would take as long as that, and a request waits for it.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
