"""Where checkpoints go: what a chain may hold, what going back may cost, and that thinning never regrets."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

import pytest
from benchmarks.placements import PLACEMENTS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headstart.interfaces.landmarks import Landmarks
from headstart.prefix_cache.blocks import last_block_boundary
from headstart.prefix_cache.checkpoints import GAP, LATTICE, NEAR, Placement, cells, protected_points, worth

BLOCK_SIZE = 64
HEADER = 20
"""Tokens of the generation header."""
EXAMPLES = settings(deadline=None)
GRIDS = st.sampled_from([16, 48, 64, 256, 512, 1024])
TURNS = st.lists(st.integers(1, 3_000) | st.integers(1, 60_000), min_size=1, max_size=60)
POSITIONS = st.integers(0, 40_000)
LANDMARKS = st.builds(Landmarks, POSITIONS, POSITIONS, POSITIONS, st.lists(POSITIONS, max_size=3).map(tuple))


@dataclass
class GrowingChain:
    """A conversation that grows, and goes back; it computes from its deepest checkpoint that fits."""

    placement: Placement = LATTICE
    block_size: int = BLOCK_SIZE
    anchor: int = 0
    length: int = 0
    held: list[int] = field(default_factory=list)
    branches: set[int] = field(default_factory=set)

    def before(self, position: int) -> int:
        """The last checkpoint that is not behind a position."""
        place = bisect_right(self.held, position)
        return self.held[place - 1] if place else 0

    def grow(self, tokens: int, *, back: int | None = None, turn: int = 0) -> int:
        """The next prompt: of the text so far it keeps the first `back` tokens. How many tokens are computed for it."""
        known = self.length if back is None else back
        self.length = known + tokens
        start = self.before(min(known, last_block_boundary(self.length, self.block_size)))
        if back is not None:
            self.branches.add(back // self.block_size * self.block_size)
        self.held = [point for point in self.held if point <= known]
        landmarks = Landmarks(min(self.anchor, self.length), turn, max(turn, self.length - HEADER))
        points = self.placement.points(start, self.length, self.block_size, known, landmarks)
        self.held = sorted({*self.held, *points})
        kept = {mark // self.block_size * self.block_size for mark in landmarks} | self.branches
        gone = self.placement.surplus(self.held, last_block_boundary(self.length, self.block_size), sorted(kept))
        assert not kept & {*gone}
        self.held = [point for point in self.held if point not in gone]
        return self.length - start


def lattice(length: int) -> set[int]:
    """The points of the lattice on a chain of `length` tokens."""
    end = last_block_boundary(length, BLOCK_SIZE)
    return {start for start, _ in cells(end)}


@EXAMPLES
@given(TURNS, st.integers(0, 20_000), st.integers(1, 12), st.sampled_from([48, 64, 256, 1024]))
@example([64] * 50, 100, 3, 64)
@example([4_096, 1, 1], 70, 2, 64)
def test_a_growing_chat_holds_few(turns: list[int], anchor: int, every: int, block_size: int) -> None:
    """7 + log2(n / 512), whatever the sizes of its turns; `every` so many of them a user says something."""
    chain, turn = GrowingChain(block_size=block_size, anchor=anchor), 0
    for number, tokens in enumerate(turns):
        if number % every == 0:
            turn = chain.length + tokens
        chain.grow(tokens, turn=turn)
        assert len(chain.held) <= max(0.0, 7 + math.log2(chain.length / 512)), (chain.length, chain.held)


@EXAMPLES
@given(TURNS, GRIDS, st.data())
def test_going_back_costs_no_more_than_the_way(turns: list[int], block_size: int, data: st.DataObject) -> None:
    """At most a gap of the lattice near the end; farther back, at most twice the way from the end."""
    chain = GrowingChain(block_size=block_size)
    for tokens in turns:
        chain.grow(tokens)
        position = data.draw(st.integers(0, chain.length))
        way, lost = chain.length - position, position - chain.before(position)
        assert lost < GAP + block_size if way <= NEAR else lost <= 2 * way + block_size, (chain.length, position, chain.held)


@pytest.mark.parametrize("block_size", [48, 64])
def test_going_back_anywhere(block_size: int) -> None:
    """The same for all positions of some lengths, and the bound is no looser than it must be."""
    worst = 0.0
    for length in (65, 600, 1_500, 2_560, 2_624, 4_097, 8_256, 12_289, 33_000, 65_600, 126_977):
        chain = GrowingChain(block_size=block_size)
        chain.grow(length)
        for position in range(length + 1):
            way, lost = length - position, position - chain.before(position)
            if way <= NEAR:
                assert lost < GAP + block_size
            else:
                worst = max(worst, lost / (way + block_size))
    assert 1.5 < worst <= 2


@EXAMPLES
@given(TURNS)
def test_a_grown_line_holds_what_a_fresh_one_would_take(turns: list[int]) -> None:
    """Nothing that was thinned is missed later, however the chain grew."""
    chain = GrowingChain()
    for tokens in turns:
        chain.grow(tokens)
        assert lattice(chain.length) <= {*chain.held}


@EXAMPLES
@given(st.integers(0, 300_000), st.integers(0, 300_000), st.sets(st.integers(1, 4_000)))
def test_what_a_longer_line_keeps_a_shorter_one_has_kept(one: int, other: int, blocks: set[int]) -> None:
    """Also where the lattice has holes, because checkpoints were evicted or never taken."""
    short, long = sorted((one, other))
    held = sorted(block * BLOCK_SIZE for block in blocks)
    reached = [point for point in held if point <= short]
    kept = {*reached} - {*LATTICE.surplus(reached, short)}
    assert {point for point in LATTICE.keep(held, long) if point <= short} <= kept


@EXAMPLES
@given(st.lists(st.integers(1, 3_000), min_size=2, max_size=20), st.data())
def test_the_second_request_on_a_branch_finds_it(turns: list[int], data: st.DataObject) -> None:
    """The first one that goes back pays the way to the lattice; the second at the same place only its own tokens."""
    chain = GrowingChain()
    for tokens in turns:
        chain.grow(tokens)
    back = data.draw(st.integers(1, chain.length))
    first = chain.grow(BLOCK_SIZE + 1, back=back)
    assert first <= 2 * BLOCK_SIZE + max(GAP + BLOCK_SIZE, 2 * (sum(turns) - back))
    assert chain.grow(data.draw(st.integers(1, 5_000)), back=back) - (chain.length - back) < BLOCK_SIZE
    assert chain.grow(1, back=chain.length - 1) <= BLOCK_SIZE, "the same prompt again"


@pytest.mark.parametrize("name", PLACEMENTS)
@EXAMPLES
@given(st.integers(0, 40_000), st.integers(1, 40_000), GRIDS, POSITIONS, LANDMARKS)
def test_points_are_grid_points_of_the_prefill(
    name: str, start: int, length: int, block_size: int, branch: int, landmarks: Landmarks
) -> None:
    """Ascending, at block boundaries, behind the start; the last one always; the same whatever was asked before."""
    placement = PLACEMENTS[name]
    points = placement.points(start, length, block_size, branch, landmarks)
    end = last_block_boundary(length, block_size)
    assert [*points] == sorted({*points})
    assert all(point % block_size == 0 and start < point <= end for point in points)
    assert (end in points) == (start < end)
    whole = placement.points(0, length, block_size, branch, landmarks)
    assert points == tuple(point for point in whole if point > start)


@pytest.mark.parametrize("name", PLACEMENTS)
@EXAMPLES
@given(st.sets(st.integers(1, 700)), st.sets(st.integers(1, 700)), st.integers(0, 200))
def test_surplus_spares_what_it_must(name: str, blocks: set[int], spared: set[int], behind: int) -> None:
    """The deepest stays, and what must; thinning twice is thinning once."""
    held, kept = sorted(block * BLOCK_SIZE for block in blocks), sorted(block * BLOCK_SIZE for block in spared)
    end = (held[-1] if held else 0) + behind
    gone = PLACEMENTS[name].surplus(held, end, kept)
    assert [*gone] == sorted({*held} & {*gone})
    assert not {*gone} & {*kept, *held[-1:]}
    rest = [point for point in held if point not in gone]
    assert PLACEMENTS[name].surplus(rest, end, kept) == ()


@EXAMPLES
@given(st.integers(1, 40_000), GRIDS, POSITIONS, LANDMARKS)
def test_firm_points_are_taken(length: int, block_size: int, branch: int, landmarks: Landmarks) -> None:
    """Landmarks and the branch point, rounded down: never a state that has seen a token behind them."""
    points = protected_points(length, block_size, branch, landmarks)
    assert points <= {*LATTICE.points(0, length, block_size, branch, landmarks)}
    end = last_block_boundary(length, block_size)
    for mark in (branch, *landmarks):
        assert mark // block_size == 0 or mark // block_size * block_size > end or mark // block_size * block_size in points


def test_short_prompts_have_points_too() -> None:
    """A single message of 200 tokens; a system prompt of 130 and a question."""
    assert LATTICE.points(0, 200, BLOCK_SIZE, 0, Landmarks(0, 190, 190)) == (128, 192)
    assert LATTICE.points(0, 300, BLOCK_SIZE, 0, Landmarks(130, 290, 290)) == (128, 256)
    assert LATTICE.points(0, 64, BLOCK_SIZE, 0, Landmarks(0, 60, 60)) == ()


def test_a_long_prompt_takes_a_gap_near_its_end_and_doubles_it_before() -> None:
    points = LATTICE.points(0, 40_000, BLOCK_SIZE, 0, Landmarks())
    assert points == (16_384, 24_576, 32_768, 36_864, 37_376, 37_888, 38_400, 38_912, 39_424, 39_936)


def test_a_loop_of_tools_comes_back_to_its_turn() -> None:
    """Eight calls, then a user message that strips the reasoning of all of them: only what is left is computed."""
    chain = GrowingChain(anchor=1_000)
    chain.grow(1_300, turn=1_300)
    for _ in range(8):
        chain.grow(1_500, turn=1_300)
    assert chain.length == 13_300
    stripped = chain.grow(700, back=1_305, turn=1_900)
    assert stripped - 700 <= 5 + BLOCK_SIZE


def test_a_checkpoint_is_worth_its_gap() -> None:
    """More for a longer gap and a smaller state; the lattice less than firm points, but never more than its rows with it."""
    large, small = 75 << 20, 160 << 10
    assert worth(600, large, 24 << 10, protected=True) > worth(500, large, 24 << 10, protected=True)
    assert worth(500, small, 24 << 10, protected=True) > worth(500, large, 24 << 10, protected=True)
    assert worth(500, large, 24 << 10, protected=False) < worth(100, large, 24 << 10, protected=True)
    assert worth(512, small, 12 << 10, protected=False) == worth(512, small, 12 << 10, protected=True)
    assert worth(512, small, 0, protected=True) == 512 / small, "a model without rows"


def test_other_placements() -> None:
    """What they are compared for: see `PLACEMENTS`."""
    landmarks = Landmarks(1_000, 9_000, 20_000, (5_000,))
    taken = {name: placement.points(0, 20_010, BLOCK_SIZE, 3_000, landmarks) for name, placement in PLACEMENTS.items()}
    assert taken["last"] == (19_968,)
    assert taken["marconi"] == (2_944, 19_968)
    assert taken["messages"] == (960, 4_992, 8_192, 8_960, 16_384, 19_968)
    assert taken["every"] == tuple(range(64, 20_000, 64))
    assert {*taken["lattice"]} >= {960, 2_944, 4_992, 8_960, 19_968}
    held = [64, 128, 640, 6_400]
    assert PLACEMENTS["last"].surplus(held, 6_400) == (64, 128, 640)
    assert PLACEMENTS["marconi"].surplus(held, 6_400) == PLACEMENTS["messages"].surplus(held, 6_400) == ()
