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
import random
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import headstart.serving.runtime
import headstart.tiers.shared.opened
import headstart.tiers.write_behind  # noqa: F401
from headstart.prompt.chat_template import Template
from headstart.serving import landing, late_fetch, offload, portions, shared_audit
from headstart.testing.simulation.calls import FCNTL, OS, SHUTIL, SimulatedPath
from headstart.testing.simulation.database import SQLITE
from headstart.testing.simulation.shared_store import simulated_keys, simulated_store
from headstart.testing.simulation.talks import compiled
from headstart.testing.simulation.threads import QUEUE, RANDOM, THREADING, TIME, Executor, Future
from headstart.tiers import catalog_watch, upkeep, write_behind
from headstart.tiers.disk import catalog_file, store
from headstart.tiers.shared.address import fleet_keys, open_store

PACKAGES = ("headstart.serving", "headstart.prefix_cache", "headstart.tiers", "headstart.lru", "headstart.config")
"""What runs in the simulation."""
NOT = tuple(f"headstart.tiers.shared.{name}" for name in ("folder", "resp", "s3", "valkey"))
"""What the simulation does not use: the clients of real stores."""
CONSTANTS: tuple[tuple[ModuleType, str, object], ...] = (
    (landing, "SMALL", 0),
    (late_fetch, "LEAST", 0.05),
    (shared_audit, "PORTION", 0.2),
)
"""Limits that texts of a few hundred tokens would not reach."""
IN_PIECES: tuple[tuple[ModuleType, str, object], ...] = (
    (upkeep, "AT_ONCE", 4),
    (write_behind, "SOME", 4),
    (write_behind, "BACKLOG", 12),
    (catalog_watch, "PIECE", 3),
    (catalog_watch, "LARGE", 8),
    (store, "AT_ONCE", 4),
    (store, "PIECE", 3),
    (store, "AHEAD_PART", 4),
    (catalog_file, "CHECKED", 0),
    (offload, "STEP", 3),
    (portions, "MOST", 1),
)
"""Limits beyond which things are done piece by piece, or ahead, so low that a folder of a few dozen objects is beyond them."""
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
    (concurrent.futures.ThreadPoolExecutor, Executor),
    (random, RANDOM),
    (open_store, simulated_store),
    (fleet_keys, simulated_keys),
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
        with limits(CONSTANTS):
            yield
    finally:
        for module, name, value in reversed(undo):
            setattr(module, name, value)


@contextlib.contextmanager
def limits(values: Sequence[tuple[ModuleType, str, object]]) -> Iterator[None]:
    """While this is open, these constants of modules have these values."""
    undo = [(module, name, getattr(module, name)) for module, name, _ in values]
    for module, name, value in values:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, before in undo:
            setattr(module, name, before)
