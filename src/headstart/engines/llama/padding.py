"""Padding: computes a short call as a longer one if that is faster.

On a CPU, llama.cpp computes the attention of calls of 64 tokens or more tile by tile, and of shorter calls token by token.
Deep in a conversation 63 tokens can take six times as long as 64 (docs/benchmarks.md). If KV can be truncated, the tile is
filled with tokens that are truncated afterwards. The estimate of what is faster depends on the model's shape, the build of
llama.cpp and the threads. It does not depend on measured times, so that the same call always gives the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

TILE = 64

_WORTH = 0.9
"""A call is padded if it should then take less than this share of the time. Processors of one class differ a little."""
_PARTS = 4
"""ggml divides attention into so many parts a thread."""


@dataclass(frozen=True, slots=True)
class Work:
    """The size of one token's computation.

    Attributes:
        weights: that a token is multiplied with, without the embedding and the output.
        layers: with attention.
        heads: of the queries, in a layer.
        key: elements of a head's key.
        value: elements of a head's value.
    """

    weights: int
    layers: int
    heads: int
    key: int
    value: int


@dataclass(frozen=True, slots=True)
class Processor:
    """A class of processors: nanoseconds of one core, measured or derived as docs/benchmarks.md says.

    Attributes:
        name: of the class.
        features: that `llama_print_system_info` shows if llama.cpp was built for this class, or that were found.
        weight: for a token and a weight.
        alone: for a query and a cell, token by token.
        element: for each element of a key or value, in addition.
        leftover: the same for elements that do not fill a step.
        steps: elements of a key and of a value that are computed together.
        tile: for a tile and a cell, for each element of a key or value.
    """

    name: str
    features: frozenset[str]
    weight: float
    alone: float
    element: float
    leftover: float
    steps: tuple[int, int]
    tile: float

    def query(self, key: int, value: int) -> float:
        """Nanoseconds of one query head and one cell, token by token."""
        left = key % self.steps[0] + value % self.steps[1]
        return self.alone + self.element * (key + value - left) + self.leftover * left


AMX_USED, COMPUTES_IN_F16, ALIGNED = "AMX_USED", "COMPUTES_IN_F16", "ALIGNED"
"""Features that `llama_print_system_info` does not show: weights are multiplied with AMX (`amx`); attention
computes in F16, which takes less time for an element and larger steps (`half_precision`); its tiles lie in memory that
begins at a page (`work_buffer`)."""
PROCESSORS = (
    # Q4_1 takes 0.013 with AMX, other types up to 0.023: nothing may lose.
    Processor("AMX, used, F16", frozenset({"AMX_INT8", AMX_USED, COMPUTES_IN_F16}), 0.02, 8.0, 0.095, 1.0, (64, 128), 2.6),
    Processor("AMX, used", frozenset({"AMX_INT8", AMX_USED}), 0.02, 8.0, 0.12, 1.0, (64, 64), 2.6),
    Processor("AMX, F16", frozenset({"AMX_INT8", COMPUTES_IN_F16}), 0.046, 8.0, 0.095, 1.0, (64, 128), 2.6),
    Processor("AMX", frozenset({"AMX_INT8"}), 0.046, 8.0, 0.12, 1.0, (64, 64), 2.6),
    # Not measured: a processor with AVX512-FP16 whose AMX is hidden.
    Processor("AVX-512, F16", frozenset({"AVX512", COMPUTES_IN_F16}), 0.06, 8.0, 0.095, 1.0, (64, 128), 3.9),
    Processor("AVX-512, aligned", frozenset({"AVX512", ALIGNED}), 0.06, 8.0, 0.095, 1.0, (64, 64), 3.0),
    Processor("AVX-512", frozenset({"AVX512"}), 0.06, 8.0, 0.095, 1.0, (64, 64), 3.9),
    Processor("AVX2", frozenset({"AVX2", "F16C"}), 0.065, 9.0, 0.1, 1.9, (32, 32), 4.0),
    # Not measured. With these figures padding never made a call slower, before there were classes.
    Processor("another", frozenset(), 0.046, 6.0, 0.07, 0.07, (1, 1), 2.6),
)
"""From the most special class to the most general one; the first whose features are all present is used."""


def processor(system: str, found: Collection[str] = ()) -> Processor:
    """The class that llama.cpp was built for.

    Args:
        system: what `llama_print_system_info` says.
        found: of the features that it does not show.
    """
    features = {*re.findall(r"(\w+) = 1\b", system), *found}
    return next(row for row in PROCESSORS if row.features <= features)


def tiles(heads: int, threads: int) -> int:
    """Tiles that a layer computes for a call of one tile.

    ggml divides the queries of all heads into parts for its threads. A tile has queries of one head and one part. It costs the
    same if it is not full.
    """
    queries = heads * TILE
    parts = 1 if threads == 1 else -(-queries // -(-queries // (_PARTS * threads)))
    size = -(-queries // max(parts, threads))
    return len({*range(0, queries, size), *range(0, queries, TILE)})


@dataclass(frozen=True, slots=True)
class Padding:
    """The cost of a call, in nanoseconds of one core.

    Attributes:
        weights: for a token and all weights.
        alone: for a token and a cell, in a call of fewer tokens than a tile.
        tile: for a tile and a cell.
    """

    weights: float
    alone: float
    tile: float

    @classmethod
    def estimated(cls, work: Work, system: str, threads: int, found: Collection[str] = ()) -> Padding:
        """For a model, a build of llama.cpp (see `processor`) and the threads that compute prompts."""
        row = processor(system, found)
        alone = work.layers * work.heads * row.query(work.key, work.value)
        tile = work.layers * tiles(work.heads, threads) * row.tile * (work.key + work.value)
        return cls(work.weights * row.weight, alone, tile)

    def bare(self, start: int, n: int) -> float:
        """Nanoseconds of a call of `n` tokens after `start`, fewer than a tile. On average a token sees half of the call."""
        return n * (self.weights + (start + n / 2) * self.alone)

    def full(self, start: int) -> float:
        """Nanoseconds of a tile after `start`."""
        return TILE * self.weights + (start + TILE) * self.tile

    def of(self, start: int, n: int) -> int:
        """Number of tokens to add to a call of `n` tokens after `start`; 0 if that costs more than it saves."""
        return TILE - n if n < TILE and self.full(start) < _WORTH * self.bare(start, n) else 0


NO_PADDING = Padding(0, 0, 0)
"""Never pads."""
