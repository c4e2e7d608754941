"""Many entries become few lines, and no token is lost on the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.cli.top.state import TopState
from headstart.cli.top.tree import BRANCHES, LINES, Stretch, lines, stretches
from scripted_top import chat, entry, identity, soon, state


def tokens(state: TopState) -> int:
    return sum(one.tokens for one in state.entries.values() if not one.checkpoint)


def test_a_run_without_a_branch_is_one_stretch() -> None:
    (one,) = stretches(state(("tree", chat(500))))
    assert (one.tokens, one.branches, one.tiers) == (500 * 64, (), {"memory": 500 * 64})


def test_branches_begin_where_prompts_part() -> None:
    tree = [*chat(4), *chat(3, first=10, parent=3, seconds_ago=50.0), *chat(2, first=20, parent=3, tiers="disk")]
    now = state(("tree", tree), ("evicted_next", [soon(11), soon(12)]))
    (root,) = stretches(now)
    assert (root.tokens, root.below) == (256, 320)
    assert [(one.tokens, dict(one.tiers), one.evicted_next) for one in root.branches] == [
        (128, {"disk": 128}, {}),  # the latest used first
        (192, {"memory": 192}, {"least_value": 2}),
    ]


def test_checkpoints_and_pins_mark_their_stretch() -> None:
    tree = [*chat(2, pinned=True), entry(9, 1, checkpoint=True), entry(5, 1)]
    (root,) = stretches(state(("tree", tree)))
    assert (root.checkpoints, root.pinned, root.tokens) == (1, True, 192)


def test_what_follows_a_gap_is_a_stretch_too() -> None:
    found = stretches(state(("tree", [entry(0), entry(5, 4)])))
    assert [one.start for one in found] == [0, 320]


def test_what_is_folded_counts_all_that_continues_it() -> None:
    tree = [entry(0)]
    for number in range(BRANCHES + 2):
        tree += [*chat(2, first=100 * number + 100, parent=0), entry(100 * number + 150, 100 * number + 101)]
        tree.append(entry(100 * number + 160, 100 * number + 101))
    *_, last = lines(stretches(state(("tree", tree))))
    assert (last.folded, last.tokens) == (2, 2 * 4 * 64)


def test_ten_thousand_branches_are_a_few_lines() -> None:
    tree = [entry(0), *(entry(number, 0, seconds_ago=float(number)) for number in range(1, 10_000))]
    now = state(("tree", tree))
    found = lines(stretches(now))
    assert len(found) == 2 + BRANCHES
    assert found[-1].folded == 9999 - BRANCHES
    assert sum(line.tokens for line in found) == tokens(now)
    assert found[1].stretch is not None
    assert found[1].stretch.first == identity(1)


def test_a_chat_with_a_thousand_edits_needs_no_recursion() -> None:
    tree = chat(3000)
    edits = [entry(10_000 + number, number) for number in range(2999)]
    now = state(("tree", [*tree, *edits]))
    found = lines(stretches(now))
    assert len(found) == LINES
    assert sum(line.tokens for line in found) == tokens(now)


@examples(200)
@given(st.lists(st.sampled_from([1, 1, 1, 2, 3, 9, 99]), max_size=80), st.integers(1, 40))
def test_no_token_is_lost(back: list[int], most: int) -> None:
    """Each entry continues the one so many before it; if there is none, it is the first of a prompt."""
    tree = [entry(number, number - step if number >= step else None) for number, step in enumerate(back)]
    now = state(("tree", tree))
    roots = stretches(now)
    found = lines(roots, most)
    assert len(found) <= most
    assert sum(line.tokens for line in found) == tokens(now)

    def all_of(one: Stretch) -> int:
        assert one.below == sum(map(all_of, one.branches))
        return one.tokens + one.below

    assert sum(map(all_of, roots)) == tokens(now)
