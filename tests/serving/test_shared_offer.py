"""What waits for room in the shared tier is offered in steps, also when the store fails and refuses everything."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np

from headstart.interfaces.tier import KV
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.entry_places import EntryPlaces
from headstart.prefix_cache.index import Index
from headstart.serving.shared_offer import STEP, SharedOffer
from headstart.tiers.memory import Memory

COUNT = 3 * STEP + 5


def test_a_store_that_fails_is_offered_a_few_at_a_time_and_what_waits_does_not_wait_for_ever() -> None:
    """One step of the engine thread handed over all of 65,536: replies paused for seconds."""
    index, memory = Index(64), Memory(4, 1 << 24)
    memory.keep_places(EntryPlaces(index))
    asked, answers = list[bytes](), list[bytes]()

    def refuse(label: Any, *_: Any, **__: Any) -> bool:
        asked.append(label)
        return False

    def answered() -> list[bytes]:
        return [answers.pop() for _ in range(len(answers))]

    room = SimpleNamespace(takes=lambda _: False)
    tier: Any = SimpleNamespace(
        saves={"computed"},
        computed=lambda _: None,
        lacks=lambda _: True,
        takes=lambda size: room.takes(size),
        offer=refuse,
        answered=answered,
    )
    offer = SharedOffer(index, memory, tier, lambda entry, _: entry.id, lambda _: True)  # type: ignore[arg-type, return-value]
    parent = bytes(32)
    for number in range(COUNT):
        entry = Entry(os.urandom(32), parent, np.arange(64, dtype=np.int32), number * 64)
        parent, cell = entry.id, memory.allocate(KV)
        assert cell is not None
        index.add(entry, "memory", canonical=True)
        memory.commit(entry.id, cell)
        offer.computed(entry)
    assert offer.later == COUNT
    first = next(iter(index))
    first.holds += 1
    offer.reading[first.id] = first
    offer.take_answers()
    assert not asked, "nothing was answered, so there is no room"
    room.takes = lambda _: True
    answers.append(first.id)
    for step in range(4):
        offer.take_answers()
        assert len(asked) == min(COUNT, (step + 1) * STEP)
    assert not offer.later
