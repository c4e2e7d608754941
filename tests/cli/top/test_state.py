"""The state of `headstart top` follows a server: a snapshot and changes end in one state, however they are split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.cli.top.state import LATEST, TopState
from headstart.cli.top.stream import Decoder, ReadBatch
from headstart.events.hub import EventReader, Hub, View
from headstart.events.source import SlotState
from headstart.events.tap import News, RequestState
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.prefix_cache.entry import Entry
from scripted_top import batch, chat, entry, identity, request, soon, words_of

OWNER = b"alice---"


class Stored:
    """A `Source` of entries that a test changes."""

    def __init__(self) -> None:
        self.stored: dict[BlockId, Entry] = {}
        self.queue: list[News] = []
        self.pins: set[BlockId] = set()
        self.tokens = 0

    def open(self) -> list[Entry]:
        self.queue = []
        return list(self.stored.values())

    def close(self) -> None:
        return

    def past(self) -> list[Any]:
        return []

    def news(self) -> Sequence[News]:
        found, self.queue = self.queue, []
        return found

    def pinned(self, key: BlockId) -> bool:
        return key in self.pins

    def age(self, key: BlockId) -> float | None:
        return None

    def slots(self) -> list[SlotState]:
        return [SlotState(0, OWNER, "idle", self.tokens)]

    def soon(self, count: int) -> list[Any]:
        return []

    def tiers(self) -> dict[str, dict[str, int]]:
        return {"memory": {"used": len(self.stored), "budget": 99}}

    def change(self, kind: str, number: int) -> None:
        key = number.to_bytes(32, "big")
        known = self.stored.get(key)
        if known is None:
            above = (number // 2).to_bytes(32, "big")
            start, tokens = 8 * number.bit_length(), as_tokens([number] * 8)
            known = self.stored[key] = Entry(key, above, tokens, start, {"memory": True}, owner=OWNER)
        elif kind == "remove":
            del self.stored[key]
            known.copies = {}
        elif kind == "pin":
            self.pins ^= {key}
            self.queue.append(frozenset([key]))
            return
        elif kind == "disk":
            known.copies = {**known.copies, "disk": True}
        elif kind == "forget" and len(known.copies) > 1:
            known.copies = {"disk": known.copies["disk"]}
        self.tokens += number
        self.queue.append(known)


class Watcher:
    """A reader of a hub whose bytes arrive in parts."""

    def __init__(self, hub: Hub, part: int) -> None:
        self.state, self.part, self.decoder = TopState(), part, Decoder()
        self.reader: EventReader
        self.reader, first = hub.subscribe(View(OWNER, everything=True), lambda: None)
        self.take(b"".join(first))

    def take(self, data: bytes) -> None:
        for at in range(0, len(data), self.part):
            for one in self.decoder.feed(data[at : at + self.part]):
                self.state = self.state.then(one)


CHANGES = st.tuples(st.sampled_from(["add", "remove", "pin", "disk", "forget"]), st.integers(1, 12))


@examples(100)
@given(st.lists(st.lists(CHANGES, max_size=8), max_size=8), st.integers(1, 4000))
def test_snapshot_and_changes_in_any_split_end_in_one_state(periods: list[list[tuple[str, int]]], part: int) -> None:
    """Readers of a real hub that came after each period know in the end what the first one knows."""
    source = Stored()
    hub = Hub(source, threaded=False)
    watchers = [Watcher(hub, part)]
    for period in periods:
        for kind, number in period:
            source.change(kind, number)
        hub.tick()
        for one in watchers:
            one.take(one.reader.take())
        watchers.append(Watcher(hub, part))
    first = watchers[0].state
    assert first.entries.keys() == {key.hex() for key in source.stored}
    assert {one.id for one in first.entries.values() if one.pinned} == {key.hex() for key in source.pins & source.stored.keys()}
    for key, known in source.stored.items():
        assert first.entries[key.hex()].tiers == known.copies.keys()
    assert first.slots[0].tokens == source.tokens
    for one in watchers[1:]:
        assert one.state.entries == first.entries
        assert (one.state.slots, one.state.tiers, one.state.others) == (first.slots, first.tiers, first.others)


STATES = st.sampled_from(sorted(words_of(RequestState)))
EVENTS = st.one_of(
    st.lists(st.builds(request, st.integers(1, 200), STATES), max_size=5).map(lambda rows: ("requests", rows)),
    st.lists(st.integers(0, 9).map(lambda number: entry(number, number - 1 if number else None)), max_size=5).map(
        lambda rows: ("tree", rows)
    ),
)


@examples(100)
@given(st.lists(EVENTS, max_size=60), st.lists(st.integers(0, 60), max_size=8).map(sorted))
def test_batches_of_any_size_end_in_one_state(events: list[tuple[str, Any]], cuts: list[int]) -> None:
    whole, parts = TopState().then(batch(*events)), TopState().then(batch())
    for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True):
        parts = parts.then(batch(*events[start:end]))
    assert parts == whole
    assert [*parts.requests] == [*whole.requests]


def test_the_latest_requests_are_kept() -> None:
    now = TopState()
    for number in range(1, LATEST + 40):
        now = now.then(batch(("requests", [request(number, "queued")])))
    now = now.then(batch(("requests", [request(50)])))
    assert len(now.requests) == LATEST
    assert [*now.requests][-1] == 50
    assert 41 in now.requests
    assert 39 not in now.requests


def test_a_snapshot_forgets_what_was_known() -> None:
    """A server that was started again counts from 1, and has lost what was in memory."""
    before = TopState().then(batch(("tree", chat(3)), ("requests", [request(7)]), ("evicted_next", [soon(1)])))
    after = before.then(batch(("snapshot", {"owner": ""}), ("tree", chat(1, first=5))))
    assert after.entries.keys() == {identity(5)}
    assert (after.requests, after.evicted_next) == ({}, {})


def test_a_request_uses_all_that_it_builds_on() -> None:
    now = TopState().then(batch(("tree", [*chat(3), entry(9, 0)]), time=100.0))
    assert {one.used for one in now.entries.values()} == {99.0}
    now = now.then(batch(("requests", [request(1, "prefill", reused=identity(1), at=150.0)])))
    assert {number: now.entries[identity(number)].used for number in (0, 1, 2, 9)} == {0: 150.0, 1: 150.0, 2: 99.0, 9: 99.0}
    now = now.then(batch(("requests", [request(2, "stop", reused=identity(9), at=202.0)])))
    assert [now.entries[identity(number)].used for number in (0, 1, 9)] == pytest.approx([200.3, 150.0, 200.3]), "it began then"


def test_what_was_live_when_a_prefill_began() -> None:
    row = TopState().then(batch(("requests", [request(1, "prefill")]))).requests[1]
    assert (row.tiers, row.computed) == ({"disk": 300, "live": 600}, None)


def test_new_events_and_fields_are_passed_over() -> None:
    later = batch(("weather", {"sunny": True}), ("tree", [entry(1) | {"colour": "blue"}]))
    assert TopState().then(later).entries.keys() == {identity(1)}


@pytest.mark.parametrize("event", [("tree", [{}]), ("tree", 5), ("requests", [{"number": 1}]), ("slots", {"a": 1})])
def test_other_events_are_errors_that_the_feed_expects(event: tuple[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        TopState().then(ReadBatch((event,)))
