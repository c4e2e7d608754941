"""Checkpoints: where a prefill takes them, which ones are dropped later, and what one is worth.

Recurrent layers and sliding windows have state that cannot be truncated. To go back to a position, the engine needs a copy of
the state at exactly that position: a *checkpoint*. It can be taken only while a slot is exactly that long. Each is as large as
the KV of tens or thousands of tokens, so a chain has few of them.

This module decides about those of a prefill, which are at block boundaries. In fast mode `serving` takes two more: one during a
reply, which moves along with it, and one at the end of an idle slot, wherever that is.

Two kinds of positions get checkpoints during a prefill:

* *protected points*: positions where requests are known to come back. These are the landmarks of the prompt (the end of the
  system prompt, of the last user message, of the last message, and what the client marked), the positions where prompts were
  seen to diverge, and the last block boundary.
* the *lattice*: positions between them, which limit the cost if somebody goes back to a new position. They lie further apart
  the further they are from the end.

Example: on a chain of 20,000 tokens the lattice keeps a checkpoint about every 512 tokens in the last 2,000, and before that
about one in each cell of 2,048, 4,096 and 8,192 tokens. When the chain grows, the surplus is dropped (`Placement.surplus`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from headstart.interfaces.landmarks import Landmarks
from headstart.prefix_cache.blocks import last_block_boundary

GAP = 512
"""Tokens between two points of the lattice near the end of a chain."""
NEAR = 2_048
"""Tokens before the end of a chain that count as near it."""
CHANCE = 0.1
"""Chance that a request goes back to a point of the lattice, relative to a protected one. Replays hardly differ from 0.03 to
0.3.
"""
LOOSE = 0.5
"""Value of one token's KV in tokens of prefill, in models with state: it is useless without a checkpoint after it."""


def protected_points(length: int, block_size: int, branch: int, landmarks: Landmarks) -> frozenset[int]:
    """The protected points of a prompt of `length` tokens.

    Args:
        branch: how many leading tokens other prompts share; 0 if none.
    """
    end = last_block_boundary(length, block_size)
    points = (point // block_size * block_size for point in (branch, *landmarks))
    return frozenset({end, *(point for point in points if point <= end)} - {0})


def worth(gap: int, state_bytes: int, kv_bytes_per_token: int, *, protected: bool) -> float:
    """Prefill tokens that a checkpoint is expected to save, per byte. `eviction` ranks checkpoints by it.

    The last checkpoint of a chain makes the KV before it usable, so the bytes of that KV count too.

    Args:
        gap: tokens back to the checkpoint before it on its chain, or to the beginning. For a protected one: to the checkpoint
            before it that stays when the chain grows.
        state_bytes: bytes of the checkpoint.
    """
    whole = gap / (state_bytes + gap * kv_bytes_per_token)
    return whole if protected else min(whole, CHANCE * gap / state_bytes)


PlacePoints = Callable[[int, int, int, Landmarks], Iterable[int]]
"""(end, block size, branch, landmarks) → positions for checkpoints on a whole chain; they are rounded down to block boundaries.
"""
KeepPoints = Callable[[Sequence[int], int], Iterable[int]]
"""(held, end) → those of the held checkpoints that are worth their bytes, on a chain that ends at `end`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A rule that says where a prefill takes checkpoints, and which of them stay. It knows positions only, in tokens."""

    place: PlacePoints
    keep: KeepPoints

    def points(self, start: int, length: int, block_size: int, branch: int, landmarks: Landmarks) -> tuple[int, ...]:
        """The block boundaries after `start`, ascending, where a prefill takes checkpoints, the last one included.

        Args:
            start: where the prefill begins.
            length: tokens of the prompt.
            branch: how many leading tokens other prompts share; 0 if none.
        """
        end = last_block_boundary(length, block_size)
        found = {end, *(point // block_size * block_size for point in self.place(end, block_size, branch, landmarks))}
        return tuple(sorted(point for point in found if start < point <= end))

    def surplus(self, held: Sequence[int], end: int, kept: Collection[int] = ()) -> tuple[int, ...]:
        """The checkpoints to drop, ascending, on a chain that ends at `end`. The last one stays.

        Args:
            held: positions of all checkpoints on the chain, ascending, none after `end`.
            kept: positions that must stay: where known chains part, the landmarks of the prompt, and pinned checkpoints. The
                generation header is among them until the turn has settled.
        """
        stay = {*held[-1:], *kept, *self.keep(held, end)}
        return tuple(point for point in held if point not in stay)


def cells(end: int) -> Iterator[tuple[int, int]]:
    """The cells [start, stop) of the lattice on a chain up to `end`. The first checkpoint in each cell stays.

    A cell is `GAP` times a power of two long, and begins at a multiple of its length. Cells that begin at most `NEAR` + `GAP`
    before the end have the length `GAP`. Before them there is one cell of each length from `NEAR` on. Each longer cell consists
    of two cells of half its length, and its first checkpoint is the first of one of these. So a longer chain keeps only
    checkpoints that every shorter chain has kept. There is no cell at the beginning: going back to 0 needs no checkpoint. Short
    chains have two smaller cells instead.
    """
    yield from ((size, 2 * size) for size in (GAP // 4, GAP // 2) if size <= end < 4 * size)
    first = max(GAP, _up(end - NEAR - GAP, GAP))
    yield from ((start, start + GAP) for start in range(first, end + 1, GAP))
    size = NEAR
    while 2 * size <= end:
        start = (end - size) // size * size
        yield start, start + size
        size *= 2


def _up(position: int, step: int) -> int:
    """The first multiple of `step` that is not before `position`."""
    return -(-position // step) * step


def _firsts(held: Sequence[int], end: int) -> Iterator[int]:
    """The first checkpoint in each cell of the lattice."""
    for start, stop in cells(end):
        place = bisect_left(held, start)
        if place < len(held) and held[place] < stop:
            yield held[place]


LATTICE = Placement(
    lambda end, block_size, branch, landmarks: (*(_up(start, block_size) for start, _ in cells(end)), branch, *landmarks),
    _firsts,
)
"""The placement that headstart uses. `benchmarks/placements.py` has others, for comparison."""
