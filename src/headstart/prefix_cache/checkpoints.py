"""Checkpoints: at which block boundaries a prefill takes them, which of them go as the line grows, and what one is worth.

A *line* is the chain of one prompt, from the root to its end. It has all its rows, but few checkpoints: each is as large as
the rows of tens or thousands of tokens. A checkpoint can be had only while a prefill stands at its very position, so one that
was thinned is not to be had again without computing all that leads there.

Firm points are where requests are known to come back to: landmarks, branch points, the last block boundary. The lattice between
them bounds what is lost where somebody goes back for the first time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from headstart.interfaces.landmarks import Landmarks
from headstart.prefix_cache.blocks import last_block_boundary

GAP = 512
"""Tokens between two points of the lattice near the end of a line."""
NEAR = 2_048
"""Tokens before the end of a line that are near it."""
CHANCE = 0.1
"""How likely somebody goes back to a point of the lattice, as against a firm one. Replays hardly tell 0.03 from 0.3."""
LOOSE = 0.5
"""What having a token's rows is worth in tokens: nothing until a checkpoint stands behind them."""
_MESSAGES_GAP = 8_192


def protected_points(length: int, block_size: int, branch: int, landmarks: Landmarks) -> frozenset[int]:
    """The firm points of a prompt of `length` tokens. `branch`: how many of them are known from other prompts; 0 if none."""
    end = last_block_boundary(length, block_size)
    marks = (mark // block_size * block_size for mark in (branch, *landmarks))
    return frozenset({end, *(mark for mark in marks if mark <= end)} - {0})


def worth(gap: int, state_bytes: int, kv_bytes_per_token: int, *, protected: bool) -> float:
    """Tokens of prefill that a checkpoint is expected to save, per byte: what `prefix_cache/eviction` ranks it by.

    With the last checkpoint of a line go the rows that it alone made useful, so they count too. Rows: `LOOSE` a token.

    Args:
        gap: tokens back to the checkpoint before it on its line, or to the beginning; for a firm one, to the one before it
            that stays when the line grows.
        kv_bytes_per_token: of one token.
    """
    whole = gap / (state_bytes + gap * kv_bytes_per_token)
    return whole if protected else min(whole, CHANCE * gap / state_bytes)


PlacePoints = Callable[[int, int, int, Landmarks], Iterable[int]]
"""(end, grid, branch, landmarks) → where the prefill of a whole line takes checkpoints, in tokens; rounded down to the grid."""
KeepPoints = Callable[[Sequence[int], int], Iterable[int]]
"""(held, end) → those of the checkpoints of a line that are worth their bytes, given its end."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where checkpoints go on a line: a pure function of positions, in tokens."""

    marks: PlacePoints
    keep: KeepPoints

    def points(self, start: int, length: int, block_size: int, branch: int, landmarks: Landmarks) -> tuple[int, ...]:
        """The block boundaries after `start`, ascending, where a prefill takes checkpoints, the last one included.

        Args:
            start: where the prefill begins.
            length: tokens of the prompt.
            branch: how many leading tokens of the prompt are known from other prompts; 0 if none are.
        """
        end = last_block_boundary(length, block_size)
        found = {end, *(mark // block_size * block_size for mark in self.marks(end, block_size, branch, landmarks))}
        return tuple(sorted(point for point in found if start < point <= end))

    def surplus(self, held: Sequence[int], end: int, kept: Collection[int] = ()) -> tuple[int, ...]:
        """The checkpoints that go, ascending, on a line that ends at `end`. The deepest stays.

        Args:
            held: positions of all checkpoints on the line, ascending, none behind `end`.
            kept: positions of those that must stay: where known chains part, the anchor, the current turn and, until the
                reply has settled, its header; what is pinned.
        """
        stay = {*held[-1:], *kept, *self.keep(held, end)}
        return tuple(point for point in held if point not in stay)


def cells(end: int) -> Iterator[tuple[int, int]]:
    """The cells [start, stop) of the lattice on a line up to `end`. In each, the first checkpoint stays.

    A cell is `GAP` times a power of two long and begins at a multiple of its length. Those that begin `NEAR` + `GAP` or less
    before the end are of length `GAP`; before them there is one of each length from `NEAR` on. A cell is made of two of half
    its length and its first checkpoint is the first of one of these, so what a longer line keeps, every shorter one has
    kept. The cell at the beginning is left out: going back to 0 needs no checkpoint. On short lines there is
    room for two of its parts.
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


PLACEMENTS: dict[str, Placement] = {
    "lattice": Placement(
        lambda end, block_size, branch, landmarks: (*(_up(start, block_size) for start, _ in cells(end)), branch, *landmarks),
        _firsts,
    ),
    "last": Placement(lambda *_: (), lambda *_: ()),
    "marconi": Placement(lambda _, __, branch, ___: (branch,), lambda held, _: held),
    "messages": Placement(
        lambda end, _, __, landmarks: (*range(_MESSAGES_GAP, end, _MESSAGES_GAP), *landmarks), lambda held, _: held
    ),
    "every": Placement(lambda end, block_size, _, __: range(block_size, end, block_size), lambda held, _: held),
}
"""`lattice` is headstart's own. `last`: at the end only; `marconi`: also where prompts part (after Marconi, MLSys 2025);
`messages`: at landmarks, and every 8,192 tokens (after mlx-lm's server); `every`: at each block boundary."""
