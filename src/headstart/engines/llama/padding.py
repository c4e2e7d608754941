"""Padding: why a short call may be computed as a longer one.

llama.cpp's CPU attends to calls of 64 tokens or more tile by tile, and to shorter ones token by token: deep in a conversation
63 tokens can take six times as long as 64 (docs/benchmarks.md). Where rows can be cut off again, tokens that nobody looks at
fill the tile.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE = 64
_TOGETHER, _ALONE = 189, 5
"""What attention to one cell costs a tile, and a token of a shorter call, in products of weights. One processor took 227 and
29, another about a sixth of the latter: as chosen, padding loses on neither (docs/decisions.md)."""


@dataclass(frozen=True, slots=True)
class Padding:
    """What a call costs. A function of the model alone: the same call always has the same bits.

    Attributes:
        attention: products of a token with one cell: layers times width.
        weights: of the model.
    """

    attention: int
    weights: int

    def of(self, start: int, n: int) -> int:
        """How many tokens to add to a call of `n` behind `start`; 0 where that costs more than it saves."""
        saved = self.attention * start * (_ALONE * n - _TOGETHER)
        return TILE - n if n < TILE and saved > self.weights * (TILE - n) else 0


NO_PADDING = Padding(0, 0)
