"""Models with state: where a prompt may go on, by index and planner, against a search that tries every length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstart.interfaces.tokens import as_tokens, common_prefix
from headstart.interfaces.traits import Traits
from headstart.prefix_cache.blocks import Chain, block_id, checkpoint_id, last_block_boundary, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.planner import Costs, Mode, SlotView, keepable, known, next_call, plan, restorable

BLOCK_SIZE = 4
ROOT = root_id(b"model", "")
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=6 * BLOCK_SIZE + 2)
MODES = st.booleans().map(lambda exact: Mode(exact, Traits(BLOCK_SIZE, sliceable=False)))


def chain(tokens: list[int]) -> Chain:
    return Chain(ROOT, BLOCK_SIZE, as_tokens(tokens))


@st.composite
def indices(draw: st.DrawFn) -> Index:
    """Some rows and some checkpoints of some texts, tails included, in two tiers, canonical or not."""
    index = Index(BLOCK_SIZE)
    for tokens in draw(st.lists(TEXTS, max_size=5)):
        line = chain(tokens)
        ends = [*range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)] + ([len(tokens)] if len(tokens) % BLOCK_SIZE else [])
        for end in ends:
            start = (end - 1) // BLOCK_SIZE * BLOCK_SIZE
            piece, parent = as_tokens(tokens[start:end]), line.parent_of(start // BLOCK_SIZE)
            key = block_id(parent, piece)
            tier = draw(st.sampled_from(["memory", "disk"]))
            if draw(st.integers(0, 7)):
                index.add(Entry(key, parent, piece, start), tier, canonical=draw(st.booleans()) and len(piece) == BLOCK_SIZE)
            if draw(st.booleans()):
                entry = Entry(checkpoint_id(key), key, piece, start, state=True)
                index.add(entry, tier, canonical=draw(st.booleans()) and len(piece) == BLOCK_SIZE)
    index.check()
    return index


def possible(index: Index, ours: Chain, end: int, exact: bool) -> bool:
    """Whether the first `end` tokens are restorable: all rows up to there, and the checkpoint at that very place."""
    for number in range(-(-end // BLOCK_SIZE)):
        piece = as_tokens(ours.tokens[number * BLOCK_SIZE : min(end, (number + 1) * BLOCK_SIZE)])
        key = block_id(ours.parent_of(number), piece)
        rows = index.get(key)
        if rows is None or not rows.usable(canonical_only=exact):
            return False
    state = index.get(checkpoint_id(key))
    return state is not None and state.usable(canonical_only=exact)


@given(TEXTS, indices(), MODES)
def test_the_longest_restorable_prefix_is_found(tokens: list[int], index: Index, mode: Mode) -> None:
    ours = chain(tokens)
    found = restorable(index, ours, mode)
    ends = [end for end in range(1, len(tokens)) if possible(index, ours, end, mode.exact)]
    # Tails are looked for behind the last known block: where a longer piece is known, the tail in its place is history.
    reach = index.match(ours, len(tokens) - 1, canonical_only=mode.exact, partial=False).tokens
    best = max([end for end in ends if end % BLOCK_SIZE == 0 or end > reach], default=0)
    assert found.tokens == best
    if best:
        assert found.state is not None
        assert found.state.stop == best
        assert found.state.parent == found.entries[-1].id
        assert found.canonical <= best
        assert found.state.canonical or found.canonical < best
    else:
        assert found.state is None


@given(TEXTS, indices(), MODES, st.lists(st.tuples(TEXTS, st.floats(0, 1), st.booleans()), max_size=3))
def test_plans(tokens: list[int], index: Index, mode: Mode, live: list[tuple[list[int], float, bool]]) -> None:
    """What stays or comes in is a prefix of the prompt that ends at a checkpoint or a slot's very end; a token is left over."""
    ours = chain(tokens)
    slots = [SlotView(9, ROOT, as_tokens([]), 0, True, 0.0)]
    for number, (held, share, free) in enumerate(live):
        canonical = int(share * len(held)) // BLOCK_SIZE * BLOCK_SIZE
        slots.append(SlotView(number, ROOT, as_tokens(held), canonical, free, number + 1.0))
    found = plan(ours, index, slots, Costs(), mode)
    assert found is not None
    slot = next(slot for slot in slots if slot.number == found.slot)
    assert slot.free
    assert found.start < len(tokens)
    assert found.start == found.keep or not found.keep
    if found.keep:
        assert common_prefix(slot.tokens, ours.tokens) >= found.keep
        assert found.keep == len(slot.tokens) if found.state is None else found.state.stop == found.keep
        assert not mode.exact or found.keep <= slot.canonical
    elif found.start:
        assert found.state is not None
        assert found.state.stop == found.start
        assert found.restore[-1].id == found.state.parent
    if found.state is not None:
        assert found.state.canonical or not mode.exact
        assert found.canonical < found.start or found.state.canonical
    for slot in slots:
        if slot.free and found.start == 0:
            assert keepable(slot, ours, index, mode).tokens == 0
    assert known(ours, index, slots) >= restorable(index, ours, mode).tokens // BLOCK_SIZE * BLOCK_SIZE


@given(st.integers(1, 8 * BLOCK_SIZE), st.integers(1, 40), st.sets(st.integers(1, 8), max_size=4), st.data())
def test_calls_end_where_checkpoints_are_wanted(length: int, limit: int, blocks: set[int], data: st.DataObject) -> None:
    stops = [block * BLOCK_SIZE for block in blocks]
    at = data.draw(st.integers(0, length - 1))
    canonical = at if at % BLOCK_SIZE == 0 and data.draw(st.booleans()) else 0
    seen, end = [], last_block_boundary(length, BLOCK_SIZE)
    while at < length:
        size = next_call(at, length, canonical, limit, Traits(BLOCK_SIZE, sliceable=False), stops)
        assert size > 0
        if at == canonical and at < end:
            assert size % BLOCK_SIZE == 0
            canonical = at + size
        seen.append(at + size)
        at += size
    assert at == length
    assert {stop for stop in stops if seen and seen[0] <= stop < length} <= set(seen)
