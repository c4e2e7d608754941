"""Fetching from a store: what is asked for, what pauses it, and what counts as progress. All with real stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.interfaces.tier import STATE
from headstart.tiers.shared import reading
from headstart.tiers.shared.folder import FolderStore
from headstart.tiers.shared.keys import FleetKeys, TagKeys
from headstart.tiers.shared.reading import Reading
from headstart.tiers.shared.valkey import ValkeyStore
from stores import HOST, ValkeyServer, slowly_before
from tiers_shared import answered, fetched, payload_of, prompt, request, tier_of

KEYS = TagKeys(FleetKeys.generate())
SIZE = 20_000


def wait_for(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FolderStore]:
    (tmp_path / "store").mkdir()
    store = FolderStore(tmp_path / "store", 30.0)
    yield store
    store.close()


class Counted(FolderStore):
    """A folder that counts how often it is asked."""

    calls = 0

    def have(self, names: Sequence[str]) -> list[bool]:
        self.calls += 1
        assert len(names) <= self.at_once
        return super().have(names)


def test_fetching_pauses_while_nobody_takes(store: FolderStore) -> None:
    """Fault: a prompt of some GiB arrives in memory that no budget covers, while the engine thread is busy."""
    wanted = request(prompt(40), SIZE)
    writer = tier_of(store, KEYS)
    for block in range(40):
        writer.offer(wanted.label(block), payload_of(block, SIZE))
    answered(writer, 40)
    ahead = 3 * SIZE
    tier = tier_of(store, KEYS, room=4 * ahead)
    fetch = tier.fetch(wanted, lambda: None)
    assert isinstance(fetch, Reading)
    wait_for(lambda: fetch._full and fetch._untaken >= ahead)
    time.sleep(0.05)
    assert tier.counters["fetched_bytes"] <= 2 * ahead
    now = tier._link.clock()
    assert fetch.progress >= now, "it waits for this server, not for the store"
    found = []
    while not fetch.over:
        found += fetch.take()
        time.sleep(0.001)
    assert [one.payload.tobytes() for one in found] == [payload_of(block, SIZE).tobytes() for block in range(40)]
    writer.close(5)
    tier.close(5)


def test_memory_of_what_is_not_needed_any_more_is_used_again(store: FolderStore) -> None:
    wanted, other = request(prompt(2), SIZE), request(prompt(2, 1), SIZE)
    tier = tier_of(store, KEYS)
    for number, one in enumerate((wanted, other)):
        for block in range(2):
            tier.offer(one.label(block), payload_of(2 * number + block, SIZE))
    answered(tier, 4)
    first = fetched(tier, wanted)
    kept, freed = (one.payload for one in first)
    first[1].free()
    second = fetched(tier, other)
    assert [one.payload.tobytes() for one in second] == [payload_of(block, SIZE).tobytes() for block in (2, 3)]
    assert any(np.shares_memory(one.payload, freed) for one in second)
    assert kept.tobytes() == payload_of(0, SIZE).tobytes()
    tier.close(5)


def test_prompts_that_fetch_at_the_same_time_share_memory() -> None:
    ahead = reading.ReadAhead(60)
    with ahead.shared():
        assert ahead.each == 60
        with ahead.shared(), ahead.shared():
            assert ahead.each == 20
        assert ahead.each == 60
    assert reading.ReadAhead(1 << 40).each == reading.AHEAD
    assert reading.ReadAhead(0).each == 1


def test_a_fetch_that_nobody_takes_ends_when_it_is_stopped(store: FolderStore) -> None:
    wanted = request(prompt(20), SIZE)
    tier = tier_of(store, KEYS, room=4 * 4 * SIZE)
    for block in range(20):
        while not tier.offer(wanted.label(block), payload_of(block, SIZE)):  # the queue is as small
            time.sleep(0.005)
    answered(tier, 20)
    fetch = tier.fetch(wanted, lambda: None)
    assert isinstance(fetch, Reading)
    wait_for(lambda: fetch._full)
    fetch.stop()
    wait_for(lambda: fetch._over)
    assert tier.counters["fetched"] < 20
    tier.close(5)


def test_what_waits_for_a_thread_does_not_blame_the_store(store: FolderStore) -> None:
    """Fault: more prompts than threads, so the last ones stop waiting; the breaker then opens on a store that works."""
    tier = tier_of(store, KEYS)
    fetch = Reading(request(prompt(4), SIZE), tier._link, lambda: None)
    for _ in range(5):
        fetch.stop(stalled=True)
    assert not tier.counters
    assert tier._link.breaker.closed
    fetch._begun = True
    fetch.stop(stalled=True)
    assert tier.counters["fault_stalled"] == 1
    tier.close(5)


def test_what_others_receive_is_progress(store: FolderStore) -> None:
    tier = tier_of(store, KEYS)
    wanted = request(prompt(2), SIZE)
    for block in range(2):
        tier.offer(wanted.label(block), payload_of(block, SIZE))
    answered(tier, 2)
    waits = Reading(wanted, tier._link, lambda: None)
    before = waits.progress
    assert waits.progress == before
    assert len(fetched(tier, wanted)) == 2
    assert waits.progress > before
    tier.close(5)


@pytest.mark.parametrize("begun", [False, True], ids=["for-a-thread", "for-a-slow-store"])
def test_no_request_waits_longer_than_it_would_compute(store: FolderStore, begun: bool) -> None:
    tier = tier_of(store, KEYS)
    waits = Reading(request(prompt(2), SIZE, prefill=0.001), tier._link, lambda: None)
    waits._made -= 1
    before = waits.progress
    store.received += 1
    waits._begun = begun
    assert waits.progress == before
    waits.stop(stalled=True)
    assert waits.unfetched == ("slow" if begun else "failed")
    assert tier._link.breaker.closed
    tier.close(5)


def test_a_large_object_on_a_slow_network_is_progress(tmp_path: Path) -> None:
    """Fault: an object that takes longer than the wait without progress is given up again and again."""
    server = ValkeyServer(tmp_path)
    wanted = request(prompt(1), 600_000)
    writer = tier_of(server.store(10.0), KEYS)
    writer.offer(wanted.label(0), payload_of(0, 600_000))
    answered(writer, 1)
    with slowly_before(server.port, pause=0.05) as port:
        tier = tier_of(ValkeyStore(HOST, port, timeout=30.0), KEYS)
        fetch = tier.fetch(wanted, lambda: None)
        assert fetch is not None
        seen = set()
        while not fetch.over and not (taken := fetch.take()):
            seen.add(fetch.progress)
            time.sleep(0.01)
        assert len(taken) == 1
        assert len(seen) > 4
        tier.close(5)
    writer.close(5)
    server.kill()


@examples(40)
@given(st.integers(1, 60), st.integers(0, 60), st.sets(st.integers(0, 59)), st.sampled_from([2, 4, 8, 128]))
def test_the_depth_is_where_the_first_object_is_missing(
    tmp_path_factory: pytest.TempPathFactory, blocks: int, there: int, here: set[int], at_once: int
) -> None:
    """Some stores are asked for a few objects at a time only, and the number of questions grows with the logarithm."""
    chain = prompt(blocks)
    here = {block for block in here if block < blocks}
    wanted = request(chain, 16, here=frozenset(chain.ids[block] for block in here))
    store = Counted(tmp_path_factory.mktemp("store"), 30.0)
    store.at_once = at_once
    tier = tier_of(store, KEYS)
    for block in range(min(there, blocks)):
        store.put(tier._link.name(wanted.label(block)), memoryview(b"x"))
    fetch = Reading(wanted, tier._link, lambda: None)
    expected = next((block for block in range(blocks) if block >= there and block not in here), blocks)
    assert fetch._depth() == expected
    assert store.calls <= 1 + next(depth for depth in range(99) if at_once**depth >= blocks)
    assert tier.counters["missing"] == 0, "nothing was lost"
    tier.close(5)


@pytest.mark.parametrize("at_once", [4, 128])
@pytest.mark.parametrize(
    ("there", "depth", "missing"),
    [(range(0), 0, 0), (range(5), 5, 0), (range(10), 10, 0), ({0, 1, 4, 5, 6, 7, 8, 9}, 2, 1), (range(1, 10), 0, 1)],
    ids=["new", "longer than before", "all", "lost in the middle", "lost its head"],
)
def test_missing_is_what_the_store_has_lost(
    store: FolderStore, there: Collection[int], depth: int, missing: int, at_once: int
) -> None:
    """Fault: each prompt that nobody had sent before was counted."""
    store.at_once = at_once
    tier, wanted = tier_of(store, KEYS), request(prompt(10), SIZE)
    writer = tier_of(store, KEYS)
    for block in there:
        writer.offer(wanted.label(block), payload_of(block, SIZE))
    answered(writer, len(there))
    assert len(fetched(tier, wanted)) == depth
    assert tier.counters["missing"] == missing
    for one in (tier, writer):
        one.close(5)


def test_what_was_missing_a_moment_ago_is_not_lost(store: FolderStore) -> None:
    """Another server has stored it meanwhile, and this one does not ask for it again."""
    tier, writer, wanted = tier_of(store, KEYS), tier_of(store, KEYS), request(prompt(10), SIZE)
    for block in (0, 4, 9):
        writer.offer(wanted.label(block), payload_of(block, SIZE))
    tier._link.missing.add(wanted.label(1).key)
    answered(writer, 3)
    assert len(fetched(tier, wanted)) == 1
    assert tier.counters["missing"] == 0
    for one in (tier, writer):
        one.close(5)


def test_the_last_checkpoint_in_the_store_is_found(store: FolderStore) -> None:
    chain = prompt(30)
    wanted = request(chain, SIZE, stateful=True, state_bytes=SIZE)
    tier = tier_of(store, KEYS)
    labels = [wanted.label(block) for block in range(20)] + [wanted.label(block, STATE) for block in (2, 11)]
    for number, label in enumerate(labels):
        tier.offer(label, payload_of(number, SIZE))
    answered(tier, len(labels))
    for store.at_once in (3, 128):
        found = fetched(tier, wanted)
        assert [one.label.start for one in found] == [88, *range(0, 96, 8)]
        assert found[0].label.kind == STATE
    tier.close(5)


def test_nothing_is_asked_again_for_a_while(tmp_path: Path) -> None:
    """The hot path: a prompt that nobody has computed costs one question, and its like none for some seconds."""
    store = Counted(tmp_path, 30.0)
    tier = tier_of(store, KEYS)
    wanted = request(prompt(50), SIZE)
    assert fetched(tier, wanted) == []
    assert store.calls == 1
    assert tier.fetch(wanted, lambda: None) is None
    assert store.calls == 1
    tier.close(5)


def test_a_fetch_that_asks_nothing_does_not_close_the_breaker(store: FolderStore) -> None:
    tier = tier_of(store, KEYS)
    tier._link.breaker.trip(tier._link.clock())
    wanted = request(prompt(2), SIZE)
    fetch = Reading(wanted, tier._link, lambda: None)
    fetch.stop()
    fetch.run()
    assert not tier._link.breaker.closed
    tier.close(5)


def test_a_batch_is_as_large_as_the_network_is_fast(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BATCH_SECONDS", 1.0)
    tier = tier_of(store, KEYS)
    wanted = request(prompt(100), SIZE)
    goal = [wanted.label(block) for block in range(100)]
    fetch = Reading(wanted, tier._link, lambda: None)
    tier._link.pace._bandwidth = 10.0 * SIZE
    assert [len(batch) for batch in fetch._batches(goal)] == [10] * 10
    tier._link.pace._bandwidth = SIZE / 100
    assert [len(batch) for batch in fetch._batches(goal[:3])] == [1] * 3
    tier.close(5)
