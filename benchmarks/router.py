"""What the router costs: `python -m benchmarks.router [--replicas 100 1000] [--blocks 8192]`.

Each replica holds conversations of 30,000 tokens, which share a system prompt over the whole fleet. Measured for requests of
30,000 tokens, in one thread, from token ids on:

* chain: hashing the ids of the prompt's blocks;
* choose: looking up what each replica holds, costs, and booking;
* report: applying the replica's reports that the request arrived, and that its blocks were computed and others evicted.

A *turn* continues a known conversation by a few blocks. A *new* prompt shares the system prompt only. With `--front`, the time
before that too, with the bundled model: JSON body, chat template and tokenising, for a known and for a new conversation.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.overhead import conversation
from benchmarks.processor import caption
from benchmarks.servers import demo_model
from benchmarks.workloads import text
from headstart.api.body import parse
from headstart.api.openai_chat.schema import ChatRequest
from headstart.chat.chat_model import ChatModel
from headstart.chat.messages import conversation_of
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.fleet.router.chains import PromptChain, chain_of
from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import BlockKey, Load, ReplicaReport, Speed, Tier
from headstart.fleet.router.router import ChosenReplica, FleetRouter
from headstart.interfaces.conversation import Conversation
from headstart.interfaces.tokens import Tokens, as_tokens
from headstart.prefix_cache.blocks import root_id
from headstart.serving.runtime import Runtime

Result = TypeVar("Result")
BLOCK = 64
TOKENS = 30_000
SYSTEM = 20
"""Blocks of the common system prompt."""
ROOT = root_id(b"benchmark", "")
SPEED = Speed(Curve(1e-4, 2e-9), fetch=1e-5)


@dataclass
class Figures:
    """Seconds of each request, by step."""

    chain: list[float] = field(default_factory=list)
    choose: list[float] = field(default_factory=list)
    report: list[float] = field(default_factory=list)


class Fleet:
    """A router that knows replicas full of conversations."""

    def __init__(self, replicas: int, blocks: int) -> None:
        self.router = FleetRouter()
        self.dice = random.Random(0)
        self.system = self.fresh(SYSTEM * BLOCK)
        self.sequences = [0] * replicas
        self.prompts: list[list[Tokens]] = []
        self.now = 0.0
        self.held = 0
        each = max(1, blocks // (TOKENS // BLOCK))
        for number in range(replicas):
            seeds = [self.fresh(BLOCK) for _ in range(each)]
            self.prompts.append(seeds)
            keys = dict.fromkeys(key for seed in seeds for key in self.chain(self.text(seed)).keys)
            self.held += len(keys)
            self.report(number, speed=SPEED, added={Tier.MEMORY: list(keys), Tier.SHARED: list(keys)})

    def fresh(self, tokens: int) -> Tokens:
        return as_tokens(np.frombuffer(self.dice.randbytes(4 * tokens), np.int32) & 0xFFFF)

    def text(self, seed: Tokens, more: int = 0) -> Tokens:
        """A conversation: it follows from its seed, so that only the seed must be kept."""
        known = np.random.default_rng(int(seed[0]) << 16 | int(seed[1])).integers(0, 1 << 16, TOKENS, np.int32)
        return as_tokens(np.concatenate([self.system, known[: TOKENS - len(self.system)], self.fresh(more)]))

    def chain(self, tokens: Tokens) -> PromptChain:
        return chain_of(ROOT, BLOCK, tokens)

    def report(self, number: int, **what: object) -> None:
        report = ReplicaReport(str(number), 0, self.sequences[number], **what)  # type: ignore[arg-type]
        self.sequences[number] += 1
        assert not self.router.report(report, self.now)

    def measure(self, texts: Iterator[Tokens], requests: int) -> Figures:
        figures = Figures()
        for number, tokens in zip(range(requests), texts, strict=False):
            self.now += 0.001
            request = f"request {number}"
            chain = timed(figures.chain, partial(self.chain, tokens))
            choice = timed(figures.choose, partial(self.router.choose, request, chain, self.now))
            assert choice is not None
            timed(figures.report, partial(self.served, request, chain, choice))
        return figures

    def served(self, request: str, chain: PromptChain, choice: ChosenReplica) -> None:
        """The replica's two reports of a request. As many blocks are evicted as are added."""
        number = int(choice.replica)
        self.report(number, load=Load(prefills=(1.0,)), arrived=(request,))
        new = chain.keys[choice.reused // BLOCK :]
        keys: list[BlockKey] = new
        self.report(number, added={Tier.MEMORY: keys}, arrived=(request,), done=(request,))
        self.now += 0.001
        self.report(number, removed={Tier.MEMORY: keys})

    def turns(self) -> Iterator[Tokens]:
        while True:
            yield self.text(self.dice.choice(self.dice.choice(self.prompts)), 3 * BLOCK)

    def new(self) -> Iterator[Tokens]:
        while True:
            yield self.text(self.fresh(BLOCK))


def timed(into: list[float], work: Callable[[], Result]) -> Result:
    begun = time.perf_counter()
    result = work()
    into.append(time.perf_counter() - begun)
    return result


def micro(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e6:,.0f} ({np.percentile(values, 90) * 1e6:,.0f})"


def core(replicas: list[int], blocks: int, requests: int) -> Table:
    columns = ("replicas", "blocks held", "memory", "prompt", "chain", "choose", "report", "requests/s", "with reports")
    table = Table(*columns, title=f"Router: µs, median (90th percentile); {caption()}")
    for count in replicas:
        gc.collect()
        before = psutil.Process().memory_info().rss
        fleet = Fleet(count, blocks)
        gc.collect()
        used = psutil.Process().memory_info().rss - before
        for kind, texts in (("turn", fleet.turns()), ("new", fleet.new())):
            figures = fleet.measure(texts, requests)
            way = statistics.mean(figures.chain) + statistics.mean(figures.choose)
            table.add_row(
                f"{count:,}",
                f"{fleet.held:,}",
                f"{used / 2**20:,.0f} MiB ({used / fleet.held:.0f} B a block)",
                kind,
                micro(figures.chain),
                micro(figures.choose),
                micro(figures.report),
                f"{1 / way:,.0f}",
                f"{1 / (way + statistics.mean(figures.report)):,.0f}",
            )
        del fleet
    return table


def read(body: bytes) -> Conversation:
    return conversation_of(parse(ChatRequest, body), "")


def front(rounds: int) -> Table:
    """JSON, template and tokenising with the bundled model."""
    table = Table("conversation", "tokens", "JSON", "template and tokenising", title=f"ms, median (most); {caption()}")
    settings = Settings(str(demo_model()), ctx=TOKENS + 4096, slots=1, memory_budget=1 << 28)
    with Runtime(lambda: LlamaEngine.load(settings.engine_options()), settings) as runtime:
        model, chat = ChatModel(runtime), conversation(runtime, TOKENS)
        for kind in ("known", "new"):
            parsing, prompting, tokens = list[float](), list[float](), 0
            for number in range(rounds + 1):
                if kind == "new":
                    lengths = [len(message["content"].split()) for message in chat]
                    contents = [text(f"{number} {place}", length) for place, length in enumerate(lengths)]
                    chat = [{**message, "content": content} for message, content in zip(chat, contents, strict=True)]
                else:
                    chat = [*chat[:-1], {"role": "user", "content": f"And then? {number}"}]
                data = json.dumps({"model": "m", "messages": chat}).encode()
                asked = timed(parsing, partial(read, data))
                tokens = len(timed(prompting, partial(model.prompt, asked))[1])
            shown = (f"{statistics.median(one[1:]) * 1e3:.2f} ({max(one[1:]) * 1e3:.2f})" for one in (parsing, prompting))
            table.add_row(kind, f"{tokens:,}", *shown)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--blocks", type=int, default=8192, help="blocks that each replica holds")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--front", action="store_true", help="also JSON, template and tokenising, with the bundled model")
    given = parser.parse_args()
    console = Console(width=180)
    if given.replicas:
        console.print(core(given.replicas, given.blocks, given.requests))
    if given.front:
        console.print(front(9))


if __name__ == "__main__":
    main()
