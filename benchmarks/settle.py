"""The costs and benefits of settling: `python -m benchmarks.settle`.

Two headstart servers, with `--settle on` and `off`. First, each request is sent as soon as the one before has ended: how long
does it wait because of settling? Then one chat in exact mode, with a few seconds between its turns: how much does the next turn
compute, and when does its first token arrive?
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.client import Client, Messages, Sample
from benchmarks.servers import Setup, demo_model, headstart
from benchmarks.workloads import text

BLOCK = 30
"""Requests to one server before the other's turn. While the other is measured, it has time to settle."""
PAUSE = 2.0


def back_to_back(client: Client, number: int) -> list[float]:
    """Seconds to the first token of each turn of three alternating chats."""
    chats: list[Messages] = [[{"role": "system", "content": text(f"chat {number} {one}", 150)}] for one in range(3)]
    waits = []
    for turn in range(BLOCK):
        chat = chats[turn % 3]
        chat.append({"role": "user", "content": text(f"turn {number} {turn}", 20)})
        sample = client.chat(chat, 16)
        chat.append({"role": "assistant", "content": sample.text})
        waits.append(sample.ttft)
    return waits[3:]  # without the system prompts


def thinking(client: Client, turns: int, pause: float) -> list[Sample]:
    """One chat with long replies and a pause of so many seconds after each."""
    chat: Messages = [{"role": "system", "content": text("thinking", 150)}]
    samples = []
    for turn in range(turns):
        chat.append({"role": "user", "content": text(f"asks {turn}", 20)})
        samples.append(client.chat(chat, 150))
        chat.append({"role": "assistant", "content": samples[-1].text})
        time.sleep(pause)
    return samples[1:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.settle", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="blocks of requests to each server (5)")
    parser.add_argument("--turns", type=int, default=6, help="turns of the chat (6)")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between them (4)")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF; the bundled model by default")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    setup = Setup(given.model or demo_model(), threads=given.threads)
    modes = ("on", "off")
    waits: dict[str, list[float]] = {mode: [] for mode in modes}
    with headstart(setup, "--settle", "on") as on, headstart(setup, "--settle", "off") as off:
        clients = {"on": Client(on), "off": Client(off)}
        for number in range(given.rounds):
            for mode in modes if number % 2 == 0 else reversed(modes):
                waits[mode] += back_to_back(clients[mode], number)
                Console().print(f"[dim]round {number + 1}/{given.rounds}: settle {mode}[/]")
                time.sleep(PAUSE)
    with (
        headstart(setup, "--settle", "on", "--reuse", "exact") as on,
        headstart(setup, "--settle", "off", "--reuse", "exact") as off,
    ):
        chats = {mode: thinking(Client(server), given.turns, given.pause) for mode, server in (("on", on), ("off", off))}
    table = Table("figure", "settle on", "settle off", "ratio", title="settling")
    for share, name in ((50, "median"), (99, "p99")):
        ours, theirs = (statistics.quantiles(waits[mode], n=100)[share - 1] for mode in modes)
        table.add_row(
            f"back to back, {name} time to first token, ms", f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{ours / theirs:.3f}"
        )
    computed = {mode: statistics.median(sample.computed for sample in chats[mode]) for mode in modes}
    first = {mode: statistics.median(sample.ttft for sample in chats[mode]) for mode in modes}
    table.add_row(
        "chat in exact mode, tokens computed a turn",
        *(f"{computed[m]:.0f}" for m in modes),
        f"{computed['on'] / computed['off']:.3f}",
    )
    table.add_row(
        "chat in exact mode, time to first token, ms",
        *(f"{1e3 * first[m]:.0f}" for m in modes),
        f"{first['on'] / first['off']:.3f}",
    )
    table.caption = f"{len(waits['on'])} requests to each; medians of {given.turns - 1} turns"
    Console().print(table)


if __name__ == "__main__":
    main()
