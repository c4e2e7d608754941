"""Live blocks against what is in the slots, and what a look costs."""

from __future__ import annotations

from typing import Any, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.replica import live
from headstart.fleet.replica.held import HeldKeys, by_tier
from headstart.fleet.replica.live import LiveBlocks
from headstart.fleet.router.chains import block_key, checkpoint_key
from headstart.fleet.router.reports import Tier
from headstart.interfaces.engine import Shape
from headstart.interfaces.tokens import as_tokens
from headstart.interfaces.traits import Traits
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.planner import Mode
from headstart.serving.slots import Slot

BLOCK_SIZE = 3
SHAPE = Shape(2, 120, 120, 8, 0)
STEPS = st.tuples(st.integers(0, 1), st.integers(0, 12), st.lists(st.integers(0, 1), max_size=9), st.booleans())


@given(st.booleans(), st.booleans(), st.lists(STEPS, max_size=12), st.data())
@examples(200)
def test_the_slots_are_known(exact: bool, sliceable: bool, steps: list[Any], data: st.DataObject) -> None:
    """Slots are cut anywhere and go on with other tokens. Two of them often hold the same blocks."""
    held = HeldKeys()
    mode = Mode(exact, Traits(BLOCK_SIZE, sliceable=sliceable))
    slots = [Slot(number, SHAPE, BLOCK_SIZE) for number in range(2)]
    for slot in slots:
        slot.root = b"root"
    found = LiveBlocks(held, mode)
    for number, keep, tokens, canonical in steps:
        slots[number].truncate(min(keep, len(slots[number])))
        slots[number].extend(as_tokens(tokens), canonical=canonical)
        if data.draw(st.booleans()):
            continue
        found.look(slots)
        held.drain()
        expected = set()
        for slot in slots:
            usable = slot.canonical if exact else len(slot)
            ids = Chain(slot.root, BLOCK_SIZE, as_tokens(slot.tokens[:usable])).ids
            expected |= set(map(block_key, ids))
            if ids and not sliceable and usable == len(slot):
                expected.add(checkpoint_key(block_key(ids[-1])))
        assert set(by_tier(held.drained()).get(Tier.LIVE, ())) == expected


class CountedIds(list[bytes]):
    """Ids that count how often one of them is read."""

    read = 0

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        found = super().__getitem__(place)
        CountedIds.read += len(found) if isinstance(place, slice) else 1
        return found


class CountedSlot(Slot):
    @property
    def ids(self) -> list[bytes]:
        return CountedIds(super().ids)


@pytest.mark.parametrize("blocks", [100, 10_000])
def test_a_look_costs_what_has_changed(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks are live and held."""
    slot, held = CountedSlot(0, Shape(1, BLOCK_SIZE * (blocks + 2), 1, 8, 0), BLOCK_SIZE), HeldKeys()
    slot.root = b"root"
    found = LiveBlocks(held, Mode(False, Traits(BLOCK_SIZE)))
    slot.extend(as_tokens(range(BLOCK_SIZE * blocks)), canonical=True)
    found.look([slot])
    assert len(held.drain()[1][Tier.LIVE]) == blocks
    keys: list[bytes] = []
    monkeypatch.setattr(live, "block_key", lambda one: keys.append(one) or block_key(one))
    for changed, cost in ((lambda: None, 1), (lambda: slot.extend(as_tokens([7] * BLOCK_SIZE), canonical=True), 40)):
        CountedIds.read = 0
        keys.clear()
        changed()
        found.look([slot])
        removed, added = held.drain()
        assert len(keys) == len(added.get(Tier.LIVE, ())) <= 1
        assert not removed
        assert CountedIds.read <= cost
    slot.truncate(BLOCK_SIZE * (blocks - 2))
    slot.extend(as_tokens([7] * BLOCK_SIZE), canonical=True)
    CountedIds.read = 0
    keys.clear()
    found.look([slot])
    removed, added = held.drain()
    assert (len(removed[Tier.LIVE]), len(added[Tier.LIVE]), len(keys)) == (3, 1, 4)
    assert CountedIds.read <= 40
