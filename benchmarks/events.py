"""What readers of `/headstart/events` cost: `python -m benchmarks.events [--rounds 8] [--memory REQUESTS] [--readers 20]`.

* The server's own processor time for each decoded token of four replies, with 20 readers in another process and with none. Both
  run in turn in one server, in alternating order; the server has done with events before it runs without readers. One thread
  computes, because several would also count the time for which they wait for each other.
* `--memory`: the resident memory of a process with a runtime and a reader, or with none (`--readers 0`), while so many requests
  are answered. The engine is the fake one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import processor
from benchmarks.client import Client
from benchmarks.servers import Server, Setup, demo_model, headstart
from benchmarks.workloads import text
from headstart.config import Settings
from headstart.events.hub import LINGER, Hub, View
from headstart.events.source import RuntimeSource
from headstart.interfaces.generation import GenerationParams
from headstart.serving.request import Event, Failed, Finished, Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine

REQUEST = b"GET /headstart/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@contextmanager
def reading(server: Server, count: int) -> Iterator[Any]:
    """So many readers, in a process of their own. Yields their counter of batches."""
    context = multiprocessing.get_context("spawn")
    ready, batches = context.Event(), context.Value("q", 0)
    process = context.Process(target=_read, args=(server.url, count, ready, batches), daemon=True)
    process.start()
    try:
        if not ready.wait(60):
            raise SystemExit("the readers got no events")
        yield batches
    finally:
        process.terminate()
        process.join()


def _read(url: str, count: int, ready: Any, batches: Any) -> None:
    async def one(first: asyncio.Semaphore) -> None:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(REQUEST)
        seen = 0
        while data := await reader.read(1 << 16):
            marks = data.count(b"event: mark")
            batches.value += marks
            if marks and not seen:
                first.release()
            seen += marks

    async def everyone() -> None:
        first = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(one(first)) for _ in range(count)]
        for _ in tasks:
            await first.acquire()
        ready.set()
        await asyncio.gather(*tasks)

    asyncio.run(everyone())


def used(server: Server) -> float:
    """Processor seconds of the server."""
    return sum(server.process.cpu_times()[:2])


def cost(server: Server, client: Client, replies: int, tokens: int, name: str) -> float:
    """Processor milliseconds for each token of replies that run at the same time."""
    server.rest()
    before = used(server)
    samples = client.together([[{"role": "user", "content": text(f"{name} {reply}", 8)}] for reply in range(replies)], tokens)
    return (used(server) - before) * 1e3 / sum(sample.completion for sample in samples)


def pairs(server: Server, rounds: int, readers: int, replies: int, tokens: int, console: Console) -> None:
    client = Client(server)
    cost(server, client, replies, tokens, "warm up")
    bare, watched, batches = list[float](), list[float](), list[int]()
    for number in range(rounds):
        for watching in (False, True) if number % 2 == 0 else (True, False):
            if watching:
                with reading(server, readers) as counter:
                    begun = counter.value
                    watched.append(cost(server, client, replies, tokens, f"{number} watched"))
                    batches.append(counter.value - begun)
            else:
                if watched:
                    time.sleep(LINGER + 1)
                bare.append(cost(server, client, replies, tokens, f"{number} bare"))
        ratio = watched[-1] / bare[-1]
        console.print(f"round {number + 1}/{rounds}: {bare[-1]:.3f} ms, {watched[-1]:.3f} ms a token, {ratio:.4f}")
    ratios = sorted(two / one for one, two in zip(bare, watched, strict=True))
    table = Table("readers", "processor time a token", "min – max")
    for name, values in ((0, bare), (readers, watched)):
        table.add_row(f"{name}", f"{statistics.median(values):.3f} ms", f"{min(values):.3f} – {max(values):.3f}")
    console.print(table)
    console.print(f"ratio, median of {rounds} pairs: {statistics.median(ratios):.4f} ({ratios[0]:.4f} – {ratios[-1]:.4f})")
    console.print(f"batches that a reader got in a run: {statistics.median(batches) / readers:.0f}")


def memory(requests: int, *, watched: bool, console: Console) -> None:
    """Prints the resident memory while so many different prompts are sent, with a reader or without."""
    settings = Settings(memory_budget=256 << 10, explain="off")
    table, process, seen = Table("requests", "events", "entries", "resident MiB"), psutil.Process(), 0
    with Runtime(lambda: FakeEngine(slots=4, ctx=1024), settings) as runtime:
        hub = Hub(RuntimeSource(runtime))
        reader = hub.subscribe(View(b"", everything=True), lambda: None)[0] if watched else None
        for number in range(requests + 1):
            _answered(runtime, text(f"{number}", 40))
            data = b"" if reader is None else reader.take()
            seen += sum(map(data.count, (b'"left"', b'"pinned"', b'"state"')))
            if number % (requests // 10) == 0:
                gc.collect()
                table.add_row(f"{number:,}", f"{seen:,}", f"{len(hub._mirror):,}", f"{process.memory_info().rss / 2**20:.1f}")
        hub.close()
    console.print(table)


def _answered(runtime: Runtime, words: str) -> None:
    """A reply of a token."""
    over = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            over.set()

    runtime.submit(Request(runtime.text_prompt(words), GenerationParams(max_tokens=1)), sink)
    over.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.events", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--replies", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--memory", type=int, default=0, metavar="REQUESTS")
    given = parser.parse_args()
    console = Console()
    console.print(processor.caption())
    if given.memory:
        memory(given.memory, watched=given.readers > 0, console=console)
        return
    with headstart(Setup(demo_model(), ctx=2048, slots=given.replies, threads=1)) as server:
        pairs(server, given.rounds, given.readers, given.replies, given.tokens, console)


if __name__ == "__main__":
    main()
