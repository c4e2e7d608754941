"""Launch: brings a fleet up on a cluster of Ray, and takes it down."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headstart.errors import ConfigError
from headstart.fleet.cluster.setup import APPLICATION, FleetSetup, stopping

ROOM = 1
"""Processors that a local cluster claims to have beside those of the replicas, for Ray's own processes."""
LATE = 10.0
"""Seconds more for Ray to notice that its processes have ended."""
OBJECTS = 256 << 20
"""Bytes of a local cluster's object store. Only bodies of requests go through it."""
DRAINING = 5
"""Seconds in which HAProxy must have noticed that a replica stops."""

DIRECT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_SESSION_ID_HEADER_KEY": "authorization",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAINING),
}
"""The environment of all of Ray's processes in direct mode. On a cluster of many machines `ray start` needs it."""
LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1"}
"""The environment of a local cluster. A dead proxy is replaced after three failed checks, which by default takes 25 s."""


def check() -> None:
    """Raises ConfigError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("A fleet needs Ray: run pip install 'headstart[fleet]'.")


@contextmanager
def fleet(setup: FleetSetup, host: str, port: int, *, address: str | None = None, direct: bool = False) -> Iterator[None]:
    """A fleet that serves at `host` and `port` until the context ends. With `address` it goes on after that.

    Args:
        address: a running cluster of Ray, like `ray://HOST:10001` or `auto`; None starts a cluster on this machine.
        direct: HAProxy sends requests to the replicas' own ports.

    Raises:
        ConfigError: Ray is missing or cannot be reached, or the fleet does not start.
    """
    check()
    for name, value in {**({} if address else LOCAL), **(DIRECT if direct else {})}.items():
        os.environ.setdefault(name, value)  # Ray reads it when it is imported, and its processes inherit it
    import ray
    from ray import serve

    from headstart.fleet.cluster.application import QUIET as QUIET_LOG
    from headstart.fleet.cluster.application import application

    local: dict[str, Any] = {}
    if address is None:
        processors = math.ceil(setup.scale.most * setup.cpus) + setup.fronts + ROOM
        local = {"num_cpus": processors, "object_store_memory": OBJECTS, "include_dashboard": False}
    try:
        ray.init(address, namespace=APPLICATION, logging_level="ERROR", **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray cannot be reached at {address}: {_first_line(error)}") from None
    try:
        where = "EveryNode" if address else "HeadOnly"
        serve.start(proxy_location=where, http_options={"host": host, "port": port}, logging_config=QUIET_LOG)
        try:
            serve.run(application(setup, direct=direct), name=APPLICATION, route_prefix="/", blocking=False)
        except RuntimeError as error:
            raise ConfigError(f"The fleet does not start; the log says why: {_first_line(error)}") from None
        yield
        if address is None:
            _delete(setup)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


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

    try:
        ray.init(address, namespace=APPLICATION, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray cannot be reached at {address}: {_first_line(error)}") from None
    try:
        if APPLICATION not in serve.status().applications:
            raise ConfigError(f"There is no fleet on the cluster at {address}.")
        _delete(None)
    except RayServeException:
        raise ConfigError(f"There is no fleet on the cluster at {address}.") from None
    finally:
        ray.shutdown()


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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
