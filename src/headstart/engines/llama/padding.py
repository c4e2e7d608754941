"""Padding: why a short call may be computed as a longer one.

llama.cpp's CPU attends to calls of 64 tokens or more tile by tile, and to shorter ones token by token: deep in a conversation
63 tokens can take six times as long as 64 (docs/benchmarks.md). Where rows can be cut off again, tokens that nobody looks at
fill the tile. Which call is the cheaper one follows from the model's shape, from how the engine was built and from its
threads. Nothing is timed while it runs, so that the same call always has the same bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TILE = 64

_WORTH = 0.9
"""A call is padded where it should then take less than this part of the time: processors of one class are not all alike."""
_PIECES = 4
"""ggml cuts attention into so many pieces a thread."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a token is multiplied with.

    Attributes:
        weights: those that one token meets; the embedding is looked up, and the output is computed for one token of a call.
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
        features: what llama.cpp says of itself where it was built for this class.
        weight: a token and a weight.
        alone: token by token, a query and a cell.
        element: besides, each element of a key or value.
        leftover: the same of elements that fill no step.
        steps: elements of a key and of a value that are computed in one go.
        tile: a tile and a cell, each element of a key or value.
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


PROCESSORS = (
    # Built for AMX means built for AVX512-FP16 too, where values are added up in steps of 128 elements, or one by one.
    Processor("AMX", frozenset({"AMX_INT8"}), 0.046, 8.0, 0.095, 1.0, (64, 128), 2.6),
    Processor("AVX-512", frozenset({"AVX512"}), 0.06, 8.0, 0.095, 1.0, (64, 64), 3.9),
    Processor("AVX2", frozenset({"AVX2", "F16C"}), 0.065, 9.0, 0.1, 1.9, (32, 32), 4.0),
    # Not measured: what made padding lose nowhere before there were classes.
    Processor("another", frozenset(), 0.046, 6.0, 0.07, 0.07, (1, 1), 2.6),
)
"""From the most special class to the most general one; the first whose features are all there counts."""


def processor(system: str) -> Processor:
    """The class that llama.cpp was built for, by what it says of itself (`llama_print_system_info`)."""
    features = set(re.findall(r"(\w+) = 1\b", system))
    return next(row for row in PROCESSORS if row.features <= features)


def tiles(heads: int, threads: int) -> int:
    """Tiles that a layer computes for a call of one tile.

    ggml cuts the queries of all heads into pieces for its threads. A tile holds queries of one head and of one piece, and
    costs the same when it is not full.
    """
    rows = heads * TILE
    pieces = 1 if threads == 1 else -(-rows // -(-rows // (_PIECES * threads)))
    size = -(-rows // max(pieces, threads))
    return len({*range(0, rows, size), *range(0, rows, TILE)})


@dataclass(frozen=True, slots=True)
class Padding:
    """What a call costs, in nanoseconds of one core.

    Attributes:
        weights: a token and all weights.
        alone: a token and a cell, in a call of fewer tokens than a tile.
        tile: a tile and a cell.
    """

    weights: float
    alone: float
    tile: float

    @classmethod
    def estimated(cls, work: Work, system: str, threads: int) -> Padding:
        """For a model, a build of llama.cpp (by what it says of itself) and the threads that compute prompts."""
        row = processor(system)
        alone = work.layers * work.heads * row.query(work.key, work.value)
        tile = work.layers * tiles(work.heads, threads) * row.tile * (work.key + work.value)
        return cls(work.weights * row.weight, alone, tile)

    def bare(self, start: int, n: int) -> float:
        """Nanoseconds of a call of `n` tokens behind `start`, fewer than a tile; of a token half of the call is seen."""
        return n * (self.weights + (start + n / 2) * self.alone)

    def full(self, start: int) -> float:
        """Nanoseconds of a tile behind `start`."""
        return TILE * self.weights + (start + TILE) * self.tile

    def of(self, start: int, n: int) -> int:
        """How many tokens to add to a call of `n` behind `start`; 0 where that costs more than it saves."""
        return TILE - n if n < TILE and self.full(start) < _WORTH * self.bare(start, n) else 0


NO_PADDING = Padding(0, 0, 0)
"""Short calls that are computed as a tile: what is kept of them is what an unpadded tile would have had there."""
