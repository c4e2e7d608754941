"""Switch: what several models in one server cost.

* A request to a loaded model, beside a server of that model alone. The requests alternate, so that a pair meets one load.
* A request to a model that is not loaded, in memory for one: from the request to its first token, the other model's unloading
  included. Beside it, if it is installed, llama-server's router mode (`--models-dir`, `--models-max 1`) with the same files.

`python -m benchmarks.switch`; `--model` (twice) for other files than two copies of the bundled one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks import servers

CHAT = "/v1/chat/completions"
TEXT = "The quick brown fox jumps over the lazy dog near the river bank while seven old ships sail by. "


def ask(http: httpx.Client, model: str, text: str, tokens: int = 1) -> float:
    """Seconds until the first event of a streamed reply that has text. Some servers send an empty one when they begin."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
    begun = time.perf_counter()
    with http.stream("POST", CHAT, json={**body, "temperature": 0, "stream": True}) as response:
        for line in response.iter_lines():
            if response.status_code != 200:
                raise SystemExit(f"status {response.status_code}: {line}")
            if line.startswith("data: {") and _text(json.loads(line[6:])):
                return time.perf_counter() - begun
    raise SystemExit(f"no text came from {model}")


def _text(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def spread(values: list[float], unit: float) -> str:
    """Median and quartiles."""
    low, middle, high = (unit * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def small(http: httpx.Client) -> float:
    """Seconds of a request that computes almost nothing."""
    begun = time.perf_counter()
    response = http.post("/tokenize", json={"content": "Hello."})
    assert response.status_code == 200, response.text
    return time.perf_counter() - begun


def cost(one: httpx.Client, several: httpx.Client, pairs: int) -> tuple[str, str, str]:
    """Milliseconds of a small request to one server, to a server of several, and the differences of pairs."""
    for http in (one, several):
        for _ in range(20):
            small(http)
    alone: list[float] = []
    beside: list[float] = []
    for number in range(pairs):
        first, second = (alone, beside) if number % 2 else (beside, alone)
        for into in (first, second):
            into.append(small(one if into is alone else several))
    gaps = [more - less for less, more in zip(alone, beside, strict=True)]
    return spread(alone, 1e3), spread(beside, 1e3), spread(gaps, 1e3)


def switches(http: httpx.Client, names: list[str], rounds: int) -> list[float]:
    """Seconds to the first token of requests that each need a switch, after one of each model."""
    found = [ask(http, name, TEXT) for _ in range(rounds + 1) for name in names]
    return found[len(names) :]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switch", description=__doc__)
    parser.add_argument("--model", type=Path, action="append", help="a .gguf file; give two")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = options.model or [servers.demo_model(), servers.demo_model()]
        names = [chr(97 + number) for number in range(len(files))]
        for name, file in zip(names, files, strict=True):
            _place(file, folder / f"{name}.gguf")
        setup = servers.Setup(folder / f"{names[0]}.gguf", options.ctx, 1, options.threads)

        def client(server: servers.Server) -> httpx.Client:
            return stack.enter_context(httpx.Client(base_url=server.url, timeout=300))

        print(f"{len(files)} models, load of the machine: {os.getloadavg()[0]:.1f}")
        with servers.headstart(setup) as alone, servers.headstart_several(folder, setup, keep=1) as several:
            http = client(several)
            ask(http, names[0], TEXT)
            rows = cost(client(alone), http, options.pairs)
            print("a small request, ms: one model {}, several {}, difference of pairs {}".format(*rows))
        runs: dict[str, Callable[[], Any]] = {"headstart": lambda: servers.headstart_several(folder, setup, keep=1)}
        if servers.has_llama_server():
            runs["llama-server"] = lambda: servers.llama_router(folder, setup)
        for name, start in runs.items():
            with start() as server:
                print(f"{name}: a switch, s: {spread(switches(client(server), names, options.rounds), 1.0)}")
        print(f"load of the machine: {os.getloadavg()[0]:.1f}")


def _place(file: Path, at: Path) -> None:
    try:
        os.link(file, at)
    except OSError:
        shutil.copyfile(file, at)


if __name__ == "__main__":
    main()
