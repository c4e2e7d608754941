"""The hub on a source that a test plays: bounded whatever happens, the same for all readers, and nothing that is not theirs."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from headstart.errors import Overloaded
from headstart.events import hub as hub_module
from headstart.events.hub import KEPT_TICKS, LINGER, READERS, EventReader, Hub, View
from headstart.events.item import EACH
from headstart.events.source import PastRequest, SlotState, Why
from headstart.events.tap import News
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.prefix_cache.entry import Entry
from headstart.serving.request import Report

ALICE, BOB = b"alice---", b"bob-----"


class Played:
    """A `Source` whose news a test writes."""

    def __init__(self) -> None:
        self.stored: dict[BlockId, Entry] = {}
        self.queue: list[News] | None = []
        self.opened = 0
        self.open_now = False
        self.pins: set[BlockId] = set()
        self.ended: list[PastRequest] = []
        self.busy = ""

    def open(self) -> list[Entry]:
        self.opened += 1
        self.open_now = True
        self.queue = []
        return list(self.stored.values())

    def close(self) -> None:
        self.open_now = False

    def past(self) -> list[PastRequest]:
        return self.ended

    def news(self) -> Sequence[News] | None:
        found, self.queue = self.queue, []
        return found

    def pinned(self, key: BlockId) -> bool:
        return key in self.pins

    def age(self, key: BlockId) -> float | None:
        return 1.0

    def slots(self) -> list[SlotState]:
        used = SlotState(1, BOB, self.busy, 8 * len(self.stored)) if self.busy else SlotState(1, b"", "idle", 0)
        return [SlotState(0, ALICE, "idle", 77), used]

    def soon(self, count: int) -> list[tuple[BlockId, Why]]:
        return [(key, "least_value") for key in list(self.stored)[:count]]

    def tiers(self) -> dict[str, dict[str, int]]:
        return {"memory": {"used": len(self.stored), "budget": 9}}

    def add(self, number: int, owner: bytes = ALICE, parent: int | None = None) -> Entry:
        key = number.to_bytes(32, "big")
        above = b"r" * 32 if parent is None else parent.to_bytes(32, "big")
        entry = Entry(key, above, as_tokens([number % 250] * 8), 0 if parent is None else 8, {"memory": True}, owner=owner)
        self.stored[key] = entry
        self.tell(entry)
        return entry

    def remove(self, number: int) -> None:
        entry = self.stored.pop(number.to_bytes(32, "big"))
        entry.copies = {}
        self.tell(entry)

    def tell(self, news: News) -> None:
        if self.queue is not None:
            self.queue.append(news)


class Screen:
    """A reader that keeps what it reads, as a page would."""

    def __init__(self, hub: Hub, view: View, last_id: str = "") -> None:
        self.reader: EventReader
        self.events: list[tuple[str, Any]] = []
        self.last_id = last_id
        self.read = b""
        self.entries: dict[str, dict[str, Any]] = {}
        self.reader, first = hub.subscribe(view, lambda: None, last_id)
        self.show(first)

    def show(self, parts: Iterable[bytes]) -> None:
        data = b"".join(parts)
        self.read += data
        for frame in data.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in frame.splitlines() if line)
            if not fields:
                continue
            self.last_id = fields.get("id", self.last_id)
            name, value = fields["event"], json.loads(fields["data"])
            self.events.append((name, value))
            if name == "snapshot":
                self.entries = {}
            for item in value if name == "tree" else ():
                if "left" in item:
                    self.entries.pop(item["left"], None)
                else:
                    self.entries.setdefault(item["id"], {}).update(item)

    def take(self) -> list[tuple[str, Any]]:
        before = len(self.events)
        self.show([self.reader.take()])
        return self.events[before:]


@pytest.fixture
def source() -> Played:
    return Played()


def hub_of(source: Played, clock: Callable[[], float] = lambda: 0.0) -> Hub:
    return Hub(source, threaded=False, clock=clock)


def test_a_reader_knows_what_is_stored(source: Played) -> None:
    source.add(1)
    source.add(2, parent=1)
    hub = hub_of(source)
    screen = Screen(hub, View(ALICE))
    assert len(screen.entries) == 2
    source.add(3, parent=1).pinned = True
    source.remove(2)
    source.stored[(1).to_bytes(32, "big")].copies = {"memory": True, "disk": True}
    source.tell(source.stored[(1).to_bytes(32, "big")])
    source.add(4)
    source.remove(4)  # within one period: nobody hears of it
    hub.tick()
    screen.take()
    assert {int(key, 16): one["tiers"] for key, one in screen.entries.items()} == {
        1: {"memory": True, "disk": True},
        3: {"memory": True},
    }
    assert [one["parent"] for one in screen.entries.values()] == [None, (1).to_bytes(32, "big").hex()]
    source.pins.add((3).to_bytes(32, "big"))
    source.tell(frozenset(source.pins))
    hub.tick()
    assert next(value for name, value in screen.take() if name == "tree")[0]["pinned"]
    fresh = Screen(hub, View(ALICE))
    assert {key: one["tiers"] for key, one in fresh.entries.items()} == {
        key: one["tiers"] for key, one in screen.entries.items()
    }


def test_a_reader_sees_the_sizes_of_others_only(source: Played) -> None:
    source.add(1, ALICE)
    hub = hub_of(source)
    alice, bob, operator = (Screen(hub, view) for view in (View(ALICE), View(BOB), View(b"operator", everything=True)))
    source.add(0xBEEF, BOB)
    source.add(0xF00D, ALICE)
    hub.tick()
    for screen in (alice, bob, operator):
        screen.take()
    own, foreign = (0xF00D).to_bytes(32, "big").hex().encode(), (0xBEEF).to_bytes(32, "big").hex().encode()
    assert own in alice.read
    assert foreign not in alice.read
    assert BOB.hex().encode() not in alice.read
    assert foreign in bob.read
    assert own not in bob.read
    assert ALICE.hex().encode() not in bob.read
    assert own in operator.read
    assert foreign in operator.read
    sizes = [value for name, value in alice.events if name == "sizes"][-1]
    assert sizes == {"yours": {"entries": 2, "tokens": 16}, "others": {"entries": 1, "tokens": 8}}
    slots = [next(value for name, value in screen.events if name == "slots") for screen in (alice, bob)]
    assert slots[0][0] == {"slot": 0, "state": "idle", "tokens": 77}
    assert slots[1] == [{"slot": 0, "state": "idle"}, {"slot": 1, "state": "idle"}]


def test_what_ended_before_somebody_read_is_told_once(source: Played) -> None:
    now = 0.0
    hub = hub_of(source, lambda: now)

    def told(owner: bytes = ALICE) -> list[str]:
        screen = Screen(hub, View(owner))
        hub.unsubscribe(screen.reader)
        found = [one for name, value in screen.events if name == "requests" for one in value]
        assert sorted({one["number"] for one in found}) == [one["number"] for one in found]
        return [one["id"] for one in found]

    report = Report(prompt=20, live=8, restored=0, computed=12, completion=3, mode="fast", ttft=0.5)
    source.ended = [PastRequest(f"{number}", owner, 0, 1e9, report) for number, owner in enumerate((ALICE, BOB, ALICE))]
    assert told() == ["0", "2"]
    assert told(BOB) == ["1"]
    now += LINGER
    assert not hub.tick()
    source.ended.append(PastRequest("2", ALICE, 0, 1e9, replace(report, ttft=0.25)))
    assert told() == ["0", "2", "2"], "a client may repeat an id"
    source.ended = [PastRequest(f"{number}", ALICE, 0, 1e9, report) for number in range(10, 300)]
    source.queue = None
    hub.tick()
    assert len(told()) == EACH


def test_a_reader_hears_nothing_if_nothing_changes_for_it(source: Played) -> None:
    """Not even that something happened: Bob's entries are pinned, get copies and will be evicted, and his reply grows."""
    source.add(1, ALICE)
    source.add(2, BOB)
    source.busy = "prefill"
    hub = hub_of(source)
    alice, bob, operator = (Screen(hub, view) for view in (View(ALICE), View(BOB), View(b"operator", everything=True)))
    ticks = range(hub_module.SELDOM)
    for number in ticks:
        entry = source.stored[(2).to_bytes(32, "big")]
        source.busy = "reply"
        source.pins ^= {entry.id}
        source.tell(frozenset({entry.id}))
        if number == 3:
            entry.copies = {"memory": True, "disk": True}
            source.tell(entry)
            source.stored = dict(reversed(source.stored.items()))  # his is evicted next
        hub.tick()
    heard = [[name for name, _ in screen.take()] for screen in (alice, bob, operator)]
    assert heard[0] == []
    assert {*heard[1]} >= {"tree", "slots", "mark"}
    assert {*heard[2]} >= {"tree", "slots", "evicted_next", "sizes", "mark"}
    source.busy = ""
    hub.tick()
    assert [name for name, _ in alice.take()] == ["slots", "mark"]


def test_a_snapshot_goes_on_with_the_next_changes(source: Played) -> None:
    """What changes for a moment between two looks must not stay on the screen of a reader that came just then."""
    hub = hub_of(source)
    early = Screen(hub, View(BOB))
    hub.tick()
    source.busy = "reply"
    late = Screen(hub, View(BOB))
    source.busy = ""
    hub.tick()
    for screen in (early, late):
        screen.take()
        assert [value for name, value in screen.events if name == "slots"][-1][1]["state"] == "idle"


def test_no_line_is_too_long_for_a_client(source: Played) -> None:
    """Fault: readers that take lines of at most 64 KiB, as asyncio's do, failed as soon as some hundred entries were stored."""
    for number in range(700):
        source.add(number, parent=number)
    hub = hub_of(source)
    screen = Screen(hub, View(ALICE))
    for number in range(700, 1400):
        source.add(number, parent=number)
    hub.tick()
    screen.take()
    assert len(screen.entries) == 1400
    assert 20_000 < max(map(len, screen.read.splitlines())) < 1 << 16


def test_a_slow_reader_is_dropped_and_others_are_not(source: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "WAITING", 20_000)
    hub = hub_of(source)
    slow, quick = Screen(hub, View(ALICE)), Screen(hub, View(ALICE))
    for number in range(300):
        source.add(number)
        hub.tick()
        quick.take()
    assert hub.readers == 1
    assert slow.reader.over
    assert [name for name, _ in slow.take()] == ["dropped"]
    assert slow.take() == []
    assert len(quick.entries) == 300
    assert not quick.reader.over


def test_a_reader_that_comes_back_gets_what_it_missed(source: Played) -> None:
    hub = hub_of(source)
    screen = Screen(hub, View(ALICE))
    source.add(1)
    hub.tick()
    screen.take()
    hub.unsubscribe(screen.reader)
    source.add(2)
    hub.tick()
    source.remove(1)
    source.add(3, BOB)
    hub.tick()
    back = Screen(hub, View(ALICE), screen.last_id)
    assert "snapshot" not in {name for name, _ in back.events}
    tree = [item for name, value in back.events if name == "tree" for item in value]
    assert [int(item.get("id") or item["left"], 16) for item in tree] == [2, 1]
    again = Screen(hub, View(ALICE), back.last_id)
    assert again.events == []
    assert source.opened == 1


@pytest.mark.parametrize("last_id", ["", "x", "0-0", "ffffffff-3", "{epoch}-999999", "{epoch}-x"])
def test_a_reader_that_cannot_go_on_gets_a_snapshot(source: Played, last_id: str) -> None:
    hub = hub_of(source)
    source.add(1)
    epoch = Screen(hub, View(ALICE)).last_id.partition("-")[0]
    assert Screen(hub, View(ALICE), last_id.format(epoch=epoch)).events[0][0] == "snapshot"


def test_what_is_kept_for_those_who_come_back_is_bounded(source: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEPT", 10_000)
    hub = hub_of(source)
    screen = Screen(hub, View(ALICE))
    first = screen.last_id
    for number in range(200):
        source.add(number)
        hub.tick()
        screen.take()
    assert hub._size <= 10_000
    assert sum(batch.size for batch in hub._kept) == hub._size
    assert Screen(hub, View(ALICE), first).events[0][0] == "snapshot"


def test_what_is_kept_for_those_who_come_back_is_young(source: Played) -> None:
    """Events name entries, which may have been deleted meanwhile."""
    hub = hub_of(source)
    screen = Screen(hub, View(ALICE))
    source.add(1)
    hub.tick()
    for _ in range(KEPT_TICKS - 1):
        hub.tick()
    assert Screen(hub, View(ALICE), screen.last_id).events[0][0] == "tree"
    hub.tick()
    assert not any(part.name == "tree" for batch in hub._kept for part in batch.parts)
    assert sum(batch.size for batch in hub._kept) == hub._size
    assert Screen(hub, View(ALICE), screen.last_id).events[0][0] == "snapshot"


def test_lost_news_begin_all_anew(source: Played) -> None:
    hub = hub_of(source)
    screens = [Screen(hub, View(ALICE)) for _ in range(2)]
    source.add(1)
    source.queue = None
    hub.tick()
    for screen in screens:
        assert screen.take()[0][0] == "snapshot"
        assert len(screen.entries) == 1
    assert source.opened == 2


def test_nothing_runs_while_nobody_reads(source: Played) -> None:
    now = 0.0
    hub = hub_of(source, lambda: now)
    assert not hub.tick()
    assert source.opened == 0
    screen = Screen(hub, View(ALICE))
    source.add(1)
    assert hub.tick()
    now = 100.0
    hub.unsubscribe(screen.reader)
    hub.unsubscribe(screen.reader)
    assert hub.tick(), "it may come back"
    now += LINGER
    assert not hub.tick()
    assert not source.open_now
    assert not hub._kept
    assert not len(hub._mirror)
    assert len(Screen(hub, View(ALICE), screen.last_id).entries) == 1
    assert source.opened == 2


def test_readers_are_limited(source: Played) -> None:
    hub = hub_of(source)
    screens = [Screen(hub, View(ALICE)) for _ in range(READERS)]
    with pytest.raises(Overloaded):
        hub.subscribe(View(ALICE), lambda: None)
    hub.unsubscribe(screens[0].reader)
    Screen(hub, View(ALICE))


def test_no_owner_keeps_others_out(source: Played) -> None:
    hub = hub_of(source)
    alice = [Screen(hub, View(ALICE)) for _ in range(READERS)]
    with pytest.raises(Overloaded, match=f"and {READERS} of them are yours"):
        Screen(hub, View(ALICE))
    bob = [Screen(hub, View(BOB)) for _ in range(READERS // 2)]
    assert hub.readers == READERS
    assert [screen.reader.over for screen in alice] == [False] * (READERS // 2) + [True] * (READERS // 2), "the newest yield"
    name, value = alice[-1].take()[-1]
    assert (name, "close some" in value["reason"]) == ("dropped", True)
    for owner in (ALICE, BOB):
        with pytest.raises(Overloaded):
            Screen(hub, View(owner))
    carol = Screen(hub, View(b"carol"))
    assert [sum(not one.reader.over for one in own) for own in (alice, bob)] == [READERS // 2 - 1, READERS // 2]
    assert not carol.reader.over


def test_the_operator_always_gets_in(source: Played) -> None:
    hub = hub_of(source)
    tenants = [Screen(hub, View(b"%d" % number)) for number in range(READERS)]
    with pytest.raises(Overloaded, match="and 0 of them are yours"):
        Screen(hub, View(ALICE))
    operator = [Screen(hub, View(ALICE, everything=True)) for _ in range(READERS)]
    assert all(screen.reader.over for screen in tenants)
    for view in (View(ALICE), View(b"", everything=True)):
        with pytest.raises(Overloaded):
            Screen(hub, view)
    assert not any(screen.reader.over for screen in operator)


def test_events_are_made_once_for_all_readers(source: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    write = json.dumps

    def counted(*args: Any, **how: Any) -> str:
        nonlocal made
        made += 1
        return write(*args, **how)

    counts = []
    for readers in (1, 20):
        hub = hub_of(Played() if readers == 1 else source)
        played = hub._source
        assert isinstance(played, Played)
        screens = [Screen(hub, View(ALICE)) for _ in range(readers)]
        with monkeypatch.context() as patch:
            patch.setattr(json, "dumps", counted)
            made = 0
            for number in range(50):
                played.add(number)
            hub.tick()
            counts.append(made)
        waiting = [screen.reader._waiting[0] for screen in screens]
        assert all(one is waiting[0] for one in waiting), "not even copied"
    assert counts[0] == counts[1]


def test_a_hundred_thousand_events_take_no_memory(source: Played) -> None:
    hub = hub_of(source)
    screens = [Screen(hub, View(owner)) for owner in (ALICE, BOB)]
    grown: list[int] = []
    number = 0
    for _ in range(4):
        for _ in range(125):
            for _ in range(100):
                source.add(number, (ALICE, BOB)[number % 2])
                number += 1
            hub.tick()
            for done in range(number - 100, number):
                source.remove(done)
            hub.tick()
            for screen in screens:
                screen.reader.take()
        gc.collect()
        grown.append(sys.getallocatedblocks())
    assert number * 2 == 100_000
    assert not len(hub._mirror)
    assert not hub._mirror.held
    assert hub._mirror.totals(ALICE) == ({"entries": 0, "tokens": 0}, {"entries": 0, "tokens": 0})
    assert grown[3] - grown[1] < 2000, "blocks of memory, after 50,000 events more"
