"""The time to the first token after a server was killed and started again: `python -m benchmarks.restart`.

Each round: a conversation of about 8,000 tokens, `kill -9` two seconds after its reply, a start, and the next turn as soon as
`/health` is green. headstart (in fast mode) and a native llama-server run in turn, with the same texts. Ratios are of pairs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.client import Client, Sample
from benchmarks.servers import Server, Setup, demo_model, headstart, llama_server
from benchmarks.workloads import text

WORDS = 7000
"""Words of the system prompt: about 7,800 tokens."""
REPLY = 24

Start = Callable[[], AbstractContextManager[Server]]


@dataclass(frozen=True, slots=True)
class Restart:
    """`first` and `second`: the turns before and after; `green`: seconds from the start to a green `/health`."""

    first: Sample
    second: Sample
    green: float


def restart(start: Start, number: int) -> Restart:
    chat = [{"role": "system", "content": text(f"restart {number}", WORDS)}, {"role": "user", "content": "Begin."}]
    with start() as server:
        first = Client(server).chat(chat, REPLY)
        time.sleep(2)
        server.process.kill()
        server.process.wait()
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": text(f"next {number}", 20)}]
    begun = time.perf_counter()
    with start() as server:
        green = time.perf_counter() - begun
        return Restart(first, Client(server).chat(chat, REPLY), green)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="paired rounds (3)")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF; the bundled model by default")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    setup = Setup(given.model or demo_model(), slots=1, threads=given.threads)
    found: dict[str, list[Restart]] = {"headstart": [], "llama-server": []}
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            starts: dict[str, Start] = {
                "headstart": lambda folder=folder: headstart(setup, cache=Path(folder)),  # type: ignore[misc]
                "llama-server": lambda: llama_server(setup),
            }
            for name in starts if number % 2 == 0 else reversed(starts):
                found[name].append(restart(starts[name], number))
                Console().print(f"[dim]round {number + 1}/{given.rounds}: {name}[/]")
    figures: dict[str, Callable[[Restart], float]] = {
        "prompt, tokens": lambda one: one.second.prompt,
        "before: time to first token, s": lambda one: one.first.ttft,
        "from start to /health, s": lambda one: one.green,
        "after: time to first token, s": lambda one: one.second.ttft,
        "after: tokens computed": lambda one: one.second.computed,
    }
    table = Table("figure", *found, "ratio of pairs", title="killed and started again (fast mode)")
    for figure, of in figures.items():
        ours, theirs = ([of(one) for one in found[name]] for name in found)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        table.add_row(figure, *map(spread, (ours, theirs, ratios)))
    table.caption = "medians (min – max)"
    Console().print(table)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g} – {max(values):.4g})"


if __name__ == "__main__":
    main()
