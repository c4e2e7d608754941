"""Launch: brings a fleet up on a cluster of Ray, and takes it down."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from headstart.errors import ConfigError
from headstart.fleet.cluster.setup import APPLICATION, FleetSetup, stopping
from headstart.fleet.cluster.starting import reason_in

ROOM = 1
"""Processors that a local cluster claims to have beside those of the replicas, for Ray's own processes."""
LATE = 10.0
"""Seconds more for Ray to notice that its processes have ended."""
OBJECTS = 256 << 20
"""Bytes of a local cluster's object store. Only bodies of requests go through it."""
DRAINING = 5
"""Seconds in which HAProxy must have noticed that a replica stops."""

ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""Ray's server and our app share an event loop, so no token crosses a thread. Our app never keeps its loop for long."""
DIRECT = {
    **ONE_LOOP,
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_SESSION_ID_HEADER_KEY": "authorization",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAINING),
}
"""The environment of all of Ray's processes in direct mode. On a cluster of many machines `ray start` needs it."""
LOCAL = {**ONE_LOOP, "RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1"}
"""The environment of a local cluster. A dead proxy is replaced after three failed checks, which by default takes 25 s."""
PORTS = (
    *("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT"),
    *("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT"),
)
"""Ports of direct mode that Ray has fixed. A local cluster gets free ones, so that two fleets can run on one machine."""


def check() -> None:
    """Raises ConfigError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("A fleet needs Ray: run pip install 'headstart[fleet]'.")


@contextmanager
def fleet(
    setup: FleetSetup,
    host: str | None,
    port: int | None,
    *,
    address: str | None = None,
    direct: bool = False,
    build: Callable[[FleetSetup], Any] | None = None,
) -> Iterator[tuple[str, int]]:
    """A fleet that serves until the context ends; with `address` it goes on after that. Yields its host and port.

    Args:
        host, port: where it is to serve; None for Serve's own on a cluster where Serve runs already, else for 127.0.0.1:8000.
        address: a running cluster of Ray, like `ray://HOST:10001` or `auto`; None starts a cluster on this machine.
        direct: HAProxy sends requests to the replicas' own ports.
        build: makes the application of Ray Serve; None for headstart's.

    Raises:
        ConfigError: Ray is missing or cannot be reached, the fleet does not start, or Serve has another host and port already.
    """
    check()
    for name, value in environment(direct=direct, local=address is None).items():
        os.environ.setdefault(name, value)  # Ray reads it when it is imported, and its processes inherit it
    import ray
    from ray import serve

    from headstart.fleet.cluster.application import QUIET as QUIET_LOG
    from headstart.fleet.cluster.application import application

    local: dict[str, Any] = {}
    if address is None:
        processors = math.ceil(setup.scale.most * setup.cpus) + setup.fronts + ROOM
        local = {"num_cpus": processors, "object_store_memory": OBJECTS, "include_dashboard": False}
    _connect(address or "local", **local)  # without an address, Ray would join a cluster that runs on this machine
    try:
        where = "EveryNode" if address else "HeadOnly"
        try:
            wanted = {"host": host or "127.0.0.1", "port": port or 8000}
            serve.start(proxy_location=where, http_options=wanted, logging_config=QUIET_LOG)
            at = _serves_at(host, port)
            made = build(setup) if build else application(setup, direct=direct)
            serve.run(made, name=APPLICATION, route_prefix="/", blocking=False)
        except RuntimeError as error:
            raise ConfigError(f"The fleet does not start: {_reason(error)}") from None
        yield at
        if address is None:
            _delete(setup)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def environment(*, direct: bool, local: bool) -> dict[str, str]:
    """The variables that Ray's processes need.

    Args:
        local: Ray is started on this machine, for this fleet alone.
    """
    ports = free_ports(len(PORTS)) if direct and local else ()
    return {**(LOCAL if local else {}), **(DIRECT if direct else {}), **dict(zip(PORTS, map(str, ports), strict=False))}


def free_ports(count: int) -> tuple[int, ...]:
    """Different ports that nobody listens on now, on any interface."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return tuple(listener.getsockname()[1] for listener in listeners)


def stop(address: str) -> None:
    """Takes down a fleet that runs on a cluster: replies that run are finished, and replicas store what only they have.

    Ray Serve itself goes on.

    Raises:
        ConfigError: Ray is missing or cannot be reached, or there is no fleet.
    """
    check()
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    _connect(address)
    try:
        if APPLICATION not in serve.status().applications:
            raise ConfigError(f"There is no fleet on the cluster at {address}.")
        _delete(None)
    except RayServeException:
        raise ConfigError(f"There is no fleet on the cluster at {address}.") from None
    finally:
        ray.shutdown()


def _connect(address: str, **local: Any) -> None:
    import ray

    try:
        ray.init(address, namespace=APPLICATION, logging_level="ERROR", **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray cannot be reached at {address}: {_first_line(error)}") from None


def _serves_at(host: str | None, port: int | None) -> tuple[str, int]:
    """Where Serve listens. Raises ConfigError if that is elsewhere: Serve keeps what it was started with, and only logs it."""
    from ray.serve.context import _get_global_client

    found = _get_global_client().http_config  # no public call says it
    if host not in (None, found.host) or port not in (None, found.port):
        raise ConfigError(
            f"Ray Serve runs on this cluster already, at {found.host}:{found.port}: leave out --host and --port, or end it "
            "with `serve shutdown` on the head."
        )
    return found.host, found.port


def _delete(setup: FleetSetup | None) -> None:
    """Stops the application, and waits until its processes have ended; without a setup as long as that takes."""
    from ray import serve

    serve.delete(APPLICATION, _blocking=False)
    ends = math.inf if setup is None else time.monotonic() + stopping(setup) + LATE
    while APPLICATION in serve.status().applications and time.monotonic() < ends:
        time.sleep(0.2)


def until_signal() -> None:
    """Waits for SIGINT or SIGTERM. A second one raises KeyboardInterrupt."""
    ends = threading.Event()

    def end(*_: object) -> None:
        if ends.is_set():
            raise KeyboardInterrupt
        ends.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    ends.wait()


def _reason(error: RuntimeError) -> str:
    """Why Serve or a process of the fleet did not start."""
    from ray import serve

    failed = serve.status().applications.get(APPLICATION)
    reports = [one.message for one in failed.deployments.values()] if failed is not None else []
    return next(filter(None, map(reason_in, reports)), None) or _last_line(error)


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
