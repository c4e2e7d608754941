"""Short prefill calls deep in a conversation, padded to a tile or not: `python -m benchmarks.short`.

Both run in turn, at the same position. Ratios are of pairs. The KV before a call is the same 512 tokens repeated: its values do
not change the time. Beside each is the ratio that the padding rule expects.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import processor
from benchmarks.servers import demo_model
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.engines.llama.padding import NO_PADDING, TILE
from headstart.interfaces.engine import KVSegment, Span

CALLS = (8, 16, 24, 32, 48, 63)
DEPTHS = (512, 2048, 7168)
_SPAN = 512


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=None, help="all cores by default")
    given = parser.parse_args()
    model, caption = str(given.model or demo_model()), processor.caption()
    settings = Settings(model, ctx=DEPTHS[-1] + _SPAN, slots=1, threads=given.threads, memory_budget=0)
    engine = LlamaEngine.load(settings.engine_options())
    padding = engine._padding
    tokens = np.random.default_rng(0).integers(1000, 2000, _SPAN).astype(np.int32)
    rows = np.empty(_SPAN * engine.shape.kv_bytes_per_token, np.uint8)
    engine.prefill(0, tokens, logits=False)
    engine.export_kv(0, [Span(0, _SPAN, rows)])

    def seconds(depth: int, n: int) -> float:
        begun = time.perf_counter()
        engine.prefill(0, tokens[:n], logits=True)
        took = time.perf_counter() - begun
        engine.truncate(0, depth)
        return took

    table = Table(
        "tokens before it", "of the call", "as it is, ms", "as a tile, ms", "ratio (median of pairs)", "reckoned", "padded"
    )
    for depth in DEPTHS:
        engine.import_kv(0, [KVSegment(rows, _SPAN, _SPAN)] * (depth // _SPAN))
        for n in CALLS:
            bare, full = [], []
            for _ in range(given.rounds):
                engine._padding = NO_PADDING
                bare.append(seconds(depth, n))
                full.append(seconds(depth, TILE))
            ratio = statistics.median(two / one for one, two in zip(bare, full, strict=True))
            shown = [f"{statistics.median(times) * 1e3:,.0f}" for times in (bare, full)]
            reckoned = "–" if padding is NO_PADDING else f"{padding.full(depth) / padding.bare(depth, n):.2f}"
            table.add_row(f"{depth:,}", str(n), *shown, f"{ratio:.2f}", reckoned, "yes" if padding.of(depth, n) else "no")
    table.caption = caption
    Console(width=140).print(table)
    engine.close()


if __name__ == "__main__":
    main()
