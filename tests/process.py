"""The command line in a process of its own."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HEADSTART = [sys.executable, "-m", "headstart"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}


def environment(**given: str) -> dict[str, str]:
    """The caller's environment without settings of headstart, but for a cache folder that is not the user's own."""
    return CLEAN | {"HEADSTART_CACHE_DIR": os.environ["HEADSTART_CACHE_DIR"]} | given


def run(*arguments: str, code: str | None = None, **given: str) -> subprocess.CompletedProcess[str]:
    command = HEADSTART if code is None else [sys.executable, "-c", code]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, env=environment(**given), stdin=subprocess.DEVNULL
    )


class Server:
    """A running `headstart serve`: the lines of its log as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._new.put(line)
        self._new.put("")

    def line(self, wanted: str) -> str:
        """Waits for a line that contains `wanted`."""
        while line := self._new.get(timeout=90):
            self.lines.append(line)
            if wanted in line:
                return line
        raise AssertionError(f"ended with {self.process.wait()}: {''.join(self.lines)}")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def serving(*arguments: str, **given: str) -> Iterator[Server]:
    process = subprocess.Popen(
        [*HEADSTART, "serve", *arguments], stderr=subprocess.PIPE, text=True, env=environment(**given), stdin=subprocess.DEVNULL
    )
    try:
        yield Server(process)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
