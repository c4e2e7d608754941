"""In use: which processes have a file open or mapped, as far as this user may see."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class FileUser:
    """A process that uses a file. `name` is that of its program: `headstart` for one that Python runs."""

    pid: int
    name: str


def users(paths: Iterable[Path]) -> dict[Path, list[FileUser]]:
    """For each file the processes that have it open, or mapped into their memory as engines do. Links are followed."""
    found: dict[Path, list[FileUser]] = {path: [] for path in paths}
    wanted: dict[str, list[Path]] = {}
    for path in found:
        wanted.setdefault(str(path.resolve()), []).append(path)
    if wanted:
        for process in psutil.process_iter():
            try:
                names = wanted.keys() & {*_files(process)}
                user = FileUser(process.pid, program_name(process.name(), process.cmdline())) if names else None
            except (psutil.Error, OSError):
                continue
            if user is not None:
                for path in (path for name in names for path in wanted[name]):
                    found[path].append(user)
    return found


def program_name(program: str, words: Sequence[str]) -> str:
    """The name of a process's program. headstart's processes run Python, and so do those of its models.

    Args:
        program: as the system names it.
        words: of its command line.
    """
    if not program.casefold().startswith("python"):
        return program
    by_module = any(flag == "-m" and word.partition(".")[0] == "headstart" for flag, word in itertools.pairwise(words))
    return "headstart" if by_module or any(os.path.basename(word) == "headstart" for word in words[1:2]) else program


def _files(process: psutil.Process) -> Iterator[str]:
    """Paths of its files. Where the system does not say what is mapped, those that are open only."""
    try:
        with open(f"/proc/{process.pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                if (at := line.find("/")) >= 0:
                    yield line[at:].rstrip("\n").removesuffix(" (deleted)")
    except FileNotFoundError:
        pass
    yield from (file.path for file in process.open_files())
