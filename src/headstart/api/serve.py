"""Serve: uvicorn around the app, from a free port to a graceful end."""

from __future__ import annotations

import errno
import gc
import ipaddress
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import uvicorn

from headstart.api.app import create_app
from headstart.api.keys import Keys
from headstart.api.normalise import check_rules
from headstart.api.tenants import policy_of
from headstart.config import Settings
from headstart.errors import ConfigError, HeadstartError
from headstart.observe import logs
from headstart.runtime.runtime import Runtime

GRACE = 10
"""Seconds that running answers get at shutdown."""


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port` (0: any free one).

    Raises:
        ConfigError: the port is in use or not allowed, or the host is not one of this machine's.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"{port} is not a port; choose one between 0 and 65535 with --port.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Cannot resolve the host '{host}'; give another with --host.") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        code = error.errno
        if code == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} on {host} is in use; choose another with --port.") from error
        if code in (errno.EACCES, errno.EPERM):
            raise ConfigError(f"Port {port} is not allowed to you; choose one above 1023 with --port.") from error
        if code == errno.EADDRNOTAVAIL:
            raise ConfigError(f"'{host}' is not an address of this machine; give another with --host.") from error
        raise ConfigError(f"Cannot listen on {host}:{port} ({error}); change --host or --port.") from error
    return bound


def serve(
    settings: Settings,
    host: str,
    port: int,
    api_keys: Sequence[str] = (),
    log_format: logs.LogFormat = "console",
    *,
    key_file: Path | None = None,
    isolate: str | None = None,
    alias: str | None = None,
    cors: Sequence[str] = (),
    keep_noise: Sequence[str] = (),
    load: Callable[[Settings], Runtime],
) -> None:
    """Serves a model until it is told to stop (SIGINT, SIGTERM).

    Args:
        key_file: more keys, one a line.
        isolate: a row of `tenants.POLICIES`; None for what suits the keys.
        alias: name of the model, in place of the file's, which is understood all the same.
        cors: origins of web pages that may send requests.
        keep_noise: rows of `normalise.RULES` that are left out.
        load: makes the runtime; called in a thread, while `/health` says that the model is loading.

    Raises:
        ConfigError: host, port, keys or model cannot be used.
    """
    logs.configure(log_format)
    log = structlog.get_logger("headstart")
    keys = Keys(api_keys, key_file)
    policy_of(isolate, several=keys.several)
    check_rules(keep_noise)
    bound = listen(host, port)
    if not keys.closed and not _is_local(bound.getsockname()[0]):
        log.warning("open to the network without a key: everyone who reaches it can use it; give --api-key", host=host)
    if "*" in cors and not keys.closed:
        log.warning("open to every web page that is visited here: give --api-key, or name the pages' origins in --cors")
    failures: list[HeadstartError] = []

    def failed(error: HeadstartError) -> None:
        failures.append(error)
        server.should_exit = True

    def ready() -> None:
        # What is loaded stays; else the collector walks it for each large body, and now and then for 25 ms.
        gc.collect()
        gc.freeze()
        log.info("listening", url=f"{address}/v1", health=f"{address}/health")

    path = Path(settings.model)
    stem = path.stem if path.suffix == ".gguf" else settings.model
    address = f"http://{host if ':' not in host else f'[{host}]'}:{bound.getsockname()[1]}"

    app = create_app(
        lambda: load(settings),
        api_keys=keys,
        isolate=isolate,
        keep_noise=keep_noise,
        model_id=alias or stem,
        aliases=tuple(dict.fromkeys(name for name in (stem, settings.model, path.name) if name)),
        cors=cors,
        on_ready=ready,
        on_failure=failed,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            loop="auto",
            http="httptools",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=GRACE,
        )
    )
    try:
        server.run(sockets=[bound])
    finally:
        bound.close()
    if failures:
        raise failures[0]


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
