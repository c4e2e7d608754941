"""Install: puts the stand-ins into the modules of production, in place of the standard library's.

The seam is the standard library: production calls `time`, `threading`, `queue`, `os`, `shutil`, `fcntl`, `sqlite3`, `Path` and
`Future` as it always does, and no line of it is different in a simulation. A call that is not simulated raises. Templates are
compiled once for all servers, only because that takes long.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import os
import pathlib
import queue
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import headstart.serving.runtime
import headstart.tiers.write_behind  # noqa: F401
from headstart.prompt.chat_template import Template
from headstart.testing.simulation.calls import FCNTL, OS, SHUTIL, SimulatedPath
from headstart.testing.simulation.database import SQLITE
from headstart.testing.simulation.talks import compiled
from headstart.testing.simulation.threads import QUEUE, THREADING, TIME, Future

PACKAGES = ("headstart.serving", "headstart.prefix_cache", "headstart.tiers", "headstart.lru", "headstart.config")
"""What runs in the simulation."""
NOT = ("headstart.tiers.shared.",)
"""What the simulation does not use: stores of a fleet, which are behind a network."""
STAND_INS: tuple[tuple[object, object], ...] = (
    (time, TIME),
    (threading, THREADING),
    (queue, QUEUE),
    (os, OS),
    (shutil, SHUTIL),
    (fcntl, FCNTL),
    (sqlite3, SQLITE),
    (pathlib.Path, SimulatedPath),
    (concurrent.futures.Future, Future),
    (Template, compiled),
)


def modules() -> list[ModuleType]:
    """The modules of production that run in the simulation, as far as they are loaded."""
    return [
        module
        for name, module in sorted(sys.modules.items())
        if any(name == package or name.startswith(f"{package}.") for package in PACKAGES) and not name.startswith(NOT)
    ]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """While this is open, production runs in the simulation. It may be open several times."""
    undo: list[tuple[ModuleType, str, Any]] = []
    for module in modules():
        for name, value in list(vars(module).items()):
            for real, stand_in in STAND_INS:
                if value is real and not (module.__name__ == "headstart.config" and real is not pathlib.Path):
                    undo.append((module, name, value))
                    setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name, value in undo:
            setattr(module, name, value)
