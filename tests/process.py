"""The command line in its own process."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

HEADSTART = [sys.executable, "-m", "headstart"]
SHARED = ("--ctx", "4096", "--slots", "2", "--threads", "2", "--memory-budget", "256MiB")
"""Options of all servers of the bundled model. With the same options its proof runs once and is remembered."""
BUNDLED = ("--ctx", "512", *SHARED[2:])
"""The same with a short context, for which the proof takes half as long."""
Here = Callable[..., "subprocess.CompletedProcess[str]"]
"""The fixture `here`: `run_here` with the test's own output captured."""
FOLDERS = ("HEADSTART_CACHE_DIR", "HEADSTART_STATE_DIR")


def environment(**given: str) -> dict[str, str]:
    """The caller's environment without headstart's settings, except for folders that do not belong to the user."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_") or name in FOLDERS}
    return kept | given


def run(*arguments: str, code: str | None = None, **given: str) -> subprocess.CompletedProcess[str]:
    command = HEADSTART if code is None else [sys.executable, "-c", code]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, env=environment(**given), stdin=subprocess.DEVNULL
    )


def run_here(capfd: pytest.CaptureFixture[str], *arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    """`run` in this process, which takes a second less. For commands that change nothing in it, or end before they do."""
    from headstart.cli.main import main

    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment().keys():
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(arguments, ended.value.code, *capfd.readouterr())


class Server:
    """A running `headstart serve`, with the lines of its log."""

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

    def lines_until(self, wanted: str, count: int) -> None:
        """Waits until `count` lines have contained `wanted`."""
        for _ in range(count):
            self.line(wanted)

    def address(self) -> str:
        """Waits until it listens, and returns its URL without a path."""
        found = re.search(r"https?://[\w.:\[\]]+", self.line("listening"))
        assert found is not None
        return found[0]

    def rest(self) -> list[str]:
        """All remaining lines of its log."""
        while line := self._new.get(timeout=90):
            self.lines.append(line)
        return self.lines

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def serving(*arguments: str, **given: str) -> AbstractContextManager[Server]:
    """`headstart serve`, until the block ends."""
    return started([*HEADSTART, "serve", *arguments], **given)


@contextmanager
def started(command: Sequence[str], **given: str) -> Iterator[Server]:
    """A process that serves, until the block ends."""
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment(**given), stdin=subprocess.DEVNULL
    )
    try:
        yield Server(process)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
