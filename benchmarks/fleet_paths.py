"""What a fleet costs beside one machine: `python -m benchmarks.fleet_paths [--rounds N]`. Needs the extra `fleet`.

One server, a fleet in handle mode and a fleet in direct mode serve the same engine, which computes nothing and so takes no
time; with `--delay`, each of its calls takes so many seconds, as a model's do. All run at the same time, and are asked in turn:
a prompt that is known, and a reply as a stream. The engine takes each byte for a token. The figures are the time to the first
byte of the reply, and from there to the last one, by token.

A replica of the fleet in direct mode is also asked at its own port: that cost is Ray's, and the rest HAProxy's and the front's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import processor
from benchmarks.fixtures import of_tests
from benchmarks.restart import spread

ENGINE: dict[str, Any] = {"slots": 4, "ctx": 131_072, "block_size": 64, "batch": 512}
MODES = {"handle": False, "direct": True}
ASKED = 20
"""Requests of a round to each."""


def ask(client: httpx.Client, size: int, reply: int, number: int) -> tuple[float, float]:
    """Seconds to the first byte of a reply, and from there to its end."""
    messages = [{"role": "system", "content": "x" * size}, {"role": "user", "content": f"Question {number}."}]
    body = {"messages": messages, "max_tokens": reply, "ignore_eos": True, "stream": True, "temperature": 0}
    begun = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        parts = answer.iter_bytes()
        next(parts)
        first = time.perf_counter()
        for _ in parts:
            pass
    return first - begun, time.perf_counter() - first


@contextmanager
def one_server(delay: float) -> Iterator[httpx.Client]:
    port = of_tests("stores").free_port()
    command = [sys.executable, "-m", "benchmarks.fleet_paths", "--serve", str(port), "--delay", str(delay)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
    try:
        of_tests("live").wait_until(lambda: _answers(client), 120)
        yield client
    finally:
        process.terminate()
        process.wait()


def own_port(process: int) -> int:
    """The port at which Ray lets a replica serve HTTP in direct mode."""
    ports = {one.laddr.port for one in psutil.Process(process).net_connections() if one.status == psutil.CONN_LISTEN}
    return min(ports & {*range(30_000, 31_000)})


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def serve(port: int, engine: dict[str, Any]) -> None:
    from headstart.api.entrance import Network
    from headstart.api.serve import serve as run
    from headstart.config import Settings
    from headstart.serving.runtime import Runtime
    from headstart.testing.fake_engine import FakeEngine

    settings = Settings(memory_budget=64 << 20)
    run(settings, Network(port=port), load=lambda given: Runtime(lambda: FakeEngine(**engine), given))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_paths", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--body", type=int, default=15_000, help="bytes of the prompt, and tokens")
    parser.add_argument("--reply", type=int, default=32, help="tokens of a reply")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds of a call of the engine (0)")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=[*MODES], help="of fleets (both)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    engine = {**ENGINE, "delay": options.delay}
    if options.serve:
        serve(options.serve, engine)
        return
    found: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = of_tests("fleets").running
        memory = ["--memory-budget", str(64 << 20)]
        clients = {"one server": stack.enter_context(one_server(options.delay))}
        for mode in options.modes:
            fleet = stack.enter_context(running(folder, replicas=2, engine=engine, options=memory, direct=MODES[mode]))
            clients[f"{mode} mode"] = fleet.http
            if MODES[mode]:
                replica = next(iter(fleet.replicas().values()))
                url = f"http://127.0.0.1:{own_port(replica['pid'])}"
                clients["a replica's own port"] = stack.enter_context(httpx.Client(base_url=url, timeout=60, trust_env=False))
        for client in clients.values():
            for number in range(4):
                ask(client, options.body, options.reply, number)  # warms up
        for number in range(options.rounds):
            for name, client in clients.items():
                times = [ask(client, options.body, options.reply, 1000 * number + one) for one in range(ASKED)]
                found.setdefault(name, []).append((median(one for one, _ in times), median(two for _, two in times)))
    table = Table("milliseconds", "first byte", "above one server", "a token after it", title=f"{processor.name()}, two cores")
    alone = found["one server"]
    for name, rows in found.items():
        firsts, tokens = ([1e3 * row[place] for row in rows] for place in (0, 1))
        above = [1e3 * (row[0] - other[0]) for row, other in zip(rows, alone, strict=True)]
        table.add_row(name, spread(firsts), spread(above), spread([one / options.reply for one in tokens]))
    Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
