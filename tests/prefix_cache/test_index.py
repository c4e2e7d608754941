"""The index against a plain model of it."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from effort import examples
from headstart.interfaces.tokens import BlockId, as_tokens, common_prefix
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.entry_places import EntryPlaces
from headstart.prefix_cache.index import Index
from small_blocks import BLOCK_SIZE, ROOT, TOKENS, entries_of

TIERS = st.sampled_from(["memory", "disk"])


class Heard:
    """A listener. `copies`: what it was told, in the form of `IndexMachine.copies`."""

    def __init__(self) -> None:
        self.copies: dict[BlockId, dict[str, bool]] = {}

    def added(self, entry: Entry, tier: str) -> None:
        assert self.copies.get(entry.id, {}).get(tier) in (None, False), "told twice"
        self.copies.setdefault(entry.id, {})[tier] = entry.copies[tier]

    def removed(self, entry: Entry, tier: str) -> None:
        del self.copies[entry.id][tier]
        if not self.copies[entry.id]:
            del self.copies[entry.id]


class IndexMachine(RuleBasedStateMachine):
    """`copies` says for each entry which tiers hold it, and how good."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.index = Index(BLOCK_SIZE, self.heard)
        self.copies: dict[BlockId, dict[str, bool]] = {}

    @rule(tokens=TOKENS, tier=TIERS, canonical=st.booleans(), data=st.data())
    def add(self, tokens: list[int], tier: str, canonical: bool, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(entries_of(tokens)))
        known = self.copies.get(entry.id, {}).get(tier)
        better = known is None or (canonical and not known)
        assert self.index.wants(entry.id, tier, canonical=canonical) == better
        assert self.index.add(entry, tier, canonical=canonical) == better
        if better:
            self.copies.setdefault(entry.id, {})[tier] = canonical

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.copies)))
        tier = data.draw(st.sampled_from(sorted(self.copies[key])))
        self.index.remove(key, tier)
        del self.copies[key][tier]
        if not self.copies[key]:
            del self.copies[key]

    @rule(tokens=TOKENS, canonical_only=st.booleans(), partial=st.booleans(), data=st.data())
    def match(self, tokens: list[int], canonical_only: bool, partial: bool, data: st.DataObject) -> None:
        limit = data.draw(st.integers(0, len(tokens)))
        chain = Chain(ROOT, BLOCK_SIZE, as_tokens(tokens))
        found = self.index.match(chain, limit, canonical_only=canonical_only, partial=partial)

        def usable(key: BlockId) -> bool:
            copies = self.copies.get(key, {})
            return any(copies.values()) if canonical_only else bool(copies)

        whole = 0
        while whole < limit // BLOCK_SIZE and usable(chain.ids[whole]):
            whole += 1
        assert [entry.id for entry in found.blocks] == list(chain.ids[:whole])
        rest = as_tokens(tokens[whole * BLOCK_SIZE : limit])
        fitting = [
            common_prefix(entry.tokens, rest)
            for entry in self.index
            if entry.parent == chain.parent_of(whole) and usable(entry.id)
        ]
        assert found.take == (max(fitting, default=0) if partial else 0)
        assert (found.tail is None) == (found.take == 0)
        assert found.tokens <= limit
        if found.tail is not None:
            assert found.tail.tokens[: found.take].tobytes() == rest[: found.take].tobytes()
        canonical = [any(self.copies[entry.id].values()) for entry in found.blocks]
        assert found.canonical == ([*canonical, False].index(False)) * BLOCK_SIZE

    @rule(tokens=TOKENS)
    def covered(self, tokens: list[int]) -> None:
        """What an entry makes superfluous: the known proper prefixes of it, nothing else."""
        longer = entries_of(tokens)[-1]
        found = {bytes(entry.tokens) for entry in self.index.covered(longer.parent, longer.tokens)}
        expected = {
            bytes(entry.tokens)
            for entry in self.index
            if entry.parent == longer.parent
            and len(entry.tokens) < len(longer.tokens)
            and entry.tokens.tolist() == longer.tokens[: len(entry.tokens)].tolist()
        }
        assert found == expected

    @invariant()
    def agree(self) -> None:
        self.index.check()
        assert {entry.id: entry.copies for entry in self.index} == self.copies
        assert self.heard.copies == self.copies


TestIndex = IndexMachine.TestCase
TestIndex.settings = examples(60, stateful_step_count=30)


CELLS = st.integers(0, 1 << 29)


@given(
    cells=st.lists(st.tuples(st.integers(0, 5), st.none() | CELLS), max_size=30),
    gaps=st.lists(st.integers(0, 1 << 30), min_size=6, max_size=6),
    bits=st.lists(st.booleans(), min_size=18, max_size=18),
)
def test_the_cells_of_entries_are_a_table(cells: list[tuple[int, int | None]], gaps: list[int], bits: list[bool]) -> None:
    """Against a dict. A cell and the other numbers of an entry do not touch each other."""
    index = Index(BLOCK_SIZE)
    entries = entries_of([1] * (6 * BLOCK_SIZE))
    for number, entry in enumerate(entries):
        index.add(entry, "memory", canonical=True)
        entry.gap, entry.pinned, entry.protected = gaps[number], bits[number], bits[6 + number]
        entry.holds, entry.written = gaps[-number] % 1000, gaps[number] * 3.5
    places, model = EntryPlaces(index), dict[BlockId, int]()
    for number, cell in cells:
        key = entries[number].id
        if cell is not None:
            places[key] = model[key] = cell
        elif key in model:
            assert places.pop(key) == model.pop(key)
        else:
            assert places.pop(key, None) is None
        assert dict(places) == model
        assert len(places) == len(model)
        assert [places.get(entry.id) for entry in entries] == [model.get(entry.id) for entry in entries]
    for number, entry in enumerate(entries):
        assert (entry.gap, entry.pinned, entry.protected) == (gaps[number], bits[number], bits[6 + number])
        assert (entry.holds, entry.written) == (gaps[-number] % 1000, gaps[number] * 3.5)
        assert not entry.state


@pytest.mark.parametrize(("given", "kept"), [(1.7e9 + 0.1239, 1.7e9 + 0.123), (-1.0, 0.0), (1e12, ((1 << 42) - 1) / 1000)])
def test_times_are_kept_in_milliseconds(given: float, kept: float) -> None:
    """Rounded down, so that nothing is kept too long; until the year 2109."""
    (entry,) = entries_of([1] * BLOCK_SIZE)
    entry.written = given
    assert entry.written == kept


def test_only_an_entry_of_the_index_has_a_cell() -> None:
    places, key = EntryPlaces(Index(BLOCK_SIZE)), b"k" * 32
    assert places.get(key) is None
    assert key not in places
    with pytest.raises(KeyError):
        places[key] = 1
    with pytest.raises(KeyError):
        places[key]
    with pytest.raises(KeyError):
        del places[key]


def test_entries_at_one_position_share_its_number() -> None:
    """Also where the first chain was shorter; a position that no chain has reached is kept as it is."""
    index = Index(BLOCK_SIZE)
    for blocks, token in ((400, 1), (500, 2), (500, 3)):
        for entry in entries_of([token] * (blocks * BLOCK_SIZE)):
            index.add(entry, "memory", canonical=True)
    ends = [entry for entry in index if entry.start == 499 * BLOCK_SIZE]
    assert len(ends) == 2
    assert ends[0].start is ends[1].start
    alone = Entry(b"k" * 32, b"p" * 32, as_tokens([1]), 9000 * BLOCK_SIZE)
    index.add(alone, "memory", canonical=True)
    assert alone.start == 9000 * BLOCK_SIZE
    index.check()


class WatchedEntry(Entry):
    __slots__ = ("__weakref__",)


def test_entries_are_freed_without_the_collector_which_does_not_look_at_them() -> None:
    """Chains with branches, and one whose parent went first."""
    index, made = Index(BLOCK_SIZE), dict[bytes, WatchedEntry]()
    for tokens in ([1, 1, 1, 2], [1, 1, 1, 2, 2, 2], [1, 1, 1, 3], [1, 1, 1, 3, 3], [5] * 9):
        for one in entries_of(tokens):
            if one.id not in made:
                made[one.id] = WatchedEntry(one.id, one.parent, one.tokens, one.start)
                index.add(made[one.id], "memory", canonical=len(tokens) % 2 == 0)
    index.remove(entries_of([5] * 9)[0].id, "memory")
    index.check()
    assert not any(map(gc.is_tracked, made.values()))
    watched = [weakref.ref(entry) for entry in made.values()]
    gc.disable()
    try:
        del index, made
        assert not any(ref() for ref in watched)
    finally:
        gc.enable()
