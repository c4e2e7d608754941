"""Real fleets for tests: a local cluster of Ray with replicas of the fake engine, or of the bundled model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from live import wait_until
from stores import free_port

STARTS = 180.0
"""Seconds: a busy machine starts Ray slowly."""


@dataclass
class RunningFleet:
    """A fleet in processes of its own.

    Attributes:
        log: what they wrote.
        lost: while this file has the number of a replica's process, the replica's reports do not arrive.
        loading: while this file exists, no new replica is ready.
        fronts: their number.
    """

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    lost: Path
    loading: Path
    key: str = ""
    direct: bool = False
    fronts: int = 1
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False, headers=headers)

    def status(self) -> dict[str, Any]:
        answer = self.http.get("/headstart/fleet")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def replicas(self) -> dict[str, dict[str, Any]]:
        """The figures of the replicas, by tag."""
        return {one["tag"]: one for one in self.status()["replicas"]}

    def ready(self, count: int) -> bool:
        """Whether so many replicas are there and every front knows them."""
        try:
            found = self.status()
        except httpx.HTTPError:
            return False
        known = [len(front) for front in found["fronts"]]
        return len(found["replicas"]) == count and known == [count] * self.fronts

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> dict[str, Any]:
        body = {"messages": list(messages), "max_tokens": 8, "temperature": 0, **options}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def served(self, ask: Callable[[], Any]) -> tuple[Any, str]:
        """The answer to a request, and the tag of the replica that served it."""
        before = self.replicas()
        answer = ask()
        changed = [tag for tag, one in self.replicas().items() if _tokens(one) > _tokens(before.get(tag))]
        assert len(changed) == 1, changed
        return answer, changed[0]

    def kill(self, tag: str) -> None:
        """kill -9 of a replica."""
        os.kill(self.replicas()[tag]["pid"], signal.SIGKILL)

    def processes(self, name: str) -> list[psutil.Process]:
        """Processes of this fleet whose title or command contains `name`."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if name in " ".join(one.cmdline()):
                    found.append(one)
            except psutil.Error:
                continue
        return found


def _tokens(figures: dict[str, Any] | None) -> int:
    return 0 if figures is None else figures["computed"] + sum(figures["cached"].values())


@contextmanager
def running(
    folder: Path,
    *,
    replicas: int | str,
    engine: dict[str, Any] | None = None,
    options: Sequence[str] = (),
    keys: Sequence[str] = (),
    direct: bool = False,
    grace: float = 120.0,
    fronts: int = 1,
    nodes: int = 0,
    scale: Mapping[str, float] = {},
) -> Iterator[RunningFleet]:
    """A fleet of replicas.

    Args:
        replicas: their number, or a range.
        engine: arguments of the fake engine; None for the bundled model.
        options: of the command.
        keys: API keys. The fleet's client sends the first one.
        grace: seconds for replies when the fleet stops (the fake engine only).
        nodes: Ray nodes for a replica each, beside a head; 0 for one node that has all. With the fake engine only, as the next.
        scale: fields of `Scale`.
    """
    port, log = free_port(), folder / f"fleet-{time.monotonic_ns()}.log"
    lost, loading = log.with_suffix(".lost"), log.with_suffix(".loading")
    if engine is None:
        command = ["-m", "headstart", "fleet", "serve", "demo", "--replicas", str(replicas), "--port", str(port), *options]
        command += ["--fronts", str(fronts), *(["--direct"] if direct else [])]
        command += [part for key in keys for part in ("--api-key", key)]
    else:
        what = {"port": port, "replicas": replicas, "engine": engine, "direct": direct, "keys": keys, "grace": grace}
        what |= {"settings": dict(_pairs(options)), "fronts": fronts, "nodes": nodes, "scale": {**scale}}
        what |= {"lost": str(lost), "loading": str(loading)}
        command = [str(Path(__file__).parent / "fake_fleet.py"), json.dumps(what)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_SHARED")}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": path},
        )
    fleet = RunningFleet(port, process, log, lost, loading, keys[0] if keys else "", direct, fronts)
    least = int(str(replicas).partition("..")[0])
    if direct and nodes:  # Ray then has a front on each machine with a replica, and one on the head
        fleet.fronts = least + 1
    try:
        wait_until(lambda: process.poll() is not None or fleet.ready(least), STARTS)
        assert process.poll() is None, log.read_text("utf-8", "replace")[-4000:]
        yield fleet
    finally:
        fleet.http.close()
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            raise


def _pairs(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--shared-key-file X` as a setting."""
    for name, value in zip(options[::2], options[1::2], strict=True):
        yield name.removeprefix("--").replace("-", "_"), value
