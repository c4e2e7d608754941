"""Cost against what is stored: `python -m benchmarks.growth [--most 1e6] [--only NAME …] [--out DIR]`.

Each operation runs beside 10³ to 10⁶ stored entries. Reported: the CPU time of the calling thread, as the median of many calls
and the 99.9th percentile, and bytes of memory. All texts begin with the same token and hang on the root, as conversations
without a common system prompt do. This is the hardest case of a search by tokens.

With `--against DIR`, some of the calls are made in turn in this version and in that of a checkout: `benchmarks.growth_against`.

The disk's files are empty where they do not matter: `benchmarks.growth_disk`, which also measures starts and decoding.

To add an operation, write a function that takes the number of entries and yields `Row`s, and name it in `MEASUREMENTS`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import growth_against, growth_disk, growth_eviction, growth_expiry, growth_holds, growth_memory
from benchmarks.growth_rows import Measurement, Row, held, timed
from benchmarks.plots import growth_curves
from benchmarks.processor import caption
from headstart.interfaces.tokens import Tokens, as_tokens
from headstart.interfaces.traits import Traits
from headstart.prefix_cache.blocks import Chain, block_id, checkpoint_id, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.planner import Costs, Mode, SlotView, plan

BLOCK, TAIL = 64, 20
TIER = "memory"
ROOT = root_id(b"benchmark", "")
MODE = Mode(exact=False, traits=Traits(BLOCK))
CALLS = 2000


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Texts:
    """Pseudo-random conversations that begin with the same token. Each has a full block and an open tail."""

    def __init__(self) -> None:
        self._dice = random.Random(0)

    def one(self, length: int = BLOCK + TAIL) -> Tokens:
        tokens = np.frombuffer(self._dice.randbytes(4 * length), np.int32) & 0x7FFF
        tokens[0] = 1
        return as_tokens(tokens)


def chain_of(tokens: Tokens) -> Chain:
    return Chain(ROOT, BLOCK, tokens)


def entries_of(chain: Chain, *, state: bool = False) -> Iterator[Entry]:
    """All blocks of a text and its open tail; with `state` also a checkpoint at the end."""
    for number, key in enumerate(chain.ids):
        yield Entry(key, chain.parent_of(number), chain.block(number), number * BLOCK)
    whole = len(chain.ids)
    if len(rest := chain.tokens[whole * BLOCK :]):
        parent = chain.parent_of(whole)
        key = block_id(parent, rest)
        yield Entry(key, parent, rest, whole * BLOCK)
        if state:
            yield Entry(checkpoint_id(key), key, rest, whole * BLOCK, state=True)


def stored(size: int, texts: Texts, *, state: bool = False) -> tuple[Index, list[Tokens]]:
    """An index with about `size` entries, and a sample of the texts in it."""
    index, sample = Index(BLOCK), list[Tokens]()
    while len(index) < size:
        tokens = texts.one()
        if len(sample) < CALLS:
            sample.append(tokens)
        for entry in entries_of(chain_of(tokens), state=state):
            index.add(entry, TIER, canonical=True)
    return index, sample


# ── measurements ─────────────────────────────────────────────────────────────────────────────────────────────────────


def chains(texts: Iterable[Tokens]) -> list[Chain]:
    found = [chain_of(tokens) for tokens in texts]
    for chain in found:
        _ = chain.ids  # computed once, which is not what is measured
    return found


def continued(sample: list[Tokens], texts: Texts) -> list[Chain]:
    return chains(as_tokens(np.concatenate([tokens, texts.one(BLOCK)])) for tokens in sample)


def match(size: int) -> Iterator[Row]:
    texts = Texts()
    index, sample = stored(size, texts)
    new = chains(texts.one() for _ in range(CALLS))
    for name, found in (("new prompt", new), ("continued prompt", continued(sample, texts))):
        calls = (partial(index.match, chain, len(chain) - 1, canonical_only=False, partial=True) for chain in found)
        yield timed(f"match: {name}", calls)


def planning(size: int) -> Iterator[Row]:
    texts = Texts()
    index, sample = stored(size, texts)
    slots = [SlotView(number, ROOT, texts.one(), BLOCK, True, float(number)) for number in range(4)]
    new = chains(texts.one() for _ in range(CALLS))
    for name, found in (("new prompt", new), ("continued prompt", continued(sample, texts))):
        yield timed(f"plan: {name}", (partial(plan, chain, index, slots, Costs(), MODE) for chain in found))


def resume(size: int) -> Iterator[Row]:
    texts = Texts()
    index, sample = stored(size, texts, state=True)
    found = continued(sample, texts)
    calls = (partial(index.resume, chain, len(chain) - 1, canonical_only=False) for chain in found)
    yield timed("resume in a model with state", calls)


def admit(size: int) -> Iterator[Row]:
    texts = Texts()
    index, _ = stored(size, texts)
    new = [entry for chain in chains(texts.one() for _ in range(CALLS)) for entry in entries_of(chain)]
    yield timed("admit: what it makes redundant", (partial(index.covered, entry.parent, entry.tokens) for entry in new))
    yield timed("admit: add to the index", (partial(index.add, entry, TIER, canonical=True) for entry in new))
    yield timed("remove from the index", (partial(index.remove, entry.id, TIER) for entry in reversed(new)))


def memory(size: int) -> Iterator[Row]:
    """Bytes an entry of the index, besides 4 for each token."""
    texts, system = Texts(), Texts().one(20 * BLOCK)
    shapes: dict[str, Callable[[], Iterator[Tokens]]] = {
        "conversations": lambda: (texts.one() for _ in repeat(None)),
        "behind a system prompt": lambda: (as_tokens(np.concatenate([system, texts.one()])) for _ in repeat(None)),
        "one chain": lambda: iter([texts.one(size * BLOCK)]),
    }
    for name, shape in shapes.items():
        index = Index(BLOCK)
        used = held(partial(_fill, index, shape(), size))
        tokens_held = sum(entry.stop - entry.start for entry in index)
        yield Row(f"index: {name}", "B", (used - 4 * tokens_held) / len(index))


def _fill(index: Index, texts: Iterator[Tokens], size: int) -> None:
    while len(index) < size:
        for entry in entries_of(chain_of(next(texts))):
            index.add(entry, TIER, canonical=True)


MEASUREMENTS: dict[str, Measurement] = {
    "match": match,
    "plan": planning,
    "resume": resume,
    "admit": admit,
    "memory": memory,
    "eviction": growth_eviction.measured,
    "entries": growth_memory.measured,
    "expiry": growth_expiry.measured,
    "holds": growth_holds.measured,
    "disk": growth_disk.measured,
}

# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Results = dict[str, dict[int, Row]]
"""By operation and number of entries."""


def measure(sizes: list[int], names: list[str], console: Console) -> Results:
    results: Results = {}
    for name in names:
        for size in sizes:
            for row in MEASUREMENTS[name](size):
                results.setdefault(row.operation, {})[size] = row
            gc.collect()
            console.print(f"[dim]{name}: {size:,} entries[/]")
    return results


def shown(row: Row | None) -> str:
    if row is None:
        return "–"
    high = "" if row.high is None else f" ({row.high:,.0f})"
    return f"{row.median:,.{1 if row.median < 10 else 0}f}{high} {row.unit}"


def table(results: Results, sizes: list[int]) -> Table:
    result = Table("operation", *(f"{size:,}" for size in sizes), title=f"Median (99.9th percentile), by entries; {caption()}")
    for operation, rows in results.items():
        result.add_row(operation, *(shown(rows.get(size)) for size in sizes))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--most", type=float, default=1e6, help="the greatest number of entries (1e6)")
    parser.add_argument("--only", nargs="*", choices=list(MEASUREMENTS), default=list(MEASUREMENTS), help="measurements")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for growth.json and the plot")
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of another version, to compare some calls with")
    parser.add_argument("--entries", type=int, default=1000, help="stored entries, with --against (1000)")
    parser.add_argument("--portions", type=int, default=30, help="portions of calls, with --against (30)")
    given = parser.parse_args()
    console = Console(width=160)
    if given.against is not None:
        console.print(growth_against.table(given.against, given.entries, given.portions))
        return
    sizes = [size for size in (10**3, 10**4, 10**5, 10**6) if size <= given.most]
    results = measure(sizes, given.only, console)
    given.out.mkdir(parents=True, exist_ok=True)
    kept = {operation: {size: asdict(row) for size, row in rows.items()} for operation, rows in results.items()}
    (given.out / "growth.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False))
    medians = {
        operation: [rows[size].median if size in rows else None for size in sizes] for operation, rows in results.items()
    }
    (given.out / "growth.svg").write_text(growth_curves(medians, sizes), "utf-8")
    console.print(table(results, sizes))


if __name__ == "__main__":
    main()
