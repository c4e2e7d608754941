"""Where a cold prompt's time goes: `python -m benchmarks.cold_causes [--rounds 7] [--only 9 10] [--without-amx] [--library …]`.

The engine alone computes one prompt of 1,837 tokens, for each cause and round in a process of its own: where a process has its
memory changes its times by 2 to 3 %. The first row is what headstart does; each other row changes one thing. Ratios are of the
same round, so give it quiet cores (6 minutes with AMX, 13 without).

What a whole server adds (HTTP, template, tokenizer, disk, settling) is in `python -m benchmarks.turns --cold`, with the options
`--option=--no-disk` and `--option=--settle=off`.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import processor
from benchmarks.restart import spread
from benchmarks.servers import demo_model
from benchmarks.unaligned import GLIBC, unalign
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine, amx
from headstart.engines.llama.padding import NO_PADDING
from headstart.interfaces.engine import Span

TOKENS = 1837
"""As `benchmarks.turns --cold` has. They end 45 tokens behind a block, so with AMX a call is padded."""
FULL = (512, 512, 512, 301)
Save = Callable[[int], memoryview]
"""Where so many bytes of KV go."""


def _used(most: int) -> Save:
    """Into memory that has been used before, of at most so many bytes."""
    kept = np.ones(most, np.uint8).data
    return lambda size: kept[:size]


def _new(most: int) -> Save:
    """Into memory that is touched for the first time."""
    return lambda size: memoryview(mmap.mmap(-1, size))


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that may cost time.

    Attributes:
        calls: tokens of each prefill call.
        threads: None for those of the command.
        environment: what is set before llama.cpp is loaded.
        padded: whether the rule for padding is followed.
        save: where the KV of each call is copied behind it, if a call has so many bytes at most; None: nowhere.
        warm: whether the engine has computed a call before.
        aligned: whether the work buffer begins at a page, not 16 bytes behind a line of the cache.
        other: whether it is the library of `--library`.
    """

    label: str
    calls: Sequence[int] = FULL
    threads: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    padded: bool = True
    save: Callable[[int], Save] | None = None
    warm: bool = True
    aligned: bool = True
    other: bool = False


def _of(size: int) -> tuple[int, ...]:
    """Calls of one size. The tail is in the last one."""
    return (*[size] * (TOKENS // size - 1), size + TOKENS % size)


CAUSES = (
    Cause("as headstart: calls of 512, the tail in the last one, padded"),
    Cause("the tail not padded", padded=False),
    Cause("the tail in a call of its own", (512, 512, 512, 256, 45)),
    Cause("the first call has 64 tokens, as after a start", (64, 512, 512, 512, 237)),
    Cause("calls of 256", _of(256)),
    Cause("calls of 128", _of(128)),
    Cause("calls of 64", _of(64)),
    Cause("KV is copied out after each call, to used memory", save=_used),
    Cause("KV is copied out after each call, to new memory", save=_new),
    Cause("the first prompt after a load", warm=False),
    Cause("the work buffer begins 16 bytes behind a line of the cache", aligned=False),
    Cause("workers spin 300,000 times (libgomp's default)", environment={"GOMP_SPINCOUNT": "300000"}),
    Cause("workers sleep at once", environment={"GOMP_SPINCOUNT": "0"}),
    Cause("one thread", threads=1),
    Cause("the library of --library", other=True),
)


def seconds(cause: Cause, model: Path, threads: int, library: Path | None) -> float:
    """Computes the prompt, in this process."""
    own = library if cause.other else None
    if not cause.aligned:
        unalign()
    settings = Settings(str(model), ctx=2048, slots=1, threads=cause.threads or threads, memory_budget=0, llama_lib=own)
    engine = LlamaEngine.load(settings.engine_options())
    if not cause.padded:
        engine._padding = NO_PADDING
    tokens = np.random.default_rng(0).integers(1000, 2000, TOKENS).astype(np.int32)
    row = engine.shape.kv_bytes_per_token
    save = cause.save and cause.save(row * max(cause.calls))
    if cause.warm:
        engine.prefill(0, tokens[: FULL[0]], logits=False)
        engine.truncate(0, 0)
    at, last = 0, len(cause.calls) - 1
    begun = time.perf_counter()
    for number, size in enumerate(cause.calls):
        engine.prefill(0, tokens[at : at + size], logits=number == last)
        if save:
            engine.export_kv(0, [Span(at, at + size, np.frombuffer(save(size * row), np.uint8))])
        at += size
    took = time.perf_counter() - begun
    engine.close()
    return took


def measured(causes: Mapping[int, Cause], rounds: int, arguments: Sequence[str]) -> dict[int, list[float]]:
    """Seconds by cause, a list with one for each round."""
    found: dict[int, list[float]] = {number: [] for number in causes}
    order = [*causes]
    for turn in range(rounds):
        for number in order if turn % 2 == 0 else order[::-1]:
            command = [sys.executable, "-m", "benchmarks.cold_causes", "--child", str(number), *arguments]
            environment = {**os.environ, **causes[number].environment}
            ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[number].append(float(ended.stdout))
        Console().print(f"[dim]round {turn + 1}/{rounds}[/]")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_causes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path, default=None, help="a GGUF; the bundled model by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without-amx", action="store_true", help="weights are not laid out for AMX")
    parser.add_argument("--library", type=Path, default=None, help="another libllama, as for headstart's --llama-lib")
    parser.add_argument("--only", type=int, nargs="+", default=None, help="numbers of rows; 0 is always measured")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    model = given.model or demo_model()
    if given.child is not None:
        if given.without_amx:
            amx.extra_buffers = lambda *_, **__: not amx.built()
        print(seconds(CAUSES[given.child], model, given.threads, given.library))
        return
    possible = {at for at, cause in enumerate(CAUSES) if (given.library or not cause.other) and (GLIBC or cause.aligned)}
    if unknown := {*(given.only or ())} - possible:
        parser.error(f"rows {sorted(unknown)} are not measured here: there are {sorted(possible)}, the last with --library")
    causes = {number: CAUSES[number] for number in sorted(possible) if not given.only or number in {0, *given.only}}
    caption = processor.caption() + ("; without AMX" if given.without_amx else "")
    arguments = ["--model", str(model), "--threads", str(given.threads)]
    arguments += ["--library", str(given.library)] if given.library else []
    arguments += ["--without-amx"] if given.without_amx else []
    found = measured(causes, given.rounds, arguments)
    table = Table("what", "seconds, median (min – max)", "ratio", caption=f"{TOKENS:,} tokens; {caption}")
    for number, cause in causes.items():
        ratios = [one / first for one, first in zip(found[number], found[0], strict=True)]
        table.add_row(f"{number}: {cause.label}", spread(found[number]), spread(ratios))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
