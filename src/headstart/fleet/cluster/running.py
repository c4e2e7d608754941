"""Running: which replicas Ray sends requests to, as `named_replica` hears it in this process.

It is a module of its own: Ray copies the module of a request router into each process, so what a router wrote into that one
nobody else would see.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import ClassVar

from ray import serve

from headstart.fleet.cluster.setup import APPLICATION, REPLICA

WATCH = 1.0
"""Seconds between two tries to call a replica while none runs, and between two looks at which replicas run."""


class Running:
    """`names`: of the replicas that Ray sends requests to, without those that stop. None before Ray has named any."""

    names: ClassVar[frozenset[str] | None] = None


async def watch() -> None:
    """Makes Ray tell this process which replicas run: it does so for whoever has called one."""
    while True:
        with suppress(Exception):
            await serve.get_deployment_handle(REPLICA, APPLICATION).figures.remote()
            return
        await asyncio.sleep(WATCH)


async def stopped(name: str, grace: float) -> None:
    """Waits until Ray stops a replica that ran, and `grace` seconds more. Ray itself tells it when its replies are over."""
    ran = math.inf
    while time.monotonic() < ran + grace:
        if Running.names and name in Running.names:
            ran = time.monotonic()
        await asyncio.sleep(min(WATCH, grace))
