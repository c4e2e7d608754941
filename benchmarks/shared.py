"""Servers with one store: `python -m benchmarks.shared`. Every row of docs/benchmarks.md, "The shared tier".

Each round, with new texts, on servers A and B with one Valkey, and a third one without, which computes cold:

* A conversation of about 7,800 tokens begins at A, and its next turn goes to B: after a pause (the turn is settled and stored),
  at once, after four turns while A is never idle (nothing is settled), and after A was stopped.
* A reply at B while a conversation is fetched, beside the same while that conversation comes from memory. A reply at A while a
  conversation is written, beside the same at the server without a store.
* The store under SIGSTOP, and killed: the first token at B, beside one at the server without a store; prompts that B has.

Then the bytes that Valkey and S3 get for each byte that is computed, and, without a model: fetching into memory with all
checks, beside the client library's bare loop.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
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
from headstart.tiers.shared.address import open_store
from headstart.tiers.shared.keys import FleetKeys, TagKeys
from headstart.tiers.shared.servers import ServerCard
from headstart.tiers.shared.terms import SharedTerms
from headstart.tiers.shared.tier import StoreTier
from headstart.tiers.shared_tier import FetchRequest

WORDS = 7000
"""Words of the system prompt: about 7,800 tokens."""
REPLY = 24
LONG_REPLY = 256
BUSY_TURNS = 4
PAUSE = 4.0
"""Seconds after which a turn is settled and stored."""
Series = dict[str, list[float]]


def begin(name: str, words: int = WORDS) -> Messages:
    return [{"role": "system", "content": text(name, words)}, {"role": "user", "content": "Begin."}]


def after(chat: Messages, sample: Sample, name: str) -> Messages:
    return [*chat, {"role": "assistant", "content": sample.text}, {"role": "user", "content": text(f"next {name}", 20)}]


def add(found: Series, figure: str, value: float) -> None:
    found.setdefault(figure, []).append(value)
    Console(width=150).print(f"[dim]{figure}: {value:.4g}[/]")


@contextmanager
def busy(client: Client) -> Iterator[None]:
    """Another conversation replies all the time."""
    over = threading.Event()

    def reply() -> None:
        number = 0
        while not over.is_set():
            client.chat([{"role": "user", "content": text(f"busy {number}", 20)}], 64)
            number += 1

    thread = threading.Thread(target=reply)
    thread.start()
    yield
    over.set()
    thread.join()


class Fleet:
    """The servers of a run.

    Args:
        shared: options of a server with the store.
    """

    def __init__(self, setup: Setup, shared: list[str], store: Any, found: Series, stack: ExitStack) -> None:
        self.setup, self.shared, self.store, self.found = setup, shared, store, found
        self.a, self.b = (Client(stack.enter_context(headstart(setup, *shared, name=name))) for name in "AB")
        self.cold = Client(stack.enter_context(headstart(setup, name="cold")))
        for client in (self.a, self.b, self.cold):
            client.chat([{"role": "user", "content": text("warm up", 200)}], 8)

    def rest(self) -> None:
        for client in (self.a, self.b, self.cold):
            client.server.rest()

    # ── a conversation that moves ────────────────────────────────────────────────────────────────────────────────────

    def moves(self, number: int) -> None:
        for how, pause in (("after a pause", PAUSE), ("at once", 0.0)):
            chat = begin(f"moves {number} {how}")
            first = self.a.chat(chat, REPLY)
            time.sleep(pause)
            self._moved(how, after(chat, first, f"{number} {how}"), same=pause > 0)

    def moves_under_load(self, number: int) -> None:
        chat = begin(f"load {number}")
        with busy(self.a):
            for turn in range(BUSY_TURNS):
                sample = self.a.chat(chat, REPLY)
                chat = after(chat, sample, f"{number} {turn}")
            self._moved(f"after {BUSY_TURNS} turns under load", chat)

    def moves_from_a_stopped_server(self, number: int) -> None:
        chat = begin(f"stopped {number}")
        with headstart(self.setup, *self.shared, name="stopped") as server:
            first = Client(server).chat(chat, REPLY)
            begun = time.perf_counter()
            server.process.terminate()
            server.process.wait()
            add(self.found, "a server stops right after a reply, s", time.perf_counter() - begun)
        self._moved("after its server stopped", after(chat, first, f"stopped {number}"))

    def _moved(self, how: str, chat: Messages, same: bool = False) -> None:
        moved = self.b.chat(chat, REPLY)
        cold = self.cold.chat(chat, REPLY)
        assert moved.text == cold.text or not same, "the moved conversation has another answer"
        add(self.found, f"moved {how}: tokens computed", moved.computed)
        add(self.found, f"moved {how}: first token / cold", moved.ttft / cold.ttft)
        self.rest()

    # ── beside a reply ───────────────────────────────────────────────────────────────────────────────────────────────

    def decodes(self, number: int) -> None:
        chat = begin(f"decodes {number}")
        first = self.a.chat(chat, REPLY)
        time.sleep(PAUSE)
        self.a.server.rest()
        rates = []
        for turn in ("from the store", "from memory"):
            other = after(chat, first, turn)
            computed: list[int] = []
            timer = threading.Timer(0.3, lambda other=other, to=computed: to.append(self.b.chat(other, 1).computed))
            timer.start()
            rates.append(self.b.chat([{"role": "user", "content": f"Count, {turn}."}], LONG_REPLY).rate)
            timer.join()
            self.b.server.rest()
            add(self.found, f"the conversation {turn} beside the reply: tokens computed", computed[0])
        add(self.found, f"{LONG_REPLY} tokens while a conversation is fetched / restored from memory", rates[0] / rates[1])
        rates = []
        for client in (self.a, self.cold):
            client.chat(begin(f"written {number}"), 1)  # its blocks leave the slot, and for the store, during the next reply
            rates.append(client.chat([{"role": "user", "content": "Count."}], LONG_REPLY).rate)
            client.server.rest()
        add(self.found, f"{LONG_REPLY} tokens while a conversation is written / without a store", rates[0] / rates[1])

    # ── a store in trouble ───────────────────────────────────────────────────────────────────────────────────────────

    def hangs(self, number: int) -> None:
        """Before the breaker opens, and after."""
        self.store.hang()
        try:
            for turn in range(4):
                self._late(f"the store hangs, request {turn + 1}", f"hangs {number} {turn}")
        finally:
            self.store.go_on()
        self._closes()

    def dies(self, number: int) -> None:
        """kill -9. Prompts that B has, and prompts that are new."""
        here = begin(f"here {number}", 1500)
        for client in (self.b, self.cold):
            client.chat(here, 1)
        self.rest()
        before = [self._hit(client, here) for client in (self.b, self.cold)]
        self.store.kill()
        for turn in range(3):
            self._late("the store is dead, a new prompt", f"dies {number} {turn}")
        self.rest()
        slower, control = (self._hit(client, here) / was for client, was in zip((self.b, self.cold), before, strict=True))
        add(self.found, "the store is dead: first token of a local hit / before", slower)
        add(self.found, "the same at the server without a store, which lost nothing", control)
        self.store.start()
        begun = time.perf_counter()
        self._closes()
        add(self.found, "the store is back: until something is fetched again, s", time.perf_counter() - begun)

    def _hit(self, client: Client, chat: Messages) -> float:
        """Seconds to the first token of a prompt that the server has, in the middle of several."""
        return float(np.median([client.chat(chat, 1).ttft for _ in range(9)]))

    def _late(self, what: str, name: str) -> None:
        chat = [{"role": "user", "content": text(name, 300)}]
        late = self.b.chat(chat, 1).ttft - self.cold.chat(chat, 1).ttft
        add(self.found, f"{what}: first token later than cold, s", late)

    def _closes(self) -> None:
        """Waits until B fetches again what A has."""
        before, turn = self.b_fetched, 0
        while self.b_fetched == before:
            chat = [{"role": "user", "content": text(f"again {time.time()} {turn}", 200)}]
            self.a.chat(chat, 1)
            time.sleep(0.3)
            self.b.chat(chat, 1)
            turn += 1
        self.rest()

    @property
    def b_fetched(self) -> float:
        return metric(self.b, "headstart:store_fetched_total", "shared")


def metric(client: Client, name: str, tier: str = "") -> float:
    """A counter of a server; 0 if it has not counted yet."""
    lines = httpx.get(f"{client.server.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and (not tier or f'"{tier}"' in line))


def computed(clients: list[Client], kv_bytes_per_token: int) -> float:
    """Bytes of KV that these servers have computed."""
    kinds = ("computed", "settled")
    return kv_bytes_per_token * sum(metric(client, f"headstart:{kind}_tokens_total") for client in clients for kind in kinds)


def written(clients: list[Client], kv_bytes_per_token: int) -> float:
    """Bytes that these servers have written to their store, for each byte that they have computed."""
    saved = sum(metric(client, "headstart:store_saved_bytes_total", "shared") for client in clients)
    return saved / computed(clients, kv_bytes_per_token)


def conversations(client: Client, number: int) -> None:
    """Three conversations of five turns, in turn, with one system prompt."""
    common = begin(f"common {number}", 600)[:1]
    chats = [[*common, {"role": "user", "content": text(f"{number} {one}", 300)}] for one in range(3)]
    for turn in range(5):
        for one, chat in enumerate(chats):
            chats[one] = after(chat, client.chat(chat, REPLY), f"{number} {one} {turn}")
    time.sleep(PAUSE)


def on_s3(setup: Setup, key_file: Path, found: Series, rounds: int, kv: int) -> None:
    """The same with S3 (SeaweedFS)."""
    stores = of_tests("stores")
    os.environ |= stores.S3_ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        store = stores.SeaweedServer(Path(folder))
        try:
            shared = ["--shared", store.url(), "--shared-key-file", str(key_file)]
            with headstart(setup, *shared, name="S3") as server, headstart(setup, *shared, name="other") as second:
                client, other = Client(server), Client(second)
                for number in range(rounds):
                    conversations(client, number)
                add(found, "S3: bytes written / computed", written([client], kv))
                chat = begin("s3")
                first = client.chat(chat, REPLY)
                time.sleep(PAUSE)
                chat = after(chat, first, "s3")
                client.chat(chat, REPLY)  # reused, so its head is stored
                time.sleep(PAUSE)
                moved = other.chat(after(chat, first, "s3 again"), REPLY)
                add(found, "S3: tokens computed of a conversation that moves after its second turn", moved.computed)
                bytes_computed = computed([client, other], kv)
            with closing(open_store(store.url(), 60.0)) as left:
                bytes_there = sum(one.size for one in left.objects() if "/kv/" in one.name or "/state/" in one.name)
            add(found, "S3: bytes in the store / computed, after both servers have stopped", bytes_there / bytes_computed)
        finally:
            store.kill()


def fetching(store: Any, rounds: int, found: Series, size: int, blocks: int = 64) -> None:
    """Fetches `blocks` objects of `size` bytes into memory, as the tier does, and as the library's own loops do."""
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
    cells = np.zeros((blocks, size), np.uint8)
    import valkey

    bare = valkey.Valkey(port=store.port)
    for _ in range(rounds):
        seconds = {}
        for kind in ("one by one", "eight at a time", "tier"):
            begun = time.perf_counter()
            if kind == "one by one":
                assert all(bare.get(name) is not None for name in names)
            elif kind == "eight at a time":
                for at in range(0, blocks, 8):
                    assert len(bare.mget(names[at : at + 8])) == 8  # type: ignore[arg-type]
            else:
                fetch = tier.fetch(wanted, lambda: None)
                assert fetch is not None
                arrived = 0
                while not fetch.over:
                    for one in fetch.take():
                        cells[arrived][:] = one.payload  # as the engine thread does
                        arrived += 1
                    time.sleep(0.0005)
                assert arrived == blocks, tier.counters
            seconds[kind] = time.perf_counter() - begun
        loop = min(seconds["one by one"], seconds["eight at a time"])
        add(found, "the library's bare loop, GB/s", size * blocks / loop / 1e9)
        add(found, "fetched into cells with checks, GB/s", size * blocks / seconds["tier"] / 1e9)
        add(found, "fetched / bare loop", loop / seconds["tier"])
    tier.close(5)


PARTS = ("moves", "moves_under_load", "moves_from_a_stopped_server", "decodes", "hangs", "dies")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--only", nargs="*", choices=[*PARTS, "written", "s3", "fetching"], help="only these parts")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF; the bundled model by default")
    parser.add_argument("--kv-bytes", type=int, default=23_040, help="bytes of KV a token (23040, of the bundled model)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=8192)
    given = parser.parse_args()
    setup = Setup(given.model or demo_model(), ctx=given.ctx, slots=2, threads=given.threads)
    parts = given.only or [*PARTS, "written", "s3", "fetching"]
    found: Series = {}
    with tempfile.TemporaryDirectory() as folder:
        store = of_tests("stores").ValkeyServer(Path(folder), ["--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"])
        key_file = Path(folder) / "fleet.key"
        FleetKeys.generate().save(key_file)
        shared = ["--shared", store.url, "--shared-key-file", str(key_file)]
        try:
            if set(parts) & {*PARTS, "written"}:
                with_servers(setup, shared, store, given.rounds, found, parts, given.kv_bytes)
            if "s3" in parts:
                on_s3(setup, key_file, found, given.rounds, given.kv_bytes)
            if "fetching" in parts:
                fetching(store, 5 * given.rounds, found, 64 * given.kv_bytes)
        finally:
            store.kill()
    table = Table("figure", "median (min – max)", title="servers with one store", caption=processor.caption())
    for figure, values in found.items():
        table.add_row(figure, spread(values))
    Console(width=150).print(table)


def with_servers(setup: Setup, shared: list[str], store: Any, count: int, found: Series, parts: list[str], kv: int) -> None:
    with ExitStack() as stack:
        fleet = Fleet(setup, shared, store, found, stack)
        steps: list[Callable[[int], None]] = [getattr(fleet, part) for part in PARTS if part in parts]
        for number in range(count):
            for step in steps:
                step(number)
                Console(width=150).print(f"[dim]round {number + 1}: {step.__name__}[/]")
            if "written" in parts:
                conversations(fleet.a, number)
        if "written" in parts:
            add(found, "Valkey: bytes written / computed", written([fleet.a, fleet.b], kv))


if __name__ == "__main__":
    main()
