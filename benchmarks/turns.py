"""The time to the first token for short messages deep in a conversation: `python -m benchmarks.turns`.

Each round: a conversation of about 6,700 tokens, then turns of so many words with short replies, which are sent back. headstart
(in fast mode) and a native llama-server run in turn, with the same texts. Ratios are of pairs.

With `--cold`: new prompts of about 1,800 tokens, to both servers in alternating order. Their open tail is such a short message
too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import processor
from benchmarks.client import Client, Messages, Sample
from benchmarks.restart import spread
from benchmarks.servers import Server, Setup, demo_model, headstart, llama_server
from benchmarks.workloads import text

WORDS = 6000
"""Words of the system prompt."""
TURNS = (6, 16, 28, 40, 60, 120)
"""Words of each message."""
COLD_WORDS = 1620
"""Words of a cold prompt, which has about 1,800 tokens with its template."""
REPLY = 8
PAUSE = 2.0
"""Seconds before a cold prompt, so that headstart has settled and stored the last one."""
SERVERS = ("headstart", "llama-server")


def talk(server: Server, number: int) -> list[Sample]:
    client, found = Client(server), list[Sample]()
    chat: Messages = [{"role": "system", "content": text(f"turns {number}", WORDS)}]
    for turn, words in enumerate((4, *TURNS)):
        chat.append({"role": "user", "content": text(f"turn {number} {turn}", words)})
        found.append(client.chat(chat, REPLY))
        chat.append({"role": "assistant", "content": found[-1].text})
    return found


def turns(setup: Setup, rounds: int, options: Sequence[str]) -> Table:
    found: dict[str, list[list[Sample]]] = {name: [] for name in SERVERS}
    for number in range(rounds):
        for name in SERVERS if number % 2 == 0 else SERVERS[::-1]:
            with headstart(setup, *options) if name == "headstart" else llama_server(setup) as server:
                found[name].append(talk(server, number))
            Console().print(f"[dim]round {number + 1}/{rounds}: {name}[/]")
    labels = dict(enumerate(("first", *(f"{words} words" for words in TURNS))))
    return _table({labels[turn]: {name: [talked[turn] for talked in found[name]] for name in found} for turn in labels})


def cold(setup: Setup, rounds: int, options: Sequence[str]) -> Table:
    with headstart(setup, *options) as ours, llama_server(setup) as theirs:
        clients = [Client(ours), Client(theirs)]
        for client in clients:
            client.chat([{"role": "user", "content": "Warm up."}], REPLY)
        found: dict[str, list[Sample]] = {name: [] for name in SERVERS}
        for number in range(rounds):
            # As in practice, the last block ends at another place in each round.
            chat: Messages = [{"role": "system", "content": text(f"cold {number}", COLD_WORDS + 9 * (number % 7))}]
            chat.append({"role": "user", "content": "Begin."})
            for client in clients if number % 2 == 0 else clients[::-1]:
                time.sleep(PAUSE)
                found[client.server.name].append(client.chat(chat, REPLY))
            Console().print(f"[dim]round {number + 1}/{rounds}[/]")
    by_round = {f"prompt {number + 1}": {name: [found[name][number]] for name in found} for number in range(rounds)}
    return _table({**by_round, "all": found})


def _table(found: Mapping[str, Mapping[str, Sequence[Sample]]]) -> Table:
    """`found`: label → server → its samples, in pairs."""
    table = Table("turn", "computed, tokens", *(f"{name}: first token, s" for name in SERVERS), "ratio of pairs")
    for label, samples in found.items():
        columns = [samples[name] for name in SERVERS]
        computed = " / ".join(f"{statistics.median(one.computed for one in column):.0f}" for column in columns)
        ours, theirs = ([one.ttft for one in column] for column in columns)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        table.add_row(label, computed, *map(spread, (ours, theirs, ratios)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("--cold", action="store_true", help="prompts that nobody has seen")
    parser.add_argument("--rounds", type=int, default=None, help="paired rounds (3; 7 cold ones)")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF; the bundled model by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--option", action="append", default=[], help="another option for headstart, e.g. --option=--llama-lib=LIBLLAMA"
    )
    given = parser.parse_args()
    setup = Setup(given.model or demo_model(), slots=1, threads=given.threads)
    before = processor.caption()
    table = cold(setup, given.rounds or 7, given.option) if given.cold else turns(setup, given.rounds or 3, given.option)
    table.caption = f"medians (min – max)\n{before}"
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
