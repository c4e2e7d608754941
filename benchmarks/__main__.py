"""headstart against a native llama-server, paired: `python -m benchmarks [--rounds 7] [--only NAME …] [--out DIR]`.

With `--against DIR`, the peer is another version of headstart: the one in a checkout (`git worktree add DIR v1.2`).

Both servers stay up for the whole run. Each round sends both the same new texts, in alternating order, so that changes of the
machine affect both. Reported: the median of each, its spread, and the median of the ratios within pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.client import Client
from benchmarks.plots import pair_ratios
from benchmarks.restart import spread
from benchmarks.servers import Server, Setup, demo_model, headstart, llama_server
from benchmarks.workloads import WORKLOADS

Series = dict[str, dict[str, list[float]]]
"""Figure → server → one value a round."""


def measure(
    setup: Setup, rounds: int, names: list[str], console: Console, options: list[str], peer: AbstractContextManager[Server]
) -> Series:
    series: Series = {}
    with headstart(setup, *options) as ours, peer as theirs:
        clients = [Client(ours), Client(theirs)]
        for client in clients:
            client.chat([{"role": "user", "content": "Warm up."}], 8)
        for number in range(rounds):
            for name in names:
                for client in clients if number % 2 == 0 else clients[::-1]:
                    figures = WORKLOADS[name](client, number)
                    client.server.rest()
                    for figure, value in figures.items():
                        series.setdefault(figure, {}).setdefault(client.server.name, []).append(value)
                console.print(f"[dim]round {number + 1}/{rounds}: {name}[/]")
    return series


def table(series: Series, peer: str) -> Table:
    result = Table("figure", "headstart", peer, "ratio (median of pairs)", title=f"headstart against {peer}")
    for figure, values in series.items():
        ours, theirs = values["headstart"], values[peer]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})" if ratios else "–"
        result.add_row(figure, spread(ours), spread(theirs), ratio)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="paired rounds (7)")
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS), help="workloads")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF; the bundled model by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--option", action="append", default=[], help="another option for headstart, e.g. --option=--reuse=exact"
    )
    parser.add_argument("--against", type=Path, default=None, metavar="DIR", help="a checkout of another version as the peer")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for series.json and the plot")
    given = parser.parse_args()
    console = Console()
    setup = Setup(given.model or demo_model(), threads=given.threads)
    name, peer = "llama-server", llama_server(setup)
    if given.against is not None:
        name = "version before"
        peer = headstart(setup, *given.option, checkout=given.against, name=name)
    series = measure(setup, given.rounds, given.only, console, given.option, peer)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "series.json").write_text(json.dumps(series, indent=1))
    console.print(table(series, name))
    (given.out / "ratios.svg").write_text(pair_ratios(series, name), "utf-8")
    console.print(f"{given.rounds} paired rounds; values and plot in {given.out}/")


if __name__ == "__main__":
    main()
