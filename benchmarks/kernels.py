"""How long llama.cpp's attention takes on this processor: `python -m benchmarks.kernels` (1 minute).

It times the two attention kernels of prefill alone, on one thread: 32 queries, which are processed one by one, and 64 queries,
which are processed as a tile, each against a KV cell; and a token against a weight. Beside each time is the value that
`headstart.engines.llama.padding` has for this class of processor. Its values were measured so. The times are processor times,
so a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib
from llama_cpp._ctypes_extensions import load_shared_library
from rich.console import Console
from rich.table import Table

from benchmarks import processor
from headstart.engines.llama.padding import TILE
from headstart.engines.llama.padding import processor as class_of

HEADS, KV_HEADS, CELLS = 8, 2, 2048
QUERIES = TILE // 2
WIDTH = 1024
SIZES = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (576, 512))
"""Elements of keys and values."""
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "IQ3_S": 21, "BF16": 30}
"""GGML_TYPE_… of weights, as in a file, without llama.cpp's repacked layouts."""
_F32, _F16 = 0, 1
_MEMORY = 1 << 28

Array = npt.NDArray[Any]


class _Arena(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("without_data", ctypes.c_bool))


class Ggml:
    """The few functions of ggml that are needed here. `arena`: memory of the tensors."""

    def __init__(self) -> None:
        folder = Path(lib._lib._name).parent
        self._libraries = [load_shared_library(part, folder) for part in ("ggml-base", "ggml-cpu")]
        self._call("ggml_cpu_init", None)
        self._arena: Any = None

    def _call(self, name: str, returns: Any, *arguments: Any) -> Any:
        function = next(getattr(one, name) for one in reversed(self._libraries) if hasattr(one, name))
        function.restype = returns
        return function(*arguments)

    @contextmanager
    def arena(self) -> Iterator[None]:
        self._arena = ctypes.c_void_p(self._call("ggml_init", ctypes.c_void_p, _Arena(_MEMORY, None, False)))
        yield
        self._call("ggml_free", None, self._arena)

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._call(name, ctypes.c_void_p, self._arena, *arguments))

    def tensor(self, kind: int, data: Array) -> ctypes.c_void_p:
        """A tensor of `data`'s shape, in ggml's order of dimensions. `data` is quantised if `kind` is another type."""
        sizes = [ctypes.c_int64(size) for size in reversed((1,) * (3 - data.ndim) + data.shape)]
        made = self._made("ggml_new_tensor_3d", kind, *sizes)
        place = ctypes.c_void_p(self._call("ggml_get_data", ctypes.c_void_p, made))
        if kind in (_F32, _F16):
            data = data.astype(np.float32 if kind == _F32 else np.float16)
            ctypes.memmove(place, data.ctypes.data, data.nbytes)
        else:
            source, (rows, columns) = ctypes.c_void_p(data.ctypes.data), map(ctypes.c_int64, data.shape)
            zero = ctypes.c_int64(0)
            self._call("ggml_quantize_chunk", ctypes.c_size_t, kind, source, place, zero, rows, columns, None)
        return made

    def by_head(self, tensor: ctypes.c_void_p) -> ctypes.c_void_p:
        """A view of [elements, heads, cells] as [elements, cells, heads], which is the layout of a model's KV."""
        return self._made("ggml_permute", tensor, 0, 2, 1, 3)

    def attention(self, parts: Sequence[ctypes.c_void_p], mask: ctypes.c_void_p) -> ctypes.c_void_p:
        """`parts`: queries, keys, values."""
        scale, none = ctypes.c_float(0.1), ctypes.c_float(0)
        return self._made("ggml_flash_attn_ext", *parts, mask, scale, none, none)

    def product(self, weights: Any, tokens: Any) -> ctypes.c_void_p:
        return self._made("ggml_mul_mat", weights, tokens)

    def seconds(self, result: ctypes.c_void_p, rounds: int) -> float:
        """The least processor time of one computation, on one thread."""
        graph = self._made("ggml_new_graph")
        self._call("ggml_build_forward_expand", None, graph, result)
        found = []
        for _ in range(rounds + 1):  # the first round touches the memory
            begun = time.process_time()
            self._call("ggml_graph_compute_with_ctx", ctypes.c_int, self._arena, graph, 1)
            found.append(time.process_time() - begun)
        return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    ggml, dice = Ggml(), np.random.default_rng(0)
    row = class_of(processor.system(), processor.found(engine=False))

    def drawn(*shape: int) -> Array:
        return dice.standard_normal(shape, np.float32)

    def attention(queries: int, key: int, value: int) -> float:
        """Nanoseconds for a head and a KV cell."""
        with ggml.arena():
            sizes = ((_F32, queries, HEADS, key), (_F16, CELLS, KV_HEADS, key), (_F16, CELLS, KV_HEADS, value))
            parts = [ggml.by_head(ggml.tensor(kind, drawn(*shape))) for kind, *shape in sizes]
            mask = ggml.tensor(_F16, np.zeros((queries, CELLS), np.float32))
            return ggml.seconds(ggml.attention(parts, mask), given.rounds) / HEADS / CELLS * 1e9

    def weight(kind: int) -> float:
        """Nanoseconds for a token and a weight."""
        with ggml.arena():
            product = ggml.product(ggml.tensor(kind, drawn(WIDTH, WIDTH)), ggml.tensor(_F32, drawn(TILE, WIDTH)))
            return ggml.seconds(product, given.rounds) / TILE / WIDTH**2 * 1e9

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
