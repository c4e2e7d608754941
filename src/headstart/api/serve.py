"""Serve: runs the app in uvicorn, from binding the port to a graceful end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog
import uvicorn

from headstart.api.app import create_app
from headstart.api.auth import Keys
from headstart.api.garbage import Garbage
from headstart.api.server import Server
from headstart.api.sockets import OWNER_ONLY, Port, UnixSocket
from headstart.api.tls import tls
from headstart.chat.normalize import check_rules
from headstart.chat.tenancy import policy_of
from headstart.config import Settings
from headstart.errors import ConfigError, HeadstartError
from headstart.model_names import model_names
from headstart.observe import logs, tracebacks
from headstart.serving.runtime import Runtime


def serve(
    settings: Settings,
    host: str,
    port: int,
    api_keys: Sequence[str] = (),
    log_format: logs.LogFormat = "console",
    *,
    notices: Sequence[str] = (),
    unix_socket: Path | None = None,
    unix_socket_mode: int = OWNER_ONLY,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    key_file: Path | None = None,
    isolate: str | None = None,
    alias: Sequence[str] = (),
    allow_host: Sequence[str] = (),
    cors: Sequence[str] = (),
    keep_noise: Sequence[str] = (),
    load: Callable[[Settings], Runtime],
) -> None:
    """Serves a model until SIGINT or SIGTERM, in a process of its own: see `server`.

    This function ends the process after a second signal, or if the model cannot be freed in time. A model that is still loading
    can never be freed.

    Args:
        notices: warnings at the beginning of the log.
        unix_socket: path of a socket to listen on, in place of host and port. Its file gets `unix_socket_mode`.
        tls_cert: certificate in PEM, with `tls_key`; None for plain HTTP.
        key_file: more keys, one a line.
        isolate: name of a policy in `tenancy.POLICIES`; None to choose by the number of keys.
        alias: names of the model. The first one is the served name. The names of the model file are also accepted.
        allow_host: names of the server in requests, beside `host`, `localhost` and its addresses.
        cors: origins of web pages that may send requests.
        keep_noise: names of rules in `normalize.RULES` to leave out.
        load: makes the runtime. It runs in a thread while `/health` reports that the model is loading.

    Raises:
        ConfigError: host, port, socket, certificate, keys or model cannot be used.
    """
    logs.configure(log_format)
    tracebacks.install()
    log = structlog.get_logger("headstart")
    for notice in notices:
        log.warning(notice)
    keys = Keys(api_keys, key_file)
    policy_of(isolate, several=keys.several)
    check_rules(keep_noise)
    secured = tls(tls_cert, tls_key)
    bound = Port(host, port) if unix_socket is None else UnixSocket(unix_socket, unix_socket_mode)
    if not keys.closed and not bound.is_local:
        log.warning("open to the network without a key: everyone who reaches it can use it; give --api-key", at=bound.authority)
    if "*" in cors and not keys.closed:
        log.warning("open to every web page in a browser here: give --api-key, or name the pages' origins in --cors")
    if "*" in allow_host and not keys.closed:
        log.warning("open to every web page that rebinds its name: give --api-key, or name the hosts in --allow-host")
    if not all(name.strip() for name in alias):
        raise ConfigError("--alias must not be empty.")
    names = tuple(dict.fromkeys((*alias, *model_names(settings.model))))
    failures: list[HeadstartError] = []

    def failed(error: HeadstartError) -> None:
        failures.append(error)
        server.should_exit = True

    def ready() -> None:
        # Loaded objects stay for good. Unfrozen, the collector would scan them for each large body, sometimes for 25 ms.
        ending.callback(Garbage(app.state.service.idle).close)
        page = {} if settings.no_web else {"page": f"{address}/"}
        log.info("listening", url=f"{address}/v1", **page, health=f"{address}/health", **bound.hints(secured.scheme))

    def leave(code: int) -> None:
        # It does not wait for threads: the files on disk are complete at any moment.
        bound.close()
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a progress bar may have hidden the cursor
        sys.stderr.flush()
        os._exit(code)

    address = f"{secured.scheme}://{bound.authority}"
    ending = ExitStack()

    try:
        app = create_app(
            lambda: load(settings),
            api_keys=keys,
            isolate=isolate,
            keep_noise=keep_noise,
            model_id=names[0],
            aliases=names,
            hosts=(*([host] if unix_socket is None else ()), *allow_host),
            cors=cors,
            page=not settings.no_web,
            on_ready=ready,
            on_failure=failed,
        )
        config = uvicorn.Config(
            app,
            loop="auto",
            http="httptools",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=65,
            # The socket's mode decides who may connect. A proxy there has no address that could be trusted.
            forwarded_allow_ips=None if unix_socket is None else "*",
        )
        config.load()
        config.ssl = secured.context()
        server = Server(config, app.state.service, settings.drain, leave)
        server.run(sockets=[bound.socket])
    finally:
        ending.close()
        bound.close()
    if failures:
        raise failures[0]
