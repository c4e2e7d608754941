"""A reply beside a fetch from the shared tier: `python -m benchmarks.shared_beside [--rounds N]`. Needs the extra `shared`.

Each round is a process of its own: the bundled model, and a Valkey that has the KV of three conversations of 7,680 tokens. That
KV is all zeros, because what it says does not change what moving it costs. So nothing need be computed for it.

Three times a reply of 200 tokens runs, and a third of a second after its begin another request comes, whose conversation

* is fetched into memory that the process has never used: the cells of the memory tier, the engine's slot and its buffer;
* is fetched into memory that has been used before, as on a server whose memory tier is full;
* is restored from memory.

Then a reply runs alone, and another one while a conversation is written to the store, as after its prompt was computed.

The figures are the reply's tokens a second, and the engine thread's seconds for taking in what was fetched, for restoring it,
and for computing the 20 new tokens; the seconds of processor time of the tier's threads and of Valkey; and the seconds for
which the engine thread was ready to run and had no core. Valkey has the same two cores here, which it would not have in a
fleet. So the last column has a second ratio: as if the reply had been shorter by Valkey's processor time.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
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
HOW = (
    *("fetched, memory never used", "fetched, memory used before", "restored from memory"),
    *("written to the store", "none"),
)
BESIDE = (2, 2, 2, 4, 4)
"""For each of these, which it is compared with."""
RATE = "tokens a second"


class BusyServer:
    """A server with a store, without HTTP."""

    def __init__(self, runtime: Runtime, server: Any) -> None:
        self.runtime = runtime
        self.server = server
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

    def beside(self, what: Callable[[], object]) -> dict[str, float]:
        """A reply, and something else that begins soon after it."""

        def later() -> None:
            time.sleep(LATER)
            what()

        self.empty_slots()
        time.sleep(0.5)
        self.seconds.clear()
        before = self.processor_seconds()
        with ThreadPoolExecutor(1) as thread:
            other = thread.submit(later)
            at, _ = self.ask(self.new(12), REPLY)
            other.result()
        after = self.processor_seconds()
        used = {name: after[name] - before[name] for name in after}
        return {RATE: (len(at) - 1) / (at[-1] - at[0]), "seconds": at[-1] - at[0], **self.seconds, **used}

    def come(self, number: int, tier: str) -> None:
        """The next turn of a conversation, which must come from a tier."""
        report = self.go_on(number)
        assert report.tiers.get(tier, 0) > 0.8 * BLOCKS * self.runtime.engine.traits.block_size, report

    def lose(self) -> None:
        """The store loses everything."""
        with closing(self.server.store()) as store:
            store.delete([one.name for one in store.objects()])
        self.runtime.cache.shared._link.stored.clear()  # type: ignore[attr-defined]  # else nothing would be offered again

    def write(self, number: int) -> None:
        """Offers a conversation that is in memory to the store."""
        tokens, engine = self.conversations[number], self.runtime.engine
        chain = Chain(root_id(engine.fingerprint, ""), engine.traits.block_size, tokens)
        counters = self.runtime.cache.shared.counters
        goal = counters["saved"] + BLOCKS
        self.runtime.scheduler.call(lambda: self.runtime.cache.store.shared_offer.reused(chain.ids)).result()
        while counters["saved"] < goal:
            time.sleep(0.02)

    def processor_seconds(self) -> dict[str, float]:
        """Of the tier's threads, and of the store; and for how long the engine thread has waited for a core."""
        threads = {one.name: one.native_id for one in threading.enumerate()}
        tier = sum(_times(f"self/task/{id}")[0] for name, id in threads.items() if name.startswith("headstart-shared"))
        (engine,) = (id for name, id in threads.items() if name.startswith("headstart-engine"))
        return {"tier": tier, "store": _times(self.server.process.pid)[0], "no core": _times(f"self/task/{engine}")[1]}


@contextmanager
def busy_server(folder: Path, threads: int) -> Iterator[BusyServer]:
    store, key_file = of_tests("stores").ValkeyServer(folder), folder / "fleet.key"
    keys = FleetKeys.generate()
    keys.save(key_file)
    options: dict[str, Any] = {"ctx": 8192, "slots": 2, "threads": threads, "memory_budget": BUDGET, "settle": "off"}
    settings = Settings(model=str(demo_model()), shared=store.url, shared_key_file=key_file, **options)
    try:
        with Runtime(lambda: registry.load(settings.engine_options(), None), settings) as runtime:
            server = BusyServer(runtime, store)
            server.fill(store.store(), keys)
            yield server
    finally:
        store.kill()


def one_round(threads: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder, busy_server(Path(folder), threads) as server:
        server.ask(server.new(12), 30)
        found = [server.beside(lambda: server.come(0, "shared"))]
        server.go_on(1)  # in the other slot, and in cells that the first conversation has used
        found += [server.beside(partial(server.come, 2, tier)) for tier in ("shared", "memory")]
        server.lose()
        return [*found, server.beside(lambda: server.write(2)), server.beside(lambda: None)]


def _times(process: str | int) -> tuple[float, float]:
    """Seconds for which a process or thread has run, and for which it was ready and had no core."""
    paths = [Path(f"/proc/{process}/schedstat")]
    if isinstance(process, int):
        paths = list(Path(f"/proc/{process}/task").glob("*/schedstat"))
    found = [path.read_text().split() for path in paths]
    return sum(int(one[0]) for one in found) / 1e9, sum(int(one[1]) for one in found) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_beside", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of the engine (2); with 1 a core of two is free for the tier")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_round(options.threads)), flush=True)
        os._exit(0)
    rounds = []
    for _ in range(options.rounds):
        command = [sys.executable, "-m", "benchmarks.shared_beside", "--one", "--threads", str(options.threads)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:  # a conversation did not come from where it should: the report says why
            Console(width=200).print("a round is left out:", ended.stderr.splitlines()[-1:])
        else:
            rounds.append(json.loads(ended.stdout.splitlines()[-1]))
    names = (RATE, "taking in", "restoring", "computing", "tier", "store", "no core")
    table = Table("a conversation beside the reply", *names, "ratio (without the store)", caption=processor.caption())
    for number, how in enumerate(HOW):
        ratios, without = list[float](), list[float]()
        for one in rounds:
            this, other = one[number], one[BESIDE[number]]
            ratios.append(this[RATE] / other[RATE])
            without.append(other["seconds"] / (this["seconds"] - this["store"]))
        shown = (spread([one[number].get(name, 0.0) for one in rounds]) for name in names)
        table.add_row(how, *shown, f"{spread(ratios)} ({spread(without)})")
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
