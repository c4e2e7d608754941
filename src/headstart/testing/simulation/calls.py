"""Calls: stand-ins for `os`, `shutil`, `fcntl` and `Path`, on the file system of the history that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import PosixPath
from types import SimpleNamespace
from typing import Any

from headstart.testing.simulation.disk import UNIT
from headstart.testing.simulation.filesystem import system
from headstart.testing.simulation.kernel import world
from headstart.testing.simulation.open_files import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN
from headstart.testing.simulation.threads import StandIn


class SimulatedPath(PosixPath):
    """A path on the virtual disk. It keeps the paths below it that somebody has asked for: to make one takes long."""

    def __truediv__(self, key: Any) -> SimulatedPath:
        below: dict[Any, SimulatedPath] = self.__dict__.setdefault("_below", {})
        if (found := below.get(key)) is None:
            found = below[key] = super().__truediv__(key)
        return found

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            system().unlink(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def iterdir(self) -> Iterator[SimulatedPath]:  # type: ignore[override]
        with system().scandir(self) as entries:
            return iter([self / entry.name for entry in entries])

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        return system().stat(self)

    def is_dir(self) -> bool:
        return str(self) in system().disk.names

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        system().call("open", str(self))
        if not self.is_dir():
            system().disk.make(str(self))


def _pid() -> int:
    task = world().task
    return 1 if task is None else task.process.pid


def _forward(name: str) -> Callable[..., Any]:
    return lambda *args, **how: getattr(system(), name)(*args, **how)


_CALLS = (
    "open",
    "close",
    "write",
    "pread",
    "preadv",
    "fsync",
    "utime",
    "replace",
    "unlink",
    "scandir",
    "stat",
    "fstat",
)
_FLAGS = {name: value for name, value in vars(os).items() if name.startswith("O_")}
OS = StandIn(
    "os",
    {name: _forward(name) for name in _CALLS}
    | _FLAGS
    | {
        "path": os.path,
        "getpid": _pid,
        "statvfs": lambda path: SimpleNamespace(f_frsize=UNIT),
        "fspath": os.fspath,
        "PathLike": os.PathLike,
    },
)
SHUTIL = StandIn("shutil", {"disk_usage": lambda path: SimpleNamespace(free=system().free())})
FCNTL = StandIn(
    "fcntl", {"flock": _forward("flock"), "LOCK_EX": LOCK_EX, "LOCK_SH": LOCK_SH, "LOCK_NB": LOCK_NB, "LOCK_UN": LOCK_UN}
)
