"""What exactness costs: `python -m benchmarks.exact [--model FILE] [--depth TOKENS]`.

* The proof at load: the first time, and when its result is remembered.
* Decoding with one thread against all threads. Exact mode uses one thread if more are not exact.
* A model with state: restoring a checkpoint and its KV into an empty slot, and going back in a live slot, against prefill of
  the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as lib
from rich.console import Console
from rich.table import Table

from benchmarks.servers import demo_model
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.engine import KVSegment, Span, Step


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def decoding(engine: LlamaEngine, threads: int, count: int = 24) -> float:
    """Tokens a second, after the tokens in the first slot."""
    everyone = int(engine.facts.details["threads"])
    lib.llama_set_n_threads(engine._context, threads, everyone)
    begun = time.perf_counter()
    for number in range(count):
        engine.decode([Step(0, 100 + number)])
    seconds = time.perf_counter() - begun
    lib.llama_set_n_threads(engine._context, everyone, everyone)
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exact", description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--depth", type=int, default=6144, help="tokens before what is measured")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    table = Table("what", "median (least – most)")

    def row(what: str, values: list[float], unit: str, digits: int = 2) -> None:
        shown = [f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
        table.add_row(what, f"{shown[0]} {unit} ({shown[1]} – {shown[2]})")

    with tempfile.TemporaryDirectory() as folder:
        model = str(given.model or demo_model())
        settings = Settings(model, ctx=given.depth + 512, slots=2, reuse="exact", memory_budget=0, state_dir=Path(folder))
        first: list[float] = []
        later: list[float] = []
        for _ in range(given.rounds):
            for found, anew in ((first, True), (later, False)):
                engine = LlamaEngine.load(settings.engine_options(), anew=anew)
                found.append(engine.facts.details["proof_seconds"])
                engine.close()
        row("proof at load, the first time", first, "s")
        row("proof at load, remembered", later, "s")
        engine = LlamaEngine.load(settings.engine_options())
    threads, most = int(engine.facts.details["threads"]), engine.shape.batch
    tokens = np.random.default_rng(0).integers(1000, 2000, given.depth).astype(np.int32)
    begun = time.perf_counter()
    for at in range(0, given.depth, most):
        engine.prefill(0, tokens[at : at + most], logits=False)
    row(f"prefill of {given.depth:,} tokens", [time.perf_counter() - begun], "s")
    if engine.traits.stateful:
        rows = np.empty(given.depth * engine.shape.kv_bytes_per_token, np.uint8)
        state = np.empty(engine.shape.state_bytes, np.uint8)
        engine.export_kv(0, [Span(0, given.depth, rows)])
        state = state[: engine.export_checkpoint(0, state)]
        pieces = [KVSegment(rows, given.depth, given.depth)]
        row("brought back", [timed(lambda: engine.import_checkpoint(1, pieces, state)) for _ in range(given.rounds)], "s", 3)
        again = []
        for _ in range(given.rounds):
            engine.prefill(0, tokens[:64], logits=False)
            again.append(timed(lambda: engine.rewind(0, given.depth, state)))
        row("gone back to, live", again, "s", 4)
    alone, all_of_them = [], []
    for _ in range(given.rounds):
        alone.append(decoding(engine, 1))
        all_of_them.append(decoding(engine, threads))
    row("decoding with 1 thread", alone, "tokens/s", 1)
    row(f"decoding with {threads}", all_of_them, "tokens/s", 1)
    ratios = [one / more for one, more in zip(alone, all_of_them, strict=True)]
    row("of the latter, the former is", ratios, "")
    Console().print(engine.facts.name, "; ".join(engine.traits.notes))
    Console().print(table)
    engine.close()


if __name__ == "__main__":
    main()
