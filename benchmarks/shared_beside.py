"""A reply beside a fetch from the shared tier: `python -m benchmarks.shared_beside [--rounds N]`. Needs the extra `shared`.

Each round is a process of its own: the bundled model, and a Valkey that has the KV of three conversations of 7,680 tokens. That
KV is all zeros, because what it says does not change what moving it costs. So nothing need be computed for it.

Three times a reply of 200 tokens runs, and a third of a second after its begin another request comes, whose conversation

* is fetched into memory that the process has never used: the cells of the memory tier, the engine's slot and its buffer;
* is fetched into memory that has been used before, as on a server whose memory tier is full;
* is restored from memory.

The figures are the reply's tokens a second, and the engine thread's seconds for taking in what was fetched, for restoring it,
and for computing the 20 new tokens. The rest of a slower reply is what the reading thread and Valkey take from the two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import processor
from benchmarks.fixtures import of_tests
from benchmarks.restart import spread
from benchmarks.servers import demo_model
from headstart.config import Settings
from headstart.engines import registry
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.tokens import Tokens
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.quota import owner_of
from headstart.serving.request import Delta, Failed, Finished, Report, Request
from headstart.serving.runtime import Runtime
from headstart.tiers.shared.keys import FleetKeys, TagKeys
from headstart.tiers.shared.servers import ServerCard
from headstart.tiers.shared.terms import SharedTerms
from headstart.tiers.shared.tier import StoreTier
from headstart.tiers.shared_tier import FetchRequest

BLOCKS = 120
NEW = 20
REPLY = 200
LATER = 0.3
BUDGET = 360 << 20
"""Bytes of memory: one conversation, and the buffer by which it is loaded."""
PACE = 2.5e-3
"""Seconds of prefill a token that the server starts with. It would not know yet that fetching is worth it."""
HOW = ("fetched, memory never used", "fetched, memory used before", "restored from memory")


class BusyServer:
    """A server with a store, without HTTP."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._random = np.random.default_rng(0)
        scheduler = runtime.scheduler
        scheduler._admission.pace.prefill = PACE
        self._time(scheduler.shared_fetch, "step", "taking in")
        self._time(runtime.engine, "import_kv", "restoring")
        self._time(runtime.engine, "prefill", "computing")
        self.conversations = [self.new(BLOCKS * runtime.engine.traits.block_size) for _ in range(3)]

    def _time(self, owner: Any, name: str, what: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds[what] += time.perf_counter() - begun

        setattr(owner, name, timed)

    def new(self, count: int) -> Tokens:
        return self._random.integers(1000, 40_000, count, np.int32)

    def fill(self, store: Any, keys: FleetKeys) -> None:
        """Puts the KV of the conversations into the store."""
        engine, tags = self.runtime.engine, TagKeys(keys)
        size = engine.traits.block_size * engine.shape.kv_bytes_per_token
        card, terms = ServerCard("00" * 8, "", "", "", {}), SharedTerms(Terms(), float("inf"), tags.names)
        tier = StoreTier(store, tags, card=card, room=1 << 40, writes=True, terms=terms)
        for tokens in self.conversations:
            chain = Chain(root_id(engine.fingerprint, ""), engine.traits.block_size, tokens)
            owner, every = owner_of(chain.root), range(BLOCKS)
            wanted = FetchRequest(chain, every, frozenset(), engine.fingerprint, owner, False, size, 0, 0.0, 0.0)
            for block in every:
                tier.offer(wanted.label(block), np.zeros(size, np.uint8))
        while tier.counters["saved"] < BLOCKS * len(self.conversations):
            time.sleep(0.02)
        tier.close(5)

    def ask(self, tokens: Tokens, reply: int) -> tuple[list[float], Report]:
        """When each part of the reply came, and the report."""
        at, ended, over = list[float](), list[Any](), threading.Event()

        def sink(event: Any) -> None:
            if isinstance(event, Delta):
                at.append(time.perf_counter())
            elif isinstance(event, Finished | Failed):
                ended.append(event)
                over.set()

        prompt = self.runtime.text_prompt(tokens.tolist())
        self.runtime.submit(Request(prompt, GenerationParams(max_tokens=reply, ignore_eos=True)), sink)
        over.wait()
        return at, ended[0].report

    def go_on(self, number: int) -> Report:
        """The next turn of a conversation."""
        return self.ask(np.concatenate([self.conversations[number], self.new(NEW)]), 1)[1]

    def empty_slots(self) -> None:
        asks = [threading.Thread(target=self.ask, args=(self.new(12), 8)) for _ in range(2)]
        for one in asks:
            one.start()
        for one in asks:
            one.join()

    def beside(self, number: int, tier: str) -> dict[str, float]:
        """A reply, while a conversation comes from a tier."""
        self.empty_slots()
        time.sleep(0.5)
        self.seconds.clear()
        reports: list[Report] = []
        other = threading.Timer(LATER, lambda: reports.append(self.go_on(number)))
        other.start()
        at, _ = self.ask(self.new(12), REPLY)
        other.join()
        assert reports[0].tiers.get(tier, 0) > 0.8 * BLOCKS * self.runtime.engine.traits.block_size, reports[0]
        return {"tokens a second": (len(at) - 1) / (at[-1] - at[0]), **self.seconds}


@contextmanager
def busy_server(folder: Path) -> Iterator[BusyServer]:
    store, key_file = of_tests("stores").ValkeyServer(folder), folder / "fleet.key"
    keys = FleetKeys.generate()
    keys.save(key_file)
    options: dict[str, Any] = {"ctx": 8192, "slots": 2, "threads": 2, "memory_budget": BUDGET, "settle": "off"}
    settings = Settings(model=str(demo_model()), shared=store.url, shared_key_file=key_file, **options)
    try:
        with Runtime(lambda: registry.load(settings.engine_options(), None), settings) as runtime:
            server = BusyServer(runtime)
            server.fill(store.store(), keys)
            yield server
    finally:
        store.kill()


def one_round() -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder, busy_server(Path(folder)) as server:
        server.ask(server.new(12), 30)
        found = [server.beside(0, "shared")]
        server.go_on(1)  # in the other slot, and in cells that the first conversation has used
        return [*found, server.beside(2, "shared"), server.beside(2, "memory")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_beside", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_round()), flush=True)
        os._exit(0)
    rounds = []
    for _ in range(options.rounds):
        command = [sys.executable, "-m", "benchmarks.shared_beside", "--one"]
        rounds.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))
    names = list(rounds[0][0])
    table = Table("a conversation beside the reply", *names, "/ restored", title=f"{processor.name()}, two cores")
    for number, how in enumerate(HOW):
        ratios = [one[number][names[0]] / one[-1][names[0]] for one in rounds]
        table.add_row(how, *(spread([one[number][name] for one in rounds]) for name in names), spread(ratios))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
