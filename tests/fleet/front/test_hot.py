"""The hot list: which beginnings of prompts are used most, within bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.front import hot
from headstart.fleet.front.hot import HALF_LIFE, HotPrompts, HotStretch, hot_prefixes
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain

BLOCK = 4
MODEL, OTHER = b"model", b"other"
ROOTS = [b"a" * 32, b"b" * 32]
EVERYTHING = 1 << 20

Blocks = tuple[int, ...]
"""A prompt whose blocks are named by a number each."""


def chain(blocks: Sequence[int], root: bytes = ROOTS[0], tail: int = 1) -> Chain:
    return Chain(root, BLOCK, as_tokens([*np.repeat(blocks, BLOCK), *range(tail)]))


def listed(stretches: Sequence[HotStretch]) -> list[tuple[bytes, Blocks]]:
    """Each prefix of the list, as the numbers of its blocks."""
    return [(one.root, tuple(one.tokens[:-1:BLOCK].tolist())) for one in hot_prefixes(stretches, BLOCK)]


def prompts_of(*asked: Sequence[int]) -> HotPrompts:
    found = HotPrompts()
    for blocks in asked:
        found.asked(MODEL, chain(blocks), 0.0)
    return found


def test_a_shared_system_prompt_comes_first() -> None:
    found = prompts_of([1, 2, 3], [7, 7, 7], [1, 2, 4], [1, 2, 5])
    stretches = found.hottest(MODEL, EVERYTHING, 0.0)
    assert listed(stretches)[0] == (ROOTS[0], (1, 2))
    assert {blocks for _, blocks in listed(stretches)} == {(1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 5), (7, 7, 7)}
    assert sum(len(one.tokens) for one in stretches) == 4 * BLOCK * (2 + 3 + 3), "what they share is there once"


def test_a_conversation_that_goes_on_counts_more_than_a_new_one_and_less_than_three() -> None:
    going = [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert listed(prompts_of(*going, [8, 8, 8, 8]).hottest(MODEL, BLOCK, 0.0)) == [(ROOTS[0], (1,))]
    three = prompts_of(*going, [8, 5], [8, 6], [8, 7])
    assert listed(three.hottest(MODEL, BLOCK, 0.0)) == [(ROOTS[0], (8,))]
    assert listed(three.hottest(MODEL, 2 * BLOCK, 0.0))[1] == (ROOTS[0], (1,)), "its last prompt, of which one block fits"


def test_short_questions_that_end_in_the_same_block_are_conversations_of_their_own() -> None:
    """Fault: all of them count as one, and the one that goes on takes the heat of the others with it."""
    found = HotPrompts()
    for tail in (1, 2, 3, 1, 2, 3):
        found.asked(MODEL, chain([1, 2], tail=tail), 0.0)
    found.asked(MODEL, chain([1, 2, 3]), 0.0)
    for last in (4, 5, 6):
        found.asked(MODEL, chain([9, last]), 0.0)
    assert [blocks for _, blocks in listed(found.hottest(MODEL, EVERYTHING, 0.0))][:3] == [(1, 2), (9,), (1, 2, 3)]


def test_what_was_asked_long_ago_counts_less() -> None:
    found = prompts_of([1, 2], [1, 3], [1, 4])
    found.asked(MODEL, chain([8]), 2 * HALF_LIFE)
    assert listed(found.hottest(MODEL, BLOCK, 2 * HALF_LIFE)) == [(ROOTS[0], (8,))]


def test_models_and_tenants_are_apart() -> None:
    found = prompts_of([1, 2])
    found.asked(OTHER, chain([1, 2], b"c" * 32), 0.0)  # another model has other roots
    found.asked(MODEL, chain([1, 2], ROOTS[1]), 0.0)
    assert sorted(listed(found.hottest(MODEL, EVERYTHING, 0.0))) == [(ROOTS[0], (1, 2)), (ROOTS[1], (1, 2))]
    assert listed(found.hottest(OTHER, EVERYTHING, 0.0)) == [(b"c" * 32, (1, 2))]


def test_the_block_with_the_last_token_is_not_listed() -> None:
    found = HotPrompts()
    found.asked(MODEL, chain([1, 2, 3], tail=0), 0.0)
    found.asked(MODEL, chain([], tail=3), 0.0)
    assert listed(found.hottest(MODEL, EVERYTHING, 0.0)) == [(ROOTS[0], (1, 2))]


def test_it_forgets() -> None:
    found = prompts_of([1, 2])
    found.forget()
    assert found.hottest(MODEL, EVERYTHING, 0.0) == []


@pytest.mark.parametrize("tokens", [-5, 0, BLOCK - 1])
def test_no_room(tokens: int) -> None:
    assert prompts_of([1, 2]).hottest(MODEL, tokens, 0.0) == []


def test_prompts_and_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot, "CONVERSATIONS", 10)
    found = prompts_of(*([number] for number in range(50)))
    assert listed(found.hottest(MODEL, EVERYTHING, 0.0)) == [(ROOTS[0], (number,)) for number in range(49, 39, -1)]
    monkeypatch.setattr(hot, "TOKENS", 20 * BLOCK)
    many = prompts_of(*([number] * 5 for number in range(50)))
    assert sum(len(one.tokens) for one in many.hottest(MODEL, EVERYTHING, 0.0)) <= 4 * 20 * BLOCK
    assert many.hottest(MODEL, EVERYTHING, 0.0)


NONSENSE = [
    [HotStretch(0, ROOTS[0], bytes(16))],
    [HotStretch(5, ROOTS[0], bytes(16))],
    [HotStretch(-1, ROOTS[0], bytes(16)), HotStretch(0, ROOTS[1], bytes(16))],
    [HotStretch(-1, ROOTS[0], bytes(15))],
]


@pytest.mark.parametrize("stretches", NONSENSE)
def test_nonsense_is_refused(stretches: list[HotStretch]) -> None:
    with pytest.raises(ValueError, match=r"no hot list|multiple of"):
        list(hot_prefixes(stretches, BLOCK))


# ── against an oracle ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Asked:
    """A request of a history. `seconds`: after the one before."""

    root: bytes
    blocks: Blocks
    seconds: float


HISTORIES = st.lists(
    st.builds(
        Asked,
        st.sampled_from(ROOTS),
        st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple),
        st.sampled_from([0.0, 1.0, 100.0, HALF_LIFE, 5000.0]),
    ),
    max_size=25,
)


def heats(history: Sequence[Asked]) -> tuple[dict[tuple[bytes, Blocks], float], float]:
    """The heat of each prefix after a history, and the time: the definition, without any structure."""
    ends: dict[tuple[bytes, Blocks], float] = {}
    now = 0.0
    for one in history:
        ends = {end: heat * 0.5 ** (one.seconds / HALF_LIFE) for end, heat in ends.items()}
        now += one.seconds
        earlier = [(root, blocks) for root, blocks in ends if root == one.root and one.blocks[: len(blocks)] == blocks]
        came = 1.0
        if earlier:
            last = max(earlier, key=lambda end: len(end[1]))
            before = ends.pop(last)
            if last[1] == one.blocks:
                came += before
            else:
                came += min(before, 2.0) / 2
                if before > 2.0:
                    ends[last] = before - 2.0
        ends[one.root, one.blocks] = came
    found: dict[tuple[bytes, Blocks], float] = {}
    for (root, blocks), heat in ends.items():
        for count in range(1, len(blocks) + 1):
            found[root, blocks[:count]] = found.get((root, blocks[:count]), 0.0) + heat
    return found, now


def blocks_of(stretches: Sequence[HotStretch]) -> Iterator[tuple[bytes, Blocks]]:
    """The blocks of a list, in order, each with all before it."""
    for one, (root, whole) in zip(stretches, listed(stretches), strict=True):
        own = len(one.tokens) // 4 // BLOCK
        for count in range(len(whole) - own + 1, len(whole) + 1):
            yield root, whole[:count]


@given(HISTORIES, st.integers(0, 12))
@examples(1000)
def test_the_list_has_the_hottest_blocks(history: list[Asked], room: int) -> None:
    found, now = HotPrompts(), 0.0
    for one in history:
        now += one.seconds
        found.asked(MODEL, chain(one.blocks, one.root), now)
    expected, _ = heats(history)
    got = list(blocks_of(found.hottest(MODEL, room * BLOCK + 1, now)))
    assert len(got) == len(set(got)) == min(room, len(expected))
    assert [expected[one] for one in got] == pytest.approx(sorted(expected.values(), reverse=True)[:room])
    for number, (root, blocks) in enumerate(got):
        assert len(blocks) == 1 or (root, blocks[:-1]) in got[:number], "a block before the one that it continues"
