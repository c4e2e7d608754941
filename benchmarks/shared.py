"""A conversation that moves between two servers with one Valkey: `python -m benchmarks.shared`.

Each round, with new texts:

* A conversation of about 7,800 tokens begins at server A. Its next turn goes to server B, after a pause (the turn is settled
  and stored) or at once (back-to-back, under load nothing settles). The same next turn at a third server, cold.
* A reply at B while a conversation is fetched, beside the same while that conversation comes from memory.
* The store under SIGSTOP: the first token of a cold prompt at B, beside one at a server without a store.

Then, without a model: fetching into memory with all checks, beside the client library's bare loop.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import processor
from benchmarks.client import Client, Messages, Sample
from benchmarks.fixtures import of_tests
from benchmarks.restart import spread
from benchmarks.servers import Setup, demo_model, headstart
from benchmarks.workloads import text
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.quota import owner_of
from headstart.tiers.shared.keys import FleetKeys, TagKeys
from headstart.tiers.shared.servers import ServerCard
from headstart.tiers.shared.terms import SharedTerms
from headstart.tiers.shared.tier import StoreTier
from headstart.tiers.shared_tier import FetchRequest

WORDS = 7000
"""Words of the system prompt: about 7,800 tokens."""
REPLY = 24
LONG_REPLY = 256
PAUSE = 4.0
"""Seconds after which a turn is settled and stored."""
Series = dict[str, list[float]]


def begin(name: str) -> Messages:
    return [{"role": "system", "content": text(name, WORDS)}, {"role": "user", "content": "Begin."}]


def after(chat: Messages, sample: Sample, name: str) -> Messages:
    return [*chat, {"role": "assistant", "content": sample.text}, {"role": "user", "content": text(f"next {name}", 20)}]


def moves(clients: dict[str, Client], number: int, found: Series) -> None:
    for how, pause in (("after a pause", PAUSE), ("at once", 0.0)):
        name = f"moves {number} {how}"
        chat = begin(name)
        first = clients["A"].chat(chat, REPLY)
        time.sleep(pause)
        chat = after(chat, first, name)
        moved = clients["B"].chat(chat, REPLY)
        cold = clients["cold"].chat(chat, REPLY)
        assert moved.text == cold.text or how != "after a pause", "the moved conversation has another answer"
        found.setdefault(f"moved {how}: tokens computed", []).append(moved.computed)
        found.setdefault(f"moved {how}: first token, s", []).append(moved.ttft)
        found.setdefault(f"moved {how}: first token / cold", []).append(moved.ttft / cold.ttft)
        for client in clients.values():
            client.server.rest()


def decodes(clients: dict[str, Client], number: int, found: Series) -> None:
    chat = begin(f"decodes {number}")
    first = clients["A"].chat(chat, REPLY)
    time.sleep(PAUSE)
    rates = []
    for turn in ("from the store", "from memory"):
        other = after(chat, first, turn)
        timer = threading.Timer(0.3, lambda other=other: clients["B"].chat(other, 1))
        timer.start()
        rates.append(clients["B"].chat([{"role": "user", "content": f"Count, {turn}."}], LONG_REPLY).rate)
        timer.join()
        clients["B"].server.rest()
    found.setdefault("decoding while fetching / while restoring", []).append(rates[0] / rates[1])


def hangs(clients: dict[str, Client], store: Any, number: int, found: Series) -> None:
    """Before the breaker opens, and after."""
    store.hang()
    try:
        for turn in range(4):
            chat = [{"role": "user", "content": text(f"hangs {number} {turn}", 300)}]
            late = clients["B"].chat(chat, 1).ttft - clients["cold"].chat(chat, 1).ttft
            found.setdefault(f"store hangs, request {turn + 1}: first token later than cold, s", []).append(late)
    finally:
        store.go_on()


def written(client: Client) -> dict[str, float]:
    """The server's counters of the shared tier."""
    wanted = ("headstart:store_saved_bytes_total", "headstart:store_fetched_bytes_total", "headstart:computed_tokens_total")
    lines = httpx.get(f"{client.server.url}/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(wanted)}


def fetching(store: Any, rounds: int, found: Series, size: int = 64 * 23_040, blocks: int = 64) -> None:
    """Fetches `blocks` objects of `size` bytes, as the tier does and as the library's own loop does."""
    random = np.random.default_rng(0)
    keys = TagKeys(FleetKeys.generate())
    terms = SharedTerms(Terms(), float("inf"), keys.names)
    chain = Chain(root_id(b"f" * 32, ""), 64, random.integers(0, 1000, 64 * blocks + 1, np.int32))
    chain_owner = owner_of(chain.root)
    payloads = [random.integers(0, 256, size, np.uint8) for _ in range(blocks)]
    wanted = FetchRequest(chain, range(blocks), frozenset(), b"f" * 32, chain_owner, False, size, 0, 0.0, 0.0)
    card = ServerCard("00" * 8, "", "", "", {})
    tier = StoreTier(store.store(), keys, card=card, room=1 << 40, writes=True, terms=terms)
    for block, payload in enumerate(payloads):
        tier.offer(wanted.label(block), payload)
    while len(tier.answered()) < 1 or tier.counters["saved"] < blocks:
        time.sleep(0.01)
    names = [keys.names.of(chain_owner, "kv", wanted.label(block).key) for block in range(blocks)]
    import valkey

    bare = valkey.Valkey(port=store.port)
    for _ in range(rounds):
        seconds = {}
        for kind in ("bare", "tier"):
            begun = time.perf_counter()
            if kind == "bare":
                for at in range(0, blocks, 8):
                    assert len(bare.mget(names[at : at + 8])) == 8  # type: ignore[arg-type]
            else:
                fetch = tier.fetch(wanted, lambda: None)
                assert fetch is not None
                arrived = 0
                while not fetch.over:
                    arrived += len(fetch.take())
                    time.sleep(0.0005)
                assert arrived + len(fetch.take()) == blocks, tier.counters
            seconds[kind] = time.perf_counter() - begun
        found.setdefault("bare loop, GB/s", []).append(size * blocks / seconds["bare"] / 1e9)
        found.setdefault("fetched with checks, GB/s", []).append(size * blocks / seconds["tier"] / 1e9)
        found.setdefault("fetched / bare loop", []).append(seconds["bare"] / seconds["tier"])
    tier.close(5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--only-fetching", action="store_true", help="only the part without a model")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF; the bundled model by default")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    setup = Setup(given.model or demo_model(), slots=2, threads=given.threads)
    found: Series = {}
    with tempfile.TemporaryDirectory() as folder:
        store = of_tests("stores").ValkeyServer(Path(folder), ["--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"])
        key_file = Path(folder) / "fleet.key"
        FleetKeys.generate().save(key_file)
        shared = ["--shared", store.url, "--shared-key-file", str(key_file)]
        try:
            if not given.only_fetching:
                rounds(setup, shared, store, given.rounds, found)
            fetching(store, 5 * given.rounds, found)
        finally:
            store.kill()
    table = Table("figure", "median (min – max)", title="two servers and one Valkey", caption=processor.caption())
    for figure, values in found.items():
        table.add_row(figure, spread(values))
    Console().print(table)


def rounds(setup: Setup, shared: list[str], store: Any, count: int, found: Series) -> None:
    with headstart(setup, *shared, name="A") as a, headstart(setup, *shared, name="B") as b, headstart(setup, name="cold") as c:
        clients = {server.name: Client(server) for server in (a, b, c)}
        for client in clients.values():
            client.chat([{"role": "user", "content": text("warm up", 200)}], 8)
        steps: list[Callable[[int], None]] = [
            lambda number: moves(clients, number, found),
            lambda number: decodes(clients, number, found),
            lambda number: hangs(clients, store, number, found),
        ]
        for number in range(count):
            for step in steps:
                step(number)
            time.sleep(3)  # the breaker closes again
            clients["B"].chat([{"role": "user", "content": text(f"again {number}", 200)}], 1)
            Console().print(f"[dim]round {number + 1}/{count}[/]")
        computed = {client.server.name: written(client) for client in clients.values()}
        Console().print({name: values for name, values in computed.items() if name != "cold"})


if __name__ == "__main__":
    main()
