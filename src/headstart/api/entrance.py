"""Entrance: where a server listens, who may enter, and how it runs in uvicorn until it is stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from fastapi import FastAPI

from headstart.api.auth import Keys
from headstart.api.pulls import Pullers
from headstart.api.server import Server, uvicorn_config
from headstart.api.sockets import OWNER_ONLY, Port, UnixSocket
from headstart.api.tls import tls
from headstart.chat.normalize import check_rules
from headstart.chat.tenancy import policy_of
from headstart.observe import logs, tracebacks


@dataclass(frozen=True, slots=True)
class Network:
    """How a server is reached.

    Attributes:
        host, port: to listen on.
        api_keys: requests need one of these, or one of `key_file`.
        unix_socket: path of a socket to listen on, in place of host and port. Its file gets `unix_socket_mode`.
        tls_cert: certificate in PEM, with `tls_key`; None for plain HTTP.
        key_file: more keys, one a line.
        isolate: name of a policy in `tenancy.POLICIES`; None to choose by the number of keys.
        allow_host: names of the server in requests, beside `host`, `localhost` and its addresses.
        cors: origins of web pages that may send requests.
        keep_noise: names of rules in `normalize.RULES` to leave out.
        pullers: who may fetch models over HTTP.
        log_format: of the log.
        notices: warnings at the beginning of the log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = field(default=(), repr=False)
    unix_socket: Path | None = None
    unix_socket_mode: int = OWNER_ONLY
    tls_cert: Path | None = None
    tls_key: Path | None = None
    key_file: Path | None = None
    isolate: str | None = None
    allow_host: Sequence[str] = ()
    cors: Sequence[str] = ()
    keep_noise: Sequence[str] = ()
    pullers: Pullers = "local"
    log_format: logs.LogFormat = "console"
    notices: Sequence[str] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the server in requests."""
        return (*([self.host] if self.unix_socket is None else ()), *self.allow_host)


BACKLOG = 2048
"""Connections that may wait to be accepted: uvicorn's own number."""


class Entrance:
    """A socket that is bound, and the keys that open the server. It also sets up the log of this process.

    Attributes:
        keys: the keys.
        address: scheme and authority, as in a URL.

    Raises:
        ConfigError: host, port, socket, certificate, keys or rules cannot be used.
    """

    def __init__(self, network: Network) -> None:
        logs.configure(network.log_format)
        tracebacks.install()
        log = structlog.get_logger("headstart")
        for notice in network.notices:
            log.warning(notice)
        self.keys = Keys(network.api_keys, network.key_file)
        policy_of(network.isolate, several=self.keys.several)
        check_rules(network.keep_noise)
        self._transport = tls(network.tls_cert, network.tls_key)
        self._unix = network.unix_socket is not None
        if network.unix_socket is None:
            self._bound = Port(network.host, network.port)
        else:
            self._bound = UnixSocket(network.unix_socket, network.unix_socket_mode)
        self.address = f"{self._transport.scheme}://{self._bound.authority}"
        if self.keys.closed:
            return
        if not self._bound.is_local:
            what = "open to the network without a key: everyone who reaches it can use it; give --api-key"
            log.warning(what, at=self._bound.authority)
        if "*" in network.cors:
            log.warning("open to every web page in a browser here: give --api-key, or name the pages' origins in --cors")
        if "*" in network.allow_host:
            log.warning("open to every web page that rebinds its name: give --api-key, or name the hosts in --allow-host")

    def announce(self, *, page: bool) -> None:
        """Logs where the server listens. Whoever connects after that is at least in the queue."""
        self._bound.socket.listen(BACKLOG)
        where = {"page": f"{self.address}/"} if page else {}
        where |= {"health": f"{self.address}/health", **self._bound.hints(self._transport.scheme)}
        structlog.get_logger("headstart").info("listening", url=f"{self.address}/v1", **where)

    def close(self) -> None:
        """Idempotent."""
        self._bound.close()

    def server(self, app: FastAPI, seconds: float) -> Server:
        """A server for an app. `seconds`: how long stopping may take."""
        # The socket's mode decides who may connect. A proxy there has no address that could be trusted.
        config = uvicorn_config(app, keep_alive=65, forwarded="*" if self._unix else None)
        config.ssl = self._transport.context()
        return Server(config, app.state.service, seconds, self._leave)

    def run(self, server: Server) -> None:
        """Runs it until it is stopped. Afterwards the socket is closed."""
        try:
            server.run(sockets=[self._bound.socket])
        finally:
            self.close()

    def _leave(self, code: int) -> None:
        """Ends the process. It does not wait for threads: the files on disk are complete at any moment."""
        self.close()
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a progress bar may have hidden the cursor
        sys.stderr.flush()
        os._exit(code)
