from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.interfaces.tokens import Tokens, as_tokens, common_prefix
from headstart.interfaces.traits import Traits
from headstart.prefix_cache.blocks import Chain, block_id, last_block_boundary, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.planner import Costs, Mode, Plan, SlotView, canonical_part, keepable, next_call, plan, restorable
from headstart.testing.fake_engine import FakeEngine

BLOCK_SIZE = 4
ROOT, OTHER = root_id(b"model", ""), root_id(b"model", "another tenant")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=5 * BLOCK_SIZE)
MODES = st.builds(
    lambda exact, decode, settles, sliceable: Mode(
        exact, Traits(BLOCK_SIZE, decode_is_prefill=decode, sliceable=sliceable), settles
    ),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([True, True, True, False]),
)


def chain(tokens: list[int]) -> Chain:
    return Chain(ROOT, BLOCK_SIZE, as_tokens(tokens))


@st.composite
def indices(draw: st.DrawFn) -> Index:
    """Some entries of some conversations, canonical or derived, with gaps."""
    index = Index(BLOCK_SIZE)
    for tokens in draw(st.lists(TOKENS, max_size=4)):
        whole = chain(tokens)
        parents = [whole.parent_of(number) for number in range(len(whole.ids) + 1)]
        parts = [(whole.block(number), number * BLOCK_SIZE) for number in range(len(whole.ids))]
        if len(tokens) % BLOCK_SIZE:
            parts.append((as_tokens(tokens[len(whole.ids) * BLOCK_SIZE :]), len(whole.ids) * BLOCK_SIZE))
        for parent, (part, start) in zip(parents, parts, strict=False):
            if draw(st.integers(0, 4)):
                entry = Entry(block_id(parent, part), parent, part, start)
                index.add(entry, "memory", canonical=draw(st.booleans()))
    return index


@st.composite
def slot_views(draw: st.DrawFn) -> list[SlotView]:
    views = []
    for number in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(st.integers(0, 1), max_size=5 * BLOCK_SIZE))
        canonical = draw(st.integers(0, len(tokens) // BLOCK_SIZE)) * BLOCK_SIZE
        root = draw(st.sampled_from([ROOT, ROOT, OTHER]))
        used = draw(st.floats(0, 100))
        views.append(SlotView(number, root, as_tokens(tokens), canonical, draw(st.booleans()), used))
    return views


def keep_cost(slot: SlotView, kept: int, length: int, costs: Costs, mode: Mode) -> float:
    """What is cut off a slot, as far as it is of use, must be restored for its owner later on."""
    worth = slot.canonical if mode.exact and not mode.any_cut else len(slot.tokens)
    lost = worth if kept < worth else 0
    return (length - kept) * costs.prefill + lost * costs.restore


@examples(400)
@given(TOKENS, indices(), slot_views(), MODES, st.sampled_from([1e-6, 9e-4]), st.booleans())
def test_plan(tokens: list[int], index: Index, slots: list[SlotView], mode: Mode, restore: float, reuse: bool) -> None:
    """Never beyond what is restorable or live, at least one token computed, exact never upon derived rows, cheapest."""
    ours, costs = chain(tokens), Costs(prefill=1e-3, restore=restore)
    found = plan(ours, index, slots, costs, mode, reuse=reuse)
    free = {slot.number: slot for slot in slots if slot.free}
    if found is None:
        assert not free
        return
    assert found.slot in free
    assert found.length == len(tokens)
    assert 0 <= found.start < found.length, "nothing would be computed: stale logits"
    assert found.computed + found.start == found.length
    assert found.canonical <= found.start
    if not reuse:
        assert found.start == found.passed_over == 0
    if found.keep:
        slot = free[found.slot]
        assert not found.restore
        assert slot.root == ROOT, "another tenant's rows"
        assert slot.tokens[: found.keep].tolist() == tokens[: found.keep]
        assert found.start == found.keep
        assert found.canonical <= slot.canonical
        assert mode.traits.sliceable or found.keep == len(slot.tokens)
    if found.restore:
        assert_restorable(found, ours, index, mode)
    if mode.exact and not mode.any_cut:
        assert found.canonical == found.start
        assert found.start % BLOCK_SIZE == 0
    if reuse:
        best = found.computed * costs.prefill + found.restored * costs.restore
        oldest = min(free.values(), key=lambda slot: (slot.last_used, slot.number))
        possible = restorable(index, ours, mode).tokens
        assert found.passed_over == max(0, possible - found.start)
        if found.keep:
            slot = free[found.slot]
            best = keep_cost(slot, found.keep, found.length, costs, mode)
            if slot is oldest and found.keep >= possible:  # restoring would overwrite it, and bring no more
                best = min(best, found.computed * costs.prefill + possible * costs.restore)
        assert best <= (found.length - possible) * costs.prefill + possible * costs.restore + 1e-12
        for slot in free.values():
            kept = keepable(slot, ours, index, mode).tokens
            assert not kept or best <= keep_cost(slot, kept, found.length, costs, mode) + 1e-12


def test_rows_are_not_restored_over_themselves() -> None:
    """Of the only slot a prompt needs all but the end; memory has as much of it, in the same form."""
    tokens, index = [0] * 5 * BLOCK_SIZE, Index(BLOCK_SIZE)
    ours, held = chain(tokens), chain([*tokens[: 3 * BLOCK_SIZE], *[1] * BLOCK_SIZE])
    for number in range(3):
        block = held.block(number)
        index.add(Entry(held.ids[number], held.parent_of(number), block, number * BLOCK_SIZE), "memory", canonical=True)
    mode, costs = Mode(False, Traits(BLOCK_SIZE)), Costs(prefill=1e-3, restore=1e-6)
    for canonical, restored in ((4 * BLOCK_SIZE, 0), (BLOCK_SIZE, 3)):  # canonical rows are worth a copy
        slot = SlotView(0, ROOT, held.tokens, canonical, True, 0.0)
        found = plan(ours, index, [slot], costs, mode)
        assert found is not None
        assert (found.start, len(found.restore)) == (3 * BLOCK_SIZE, restored)


def test_a_long_slot_is_not_cut_where_another_loses_nothing() -> None:
    long, short = chain([*[0] * 3 * BLOCK_SIZE, *[1] * 100 * BLOCK_SIZE]), chain([0] * 2 * BLOCK_SIZE)
    slots = [SlotView(number, ROOT, one.tokens, len(one), True, float(number)) for number, one in enumerate((long, short))]
    found = plan(
        chain([0] * 5 * BLOCK_SIZE),
        Index(BLOCK_SIZE),
        slots,
        Costs(prefill=1e-3, restore=1e-4),
        Mode(False, Traits(BLOCK_SIZE)),
    )
    assert found is not None
    assert (found.slot, found.keep) == (1, 2 * BLOCK_SIZE)


def assert_restorable(found: Plan, ours: Chain, index: Index, mode: Mode) -> None:
    taken = 0
    for number, entry in enumerate(found.restore):
        last = number == len(found.restore) - 1
        take = found.take if last else len(entry.tokens)
        assert index.get(entry.id) is entry
        assert entry.copies
        assert entry.start == taken
        assert entry.parent == ours.parent_of(number)
        assert entry.tokens[:take].tolist() == ours.tokens[taken : taken + take].tolist()
        assert 0 < take <= len(entry.tokens)
        assert not mode.exact or entry.canonical
        assert last or take == BLOCK_SIZE
        taken += take
    assert taken == found.start == found.restored
    assert all(entry.canonical for entry in found.restore if entry.stop <= found.canonical)


@given(TOKENS, slot_views(), MODES)
def test_keepable(tokens: list[int], slots: list[SlotView], mode: Mode) -> None:
    for slot in slots:
        kept, ours = keepable(slot, chain(tokens), Index(BLOCK_SIZE), mode).tokens, as_tokens(tokens)
        assert 0 <= kept < len(tokens)
        assert kept <= common_prefix(slot.tokens, ours)
        if kept and slot.root != ROOT:
            raise AssertionError("another tenant's rows")
        if mode.exact and not mode.any_cut:
            assert kept <= slot.canonical
            assert kept % BLOCK_SIZE == 0
        elif mode.traits.sliceable and slot.root == ROOT:
            shared = min(common_prefix(slot.tokens, ours), len(tokens) - 1)
            assert shared - kept < BLOCK_SIZE, "fast mode gives back less than a block"
            assert kept == shared or kept < slot.canonical or kept % BLOCK_SIZE == 0


@given(TOKENS, indices(), MODES)
def test_restorable(tokens: list[int], index: Index, mode: Mode) -> None:
    found = restorable(index, chain(tokens), mode)
    assert found.tokens < len(tokens)
    if not mode.traits.sliceable:
        assert not found.tokens
    if mode.exact:
        assert all(entry.canonical for entry in found.blocks)
        assert found.tail is None or (mode.any_cut and found.tail.canonical)


LENGTHS = st.one_of(st.integers(1, 6 * BLOCK_SIZE), st.integers(1, 6).map(lambda blocks: blocks * BLOCK_SIZE))


def calls(
    start: int,
    length: int,
    canonical: int,
    limit: int,
    traits: Traits,
    fills: Callable[[int, int], bool] = lambda start, count: False,
) -> list[tuple[int, int]]:
    """All calls as (start, stop), with the canonical bookkeeping of a slot."""
    made, begun = [], (start, canonical)
    while start < length:
        size = next_call(start, length, canonical, limit, traits, (), fills)
        assert size >= 1
        canonical += canonical_part(start, size, length, canonical, traits)
        made.append((start, start + size))
        start += size
    if begun == (canonical, canonical) and begun[0] % traits.block_size == 0:
        assert canonical == max(begun[0], last_block_boundary(length, traits.block_size))
    return made


@given(LENGTHS, st.integers(1, 8 * BLOCK_SIZE), st.booleans(), st.data())
def test_next_call_on_canonical_ground(length: int, limit: int, chunking: bool, data: st.DataObject) -> None:
    """Whole blocks from a block boundary on, then the open tail in one call: the same calls wherever a warm run starts."""
    traits = Traits(BLOCK_SIZE, chunking=chunking)
    end = last_block_boundary(length, BLOCK_SIZE)
    start = data.draw(st.integers(0, end // BLOCK_SIZE)) * BLOCK_SIZE
    made = calls(start, length, start, limit, traits)
    assert [stop for _, stop in made[:-1]] == [begin for begin, _ in made[1:]]
    assert made[0][0] == start
    assert made[-1] == (end, length), "the tail is a call of its own"
    for begin, stop in made[:-1]:
        assert begin % BLOCK_SIZE == stop % BLOCK_SIZE == 0
        assert stop - begin <= max(BLOCK_SIZE, limit)
        assert chunking or stop - begin == BLOCK_SIZE


@given(st.integers(1, 6 * BLOCK_SIZE), st.integers(1, 8 * BLOCK_SIZE), st.data())
def test_next_call_on_derived_ground(length: int, limit: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1))
    canonical = data.draw(st.integers(0, start))
    made = calls(start, length, canonical, limit, Traits(BLOCK_SIZE))
    assert made[0][0] == start
    assert made[-1][1] == length
    assert all(stop - begin <= max(BLOCK_SIZE, limit) for begin, stop in made)


@given(LENGTHS, st.integers(1, 8 * BLOCK_SIZE), st.integers(1, BLOCK_SIZE), st.data())
def test_a_tail_that_fills_a_block_joins_the_call_before_it(length: int, limit: int, least: int, data: st.DataObject) -> None:
    """Where the limit has room for it, and no checkpoint is taken between them."""
    end = last_block_boundary(length, BLOCK_SIZE)
    start = data.draw(st.integers(0, end // BLOCK_SIZE)) * BLOCK_SIZE

    def fills(boundary: int, count: int) -> bool:
        assert (boundary, count) == (end, length - end)
        return count >= least

    made = calls(start, length, start, limit, Traits(BLOCK_SIZE), fills)
    *before, (begin, stop) = made
    assert stop == length
    if begin < end:
        assert length - end >= least
        assert end - begin + BLOCK_SIZE <= limit
    elif before and length - end >= least:
        assert end - before[-1][0] + BLOCK_SIZE > limit // BLOCK_SIZE * BLOCK_SIZE
    if end > start:
        size = next_call(end - BLOCK_SIZE, length, end - BLOCK_SIZE, limit, Traits(BLOCK_SIZE), (end,), fills)
        assert size == BLOCK_SIZE, "a checkpoint is taken at the boundary"


@examples(150)
@given(LENGTHS, st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, BLOCK_SIZE), st.data())
def test_warm_calls_give_the_bits_of_cold_ones(
    length: int, cold_limit: int, warm_limit: int, chunking: bool, least: int, data: st.DataObject
) -> None:
    """On an engine whose bits depend on how calls are cut: any grid point, any stall target, the same logits."""
    options = {"chunking": chunking, "least_filling": least}
    engine = FakeEngine(block_size=BLOCK_SIZE, batch=6 * BLOCK_SIZE, ctx=64, slots=2, **options)
    tokens = np.arange(length, dtype=np.int32)
    start = data.draw(st.integers(0, last_block_boundary(length, BLOCK_SIZE) // BLOCK_SIZE)) * BLOCK_SIZE

    def compute(slot: int, begin: int, stop: int, limit: int) -> None:
        for first, last in calls(begin, stop, begin, min(limit, engine.shape.batch), engine.traits, engine.fills_block):
            engine.prefill(slot, tokens[first:last], logits=last == stop)

    compute(0, 0, length, cold_limit)
    cold = engine.logits(0)
    if start:
        compute(1, 0, start + 1, warm_limit)  # a shorter prompt, of which the whole blocks stay
        engine.truncate(1, start)
    compute(1, start, length, warm_limit)
    assert engine.logits(1).tobytes() == cold.tobytes()


# ── edges ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def known(tokens: list[int], *, canonical: bool = True) -> Index:
    index, whole = Index(BLOCK_SIZE), chain(tokens)
    for number, key in enumerate(whole.ids):
        entry = Entry(key, whole.parent_of(number), whole.block(number), number * BLOCK_SIZE)
        index.add(entry, "memory", canonical=canonical)
    return index


def idle(tokens: Tokens | None = None, canonical: int = 0, number: int = 0) -> SlotView:
    return SlotView(number, ROOT, as_tokens([] if tokens is None else tokens), canonical, True, 0.0)


def test_prompt_ending_exactly_on_a_grid_point() -> None:
    tokens = list(range(3 * BLOCK_SIZE))
    for exact in (True, False):
        found = plan(chain(tokens), known(tokens), [idle()], Costs(), Mode(exact, Traits(BLOCK_SIZE)))
        assert found is not None
        start = 2 * BLOCK_SIZE if exact else 3 * BLOCK_SIZE - 1
        assert (found.start, found.computed, found.canonical) == (start, 3 * BLOCK_SIZE - start, 2 * BLOCK_SIZE)


def test_prompt_shorter_than_one_block() -> None:
    for length in range(1, BLOCK_SIZE):
        found = plan(chain([7] * length), known([7] * 8), [idle()], Costs(), Mode(True, Traits(BLOCK_SIZE)))
        assert found is not None
        assert (found.start, found.computed) == (0, length)
        assert next_call(0, length, 0, 64, Traits(BLOCK_SIZE)) == length


def test_identical_prompt_again_computes_its_last_token() -> None:
    """The prefix covers the whole prompt: nothing forwarded, stale logits."""
    tokens = as_tokens(range(2 * BLOCK_SIZE + 1))
    for exact in (True, False):
        slot = idle(tokens, canonical=2 * BLOCK_SIZE)
        found = plan(chain(tokens.tolist()), Index(BLOCK_SIZE), [slot], Costs(), Mode(exact, Traits(BLOCK_SIZE)))
        assert found is not None
        assert found.keep == 2 * BLOCK_SIZE
        assert found.computed == 1


@pytest.mark.parametrize(("settles", "rest", "start"), [(False, 5, 8), (True, 5, 10), (True, 39, 10), (True, 40, 8)])
@pytest.mark.parametrize("live", [True, False])
def test_where_two_texts_part(settles: bool, rest: int, start: int, live: bool) -> None:
    """In the middle of a canonical block: back to its beginning, unless turns are settled and the rest is short."""
    held, asked = list(range(12)), [*range(10), *range(50, 50 + rest)]
    slots = [idle(as_tokens([*held, *range(90, 120)]), 12) if live else idle()]
    index = Index(BLOCK_SIZE) if live else known(held)
    found = plan(chain(asked), index, slots, Costs(), Mode(False, Traits(BLOCK_SIZE), settles))
    assert found is not None
    assert (found.start, found.canonical) == (start, start if live else 8)


def test_exact_mode_ignores_derived_rows() -> None:
    tokens = list(range(3 * BLOCK_SIZE + 1))
    index = known(tokens, canonical=False)
    exact = plan(chain(tokens), index, [idle()], Costs(), Mode(True, Traits(BLOCK_SIZE)))
    fast = plan(chain(tokens), index, [idle()], Costs(), Mode(False, Traits(BLOCK_SIZE)))
    assert exact is not None
    assert fast is not None
    assert (exact.start, fast.start, fast.canonical) == (0, 3 * BLOCK_SIZE, 0)


def test_another_tenant_gets_nothing() -> None:
    tokens = list(range(3 * BLOCK_SIZE + 1))
    theirs = replace(chain(tokens), root=OTHER)
    found = plan(theirs, known(tokens), [idle(as_tokens(tokens), 12)], Costs(), Mode(False, Traits(BLOCK_SIZE)))
    assert found is not None
    assert found.start == 0


def test_slot_is_chosen_by_what_it_saves() -> None:
    tokens = list(range(20))
    slots = [idle(), idle(as_tokens(tokens[:8]), 8, 1), idle(as_tokens(tokens[:16]), 16, 2)]
    found = plan(chain(tokens), Index(BLOCK_SIZE), slots, Costs(), Mode(True, Traits(BLOCK_SIZE)))
    assert found is not None
    assert (found.slot, found.keep) == (2, 16)


def test_a_conversation_goes_on_in_its_slot_also_in_exact_mode() -> None:
    """What was decoded there is of no use in exact mode, so nothing is lost by cutting it off: no rows are moved."""
    tokens = list(range(20))
    slots = [idle(), idle(as_tokens([*tokens[:16], 98, 99]), 16, 1)]
    found = plan(chain(tokens), known(tokens), slots, Costs(), Mode(True, Traits(BLOCK_SIZE)))
    assert found is not None
    assert (found.slot, found.keep) == (1, 16)


def test_restoring_takes_the_slot_that_was_longest_unused() -> None:
    tokens = list(range(20))
    slots = [replace(idle(number=number), last_used=used) for number, used in enumerate([3.0, 1.0, 2.0])]
    found = plan(chain(tokens), known(tokens), slots, Costs(), Mode(True, Traits(BLOCK_SIZE)))
    assert found is not None
    assert (found.slot, found.restored) == (1, 16)
