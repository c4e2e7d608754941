"""How long llama.cpp's attention takes on this processor: `python -m benchmarks.kernels [--unaligned]` (1 minute).

It times the two attention kernels of prefill alone, on one thread: 32 queries, which are processed one by one, and 64 queries,
which are processed as a tile, each against a KV cell; and a token against a weight. Beside each time is the value that
`headstart.engines.llama.padding` has for this class of processor. Its values were measured so. The times are processor times,
so a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import processor
from benchmarks.unaligned import unalign
from headstart.engines.llama.binding import ready
from headstart.engines.llama.ggml import F16, F32, Array, Ggml, Tensor
from headstart.engines.llama.padding import TILE
from headstart.engines.llama.padding import processor as class_of

HEADS, KV_HEADS, CELLS = 8, 2, 2048
QUERIES = TILE // 2
WIDTH = 1024
SIZES = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (576, 512))
"""Elements of keys and values."""
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "IQ3_S": 21, "BF16": 30}
"""GGML_TYPE_… of weights, as in a file, without llama.cpp's repacked layouts."""


def seconds(ggml: Ggml, context: Tensor, result: Tensor, inputs: Sequence[tuple[Tensor, Array]], rounds: int) -> float:
    """The least processor time of one computation, on one thread."""
    found = []
    with ggml.prepared(context, result, inputs) as run:
        for _ in range(rounds + 1):  # the first round touches the memory
            begun = time.process_time()
            assert run()
            found.append(time.process_time() - begun)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--unaligned", action="store_true", help="the work buffer begins 16 bytes behind a line of the cache")
    given = parser.parse_args()
    if given.unaligned:
        unalign()
    dice = np.random.default_rng(0)
    row = class_of(processor.system(), processor.found(engine=False))

    def drawn(*shape: int) -> Array:
        return dice.standard_normal(shape, np.float32)

    def attention(queries: int, key: int, value: int) -> float:
        """Nanoseconds for a head and a KV cell."""
        with Ggml(ready()) as ggml:
            context, inputs, parts = ggml.context(), [], []
            for kind, *shape in ((F32, queries, HEADS, key), (F16, CELLS, KV_HEADS, key), (F16, CELLS, KV_HEADS, value)):
                tensor = ggml.tensor(context, kind, *reversed(shape))
                inputs.append((tensor, drawn(*shape).astype(np.float32 if kind == F32 else np.float16)))
                # A view of [elements, heads, cells] as [elements, cells, heads], which is the layout of a model's KV.
                order = map(ctypes.c_int, (0, 2, 1, 3))
                parts.append(Tensor(ggml.call("ggml_permute", ctypes.c_void_p, context, tensor, *order)))
            mask = ggml.tensor(context, F16, CELLS, queries)
            inputs.append((mask, np.zeros((queries, CELLS), np.float16)))
            result = ggml.attention(context, parts, mask, 0.1)
            return seconds(ggml, context, result, inputs, given.rounds) / HEADS / CELLS * 1e9

    def weight(kind: int) -> float:
        """Nanoseconds for a token and a weight."""
        with Ggml(ready()) as ggml:
            context, weights = ggml.context(), drawn(WIDTH, WIDTH)
            made = [ggml.tensor(context, one, WIDTH, rows) for one, rows in ((kind, WIDTH), (F32, TILE))]
            inputs = [*zip(made, (ggml.quantized(kind, weights), drawn(TILE, WIDTH)), strict=True)]
            return seconds(ggml, context, ggml.product(context, *made), inputs, given.rounds) / TILE / WIDTH**2 * 1e9

    kernels = Table("key, value", "a query alone, ns", "reckoned", "a tile, ns", "reckoned", "queries that a tile costs")
    for key, value in SIZES:
        alone, tile = attention(QUERIES, key, value) / QUERIES, attention(TILE, key, value)
        reckoned = row.query(key, value), row.tile * (key + value)
        told = (f"{alone:.1f}", f"{reckoned[0]:.1f}", f"{tile:.0f}", f"{reckoned[1]:.0f}", f"{tile / alone:.1f}")
        kernels.add_row(f"{key}, {value}", *told)
    kernels.caption = processor.caption(engine=False)
    weights = Table("weights", "a token and a weight, ns", caption=f"reckoned: {row.weight}")
    for name, kind in TYPES.items():
        weights.add_row(name, f"{weight(kind):.3f}")
    for table in (kernels, weights):
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
