"""Short messages deep in a conversation: how long until the first token? `python -m benchmarks.turns`.

Each round: a conversation of about 6,700 tokens, then turns of so many words, each answered shortly and sent back with what
was said. Ours (in fast mode) and a native llama-server in turn, with the same texts; ratios are of pairs.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.client import Client, Messages, Sample
from benchmarks.restart import spread
from benchmarks.servers import Server, Setup, demo_model, headstart, llama_server
from benchmarks.workloads import text

WORDS = 6000
"""Of the system prompt."""
TURNS = (6, 16, 28, 40, 60, 120)
"""Words of each message."""
REPLY = 8


def talk(server: Server, number: int) -> list[Sample]:
    client, found = Client(server), list[Sample]()
    chat: Messages = [{"role": "system", "content": text(f"turns {number}", WORDS)}]
    for turn, words in enumerate((4, *TURNS)):
        chat.append({"role": "user", "content": text(f"turn {number} {turn}", words)})
        found.append(client.chat(chat, REPLY))
        chat.append({"role": "assistant", "content": found[-1].text})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="paired rounds (3)")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF; the bundled model by default")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    setup = Setup(given.model or demo_model(), slots=1, threads=given.threads)
    servers = {"headstart": headstart, "llama-server": llama_server}
    found: dict[str, list[list[Sample]]] = {name: [] for name in servers}
    for number in range(given.rounds):
        for name in servers if number % 2 == 0 else reversed(servers):
            with servers[name](setup) as server:
                found[name].append(talk(server, number))
            Console().print(f"[dim]round {number + 1}/{given.rounds}: {name}[/]")
    table = Table("turn", "computed, tokens", *(f"{name}: first token, s" for name in found), "ratio of pairs")
    for turn, words in enumerate(("first", *TURNS)):
        samples = [[talked[turn] for talked in found[name]] for name in found]
        computed = " / ".join(f"{statistics.median(one.computed for one in column):.0f}" for column in samples)
        ours, theirs = ([one.ttft for one in column] for column in samples)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        label = words if words == "first" else f"{words} words"
        table.add_row(str(label), computed, *map(spread, (ours, theirs, ratios)))
    table.caption = "medians (min – max)"
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
