"""Writing to a store: what is refused, in which order, and what happens when a store loses everything. With real stores."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.errors import Unavailable
from headstart.tiers.disk import Label, Note
from headstart.tiers.shared import expiry, writing
from headstart.tiers.shared import tier as tiers
from headstart.tiers.shared.data_keys import DATA_KEY, DataKeys
from headstart.tiers.shared.folder import FolderStore
from headstart.tiers.shared.keys import FleetKeys, TagKeys
from headstart.tiers.shared.names import parse
from headstart.tiers.shared.s3 import LATE
from headstart.tiers.shared.store import Blob, StoreError
from headstart.tiers.shared.tier import Saves, StoreTier
from headstart.tiers.shared.valkey import ValkeyStore
from live import wait_until
from stores import HOST, ValkeyServer
from tiers_shared import OTHER, OWNER, answered, fetched, payload_of, prompt, request, tier_of

KEYS = TagKeys(FleetKeys.generate())
SIZE = 20_000
READER = ("--user", "reader", "on", ">secret", "%R~hs1/*", "resetchannels", "-@all", "+get", "+exists")
"""The user that docs/shared.md has for servers that only read."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FolderStore]:
    store = FolderStore(tmp_path, 30.0)
    yield store
    store.close()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path, READER)
    yield server
    server.kill()


class Held(FolderStore):
    """A folder that takes nothing until it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 30.0)
        self.may = threading.Event()

    def have(self, names: list[str]) -> list[bool]:  # type: ignore[override]
        self.may.wait(30)
        return super().have(names)


class Hung(FolderStore):
    """A folder whose first call ends in time, but goes on reading what it was given."""

    given: Blob | None = None

    def put(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        if self.given is None and parse(name).kind == "kv":  # type: ignore[union-attr]
            self.given = data
            raise StoreError("timeout", "no answer")
        return super().put(name, data, age=age, life=life)


class Punctual(FolderStore):
    """A folder that takes nothing late, as S3."""

    def put(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        return age <= (age + life) * LATE and super().put(name, data, age=age, life=life)


def kv(store: FolderStore) -> int:
    return sum((name := parse(one.name)) is not None and name.kind == "kv" for one in store.objects())


def test_what_follows_a_refused_entry_is_refused_until_that_is_stored(tmp_path: Path) -> None:
    """Fault: the queue was full for a parent and not for its children, which fill the store and cannot be used."""
    store = Held(tmp_path)
    tier = tier_of(store, KEYS, room=3 * SIZE)
    wanted = request(prompt(6), SIZE)
    taken = [tier.offer(wanted.label(block), payload_of(block, SIZE)) for block in range(4)]
    assert taken == [True, True, True, False]
    store.may.set()
    answered(tier, 3)
    assert not tier.offer(wanted.label(4), payload_of(4, SIZE))
    assert not tier.offer(wanted.label(5), payload_of(5, SIZE))
    assert tier.counters["skipped_full"] == 1
    assert tier.counters["skipped_parent"] == 2
    for block in (3, 4, 5):  # as when a request uses the chain
        assert tier.offer(wanted.label(block), payload_of(block, SIZE))
    answered(tier, 3)
    assert kv(store) == 6
    tier.close(5)
    store.close()


@pytest.mark.parametrize("head", [7200, 90_000], ids=["late", "expired"])
def test_what_follows_an_entry_that_is_too_old_is_not_stored(tmp_path: Path, head: float) -> None:
    """Fault: S3 took nothing of an old head, and all that follows it, of which nobody could use anything."""
    store = Punctual(tmp_path, 30.0)
    tier = tier_of(store, KEYS, expire=86_400.0)
    wanted, other = request(prompt(5), SIZE), request(prompt(1, 9), SIZE)
    labels = [replace(wanted.label(block), written=time.time() - (60 if block else head)) for block in range(5)]
    for _ in range(2):  # it is offered again when it is used again
        with tier._writing._changed:  # one batch
            assert all(tier.offer(label, payload_of(block, SIZE)) for block, label in enumerate(labels))
        answered(tier, 5)
    assert not tier.offer(labels[1], payload_of(1, SIZE))
    assert tier.counters["skipped_late"] == 2
    assert tier.counters["skipped_parent"] == 9
    assert all(tier.lacks(wanted.label(block).key) for block in range(5))
    assert tier.offer(other.label(0), payload_of(0, SIZE))
    answered(tier, 1)
    assert kv(store) == 1
    tier.close(5)


def test_a_call_that_hangs_keeps_its_bytes(tmp_path: Path) -> None:
    """Fault: the next object is sealed in the same memory, and a file gets the beginning of one and the end of the other."""
    store, wanted = Hung(tmp_path, 30.0), request(prompt(3), SIZE)
    tier = tier_of(store, KEYS)
    tier.offer(wanted.label(0), payload_of(0, SIZE))
    answered(tier, 1)
    assert store.given is not None
    before = bytes(store.given)
    for block in (1, 2):  # of which neither was refused with the first
        other = request(prompt(3, block), SIZE)
        tier.offer(other.label(0), payload_of(block, SIZE))
    answered(tier, 2)
    assert tier.counters["saved"] == 2
    assert bytes(store.given) == before
    tier.close(5)


def test_a_kind_of_store_may_get_a_share_only(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiers.SAVES, "file", Saves(frozenset({"reused", "leaving"}), 0.3))
    tier = tier_of(store, KEYS)
    wanted = request(prompt(20), SIZE)
    assert not tier.offer(wanted.label(0), payload_of(0, SIZE))
    tier.computed(20 * SIZE)
    assert sum(tier.offer(wanted.label(block), payload_of(block, SIZE)) for block in range(20)) == 6
    answered(tier, 6)
    assert tier.counters["skipped_share"] == 2
    assert len(fetched(tier_of(store, KEYS), wanted)) == 6, "the head of the chain comes first"
    assert not tier.offer(wanted.label(7), payload_of(7, SIZE), last=True), "its parent is not there"
    assert tier.offer(wanted.label(6), payload_of(6, SIZE), last=True), "when a server stops, there is no limit"
    tier.close(5)


def test_a_store_that_was_restarted_gets_everything_again(valkey: ValkeyServer) -> None:
    """Fault: a server believes for an hour that the store has what it lost."""
    tier = tier_of(valkey.store(10.0), KEYS)
    wanted = request(prompt(6), SIZE)
    for block in range(6):
        assert tier.offer(wanted.label(block), payload_of(block, SIZE))
    answered(tier, 6)
    assert not [block for block in range(6) if tier.lacks(wanted.label(block).key)]
    valkey.kill()
    valkey.start()
    assert tier.due(wanted.label(0).key)
    tier.touch([wanted.label(0)])
    until = time.monotonic() + 60
    while not tier.lacks(wanted.label(5).key):
        assert time.monotonic() < until
        time.sleep(0.01)
    for block in range(6):
        assert tier.offer(wanted.label(block), payload_of(block, SIZE))
    answered(tier, 6)
    assert len(fetched(tier_of(valkey.store(10.0), KEYS), wanted)) == 6
    tier.close(5)


def test_a_dead_store_is_believed_to_have_lost_everything(valkey: ValkeyServer) -> None:
    tier = tier_of(valkey.store(10.0), KEYS)
    wanted = request(prompt(6), SIZE)
    tier.offer(wanted.label(0), payload_of(0, SIZE))
    answered(tier, 1)
    valkey.kill()
    tier.offer(wanted.label(1), payload_of(1, SIZE))
    answered(tier, 1)
    assert tier.counters["fault_refused"] >= 1
    assert tier.lacks(wanted.label(0).key)
    tier.close(5)


def test_an_idle_writer_does_not_close_the_breaker(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LOOK", 0.02)
    tier = tier_of(store, KEYS)
    breaker = tier._link.breaker
    wait_until(lambda: breaker._heard)  # its first look at the store
    time.sleep(0.05)
    breaker.trip(tier._link.clock() - 1000)  # so a call may try at once
    time.sleep(0.2)
    assert not breaker.closed
    wanted = request(prompt(2), SIZE)
    assert not tier.offer(wanted.label(0), payload_of(0, SIZE))
    assert tier.counters["skipped_failing"] == 1
    assert fetched(tier, wanted) == []  # a real call does
    assert breaker.closed
    tier.close(5)


def test_bytes_written_are_at_most_those_computed(store: FolderStore) -> None:
    """Whatever is offered again, by the same server or by another one with the same content, is written once."""
    tiers_of_fleet = [tier_of(store, KEYS) for _ in range(2)]
    wanted = request(prompt(10), SIZE)
    for tier in tiers_of_fleet:
        for _ in range(3):
            taken = [tier.offer(wanted.label(block), payload_of(block, SIZE)) for block in range(10)]
            answered(tier, sum(taken))
    saved = sum(tier.counters["saved_bytes"] for tier in tiers_of_fleet)
    assert 10 * SIZE < saved < 10 * (SIZE + 1000)
    assert tiers_of_fleet[1].counters["there"] == 10
    for tier in tiers_of_fleet:
        tier.close(5)


def lives(store: ValkeyStore, tier: StoreTier, labels: list[Label]) -> list[float]:
    """Milliseconds that entries have in Valkey: -1 for ever, -2 not there."""
    return [store._client.pttl(tier._link.name(label)) for label in labels]


def test_what_a_server_without_a_term_has_stored_gets_the_term_when_it_is_offered_again(valkey: ValkeyServer) -> None:
    store, wanted = valkey.store(10.0), request(prompt(3), SIZE)
    for expire in (math.inf, 600.0):
        tier = tier_of(store, KEYS, expire=expire)
        labels = [replace(wanted.label(block), written=time.time() - age) for block, age in enumerate((0, 300, 900))]
        for block, label in enumerate(labels):
            assert tier.offer(label, payload_of(block, SIZE))
        answered(tier, 3)
        assert tier._writing.close(10)
        if expire == math.inf:
            assert lives(store, tier, labels) == [-1, -1, -1]
    assert tier.counters["there"] == 3
    young, old, expired = lives(store, tier, labels)
    assert 300_000 < young <= 600_000
    assert 0 < old <= 300_000
    assert expired == -2
    assert [tier.lacks(label.key) for label in labels] == [False, False, True]
    store.close()


def test_what_is_touched_gets_its_term(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "shorten", lambda *_: iter(()))
    store, wanted = valkey.store(10.0), request(prompt(2), SIZE)
    labels = [replace(wanted.label(block), written=time.time() - 300) for block in range(2)]
    first, second = tier_of(store, KEYS), tier_of(store, KEYS, expire=600.0)
    for block, label in enumerate(labels):
        assert first.offer(label, payload_of(block, SIZE))
    answered(first, 2)
    second.touch([labels[0]])
    wait_until(lambda: lives(store, second, labels)[0] != -1)
    touched, other = lives(store, second, labels)
    assert 0 < touched <= 300_000
    assert other == -1
    for tier in (first, second):
        tier.close(5)


def test_a_server_with_a_new_term_looks_once_at_what_valkey_has(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(writing, "LOOK", 0.01)
    monkeypatch.setattr(writing, "sweep", lambda *_: looks.append(0) or 0)
    store, wanted = valkey.store(10.0), request(prompt(2), SIZE)
    first = tier_of(store, KEYS)
    for block in range(2):
        assert first.offer(wanted.label(block), payload_of(block, SIZE))
    answered(first, 2)
    first._writing.close(10)
    assert not looks
    second = tier_of(store, KEYS, expire=2.0)
    labels = [wanted.label(block) for block in range(2)]
    wait_until(lambda: -1 not in lives(store, second, labels))
    store.put(second._link.name(labels[0]), memoryview(b"of a server without a term"))
    before = len(looks)
    wait_until(lambda: len(looks) > before + 1)
    assert lives(store, second, labels)[0] == -1, "a look at everything takes long"
    second.close(5)


def test_others_need_not_wait_for_a_look_at_all_of_valkey(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: offers and deletions waited until a new term had reached everything."""
    monkeypatch.setattr(expiry, "_BATCH", 1)
    monkeypatch.setattr(writing, "LOOK", 0.01)
    store, wanted = valkey.store(10.0), request(prompt(12), SIZE)
    labels = [wanted.label(block) for block in range(12)]
    first = tier_of(store, KEYS)
    for block, label in enumerate(labels):
        assert first.offer(label, payload_of(block, SIZE))
    answered(first, 12)
    first._writing.close(10)
    limit, begun, queued, go_on, limited = store.limit, threading.Event(), threading.Event(), threading.Event(), list[str]()

    def held(lives: Sequence[tuple[str, float]]) -> None:
        limited.extend(name for name, _ in lives)
        assert (go_on if begun.is_set() else queued).wait(20)
        limit(lives)

    monkeypatch.setattr(store, "limit", held)
    second = tier_of(store, KEYS, expire=60.0)
    wait_until(lambda: limited)
    erased = second.erase(labels[:1])
    begun.set()
    queued.set()
    erased.result(10)
    assert len(limited) < 12
    go_on.set()
    wait_until(lambda: -1 not in lives(store, second, labels))
    second.close(5)


def test_a_data_key_that_cannot_be_opened_keeps_out_its_owner_alone(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: what others had offered with it was refused, and the store was taken for one that fails."""
    fleet = FleetKeys.generate()
    store.put(DataKeys(store, fleet).names.of(OWNER, "key", DATA_KEY), memoryview(b"damaged"))
    keys = DataKeys(store, fleet)
    tier = tier_of(store, keys)
    wanted = request(prompt(8), SIZE)
    for turn in range(4):
        with tier._writing._changed:  # one batch
            for block, owner in ((2 * turn, OWNER), (2 * turn + 1, OTHER)):
                label = replace(wanted.label(block), parent=bytes(32), owner=owner)
                assert tier.offer(label, payload_of(block, SIZE))
                tier.note(owner, Note(label.key * 2, label.key, b"tokens"))
        answered(tier, 2)
    wait_until(lambda: tier.counters["notes_saved"] == 4)
    assert (tier.counters["saved"], tier.counters["skipped_key"], tier.counters["skipped_note"]) == (4, 4, 4)
    assert [tier.lacks(wanted.label(block).key) for block in range(8)] == [True, False] * 4
    assert tier._link.breaker.closed
    assert not [name for name in tier.counters if name.startswith("fault")]
    tier.close(5)


@pytest.mark.parametrize("encrypt", [False, True])
def test_reading_alone_needs_no_right_to_write(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, encrypt: bool) -> None:
    """Fault: it stored its card and touched keys, and was refused, until it took the store for one that fails."""
    fleet = FleetKeys.generate()
    stores = valkey.store(), ValkeyStore(HOST, valkey.port, user="reader", password="secret", timeout=10.0)
    keys = [DataKeys(store, fleet) if encrypt else TagKeys(fleet) for store in stores]
    wanted = request(prompt(3), SIZE)
    writer = tier_of(stores[0], keys[0])
    for block in range(3):
        assert writer.offer(wanted.label(block), payload_of(block, SIZE))
    answered(writer, 3)
    before = {one.name for one in stores[0].objects()}
    looks = []

    def refresh(*, writes: bool) -> None:
        looks.append(writes)
        type(keys[1]).refresh(keys[1], writes=writes)

    monkeypatch.setattr(keys[1], "refresh", refresh)
    for name in ("LOOK", "EVERY"):
        monkeypatch.setattr(writing, name, 0.01)
    reader = tier_of(stores[1], keys[1], writes=False)
    assert len(fetched(reader, wanted)) == 3
    wait_until(lambda: len(looks) > 5)
    reader.distrust([wanted.label(0)], "of another server")
    reader.close(5)
    assert not any(looks)
    assert {name for name in reader.counters if name.startswith("fault")} == {"fault_differs"}
    assert {one.name for one in stores[0].objects()} >= before
    writer.close(5)


def test_a_server_that_only_reads_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = tier_of(FolderStore(tmp_path, 30.0), KEYS)
    wanted = request(prompt(1), SIZE)
    writer.offer(wanted.label(0), payload_of(0, SIZE))
    answered(writer, 1)
    writer.close(5)
    monkeypatch.setattr(writing, "LOOK", 0.01)
    looks: list[bool] = []
    monkeypatch.setattr(KEYS, "refresh", lambda *, writes: looks.append(writes))
    before = sorted(one.name for one in FolderStore(tmp_path, 30.0).objects())
    reader = tier_of(FolderStore(tmp_path, 30.0), KEYS, writes=False, expire=1e-3)
    wait_until(lambda: len(looks) > 5)
    reader.close(5)
    assert sorted(one.name for one in FolderStore(tmp_path, 30.0).objects()) == before


def test_what_is_deleted_while_it_waits_is_not_stored(store: FolderStore) -> None:
    tier, wanted = tier_of(store, KEYS), request(prompt(6), SIZE)
    for block in range(5):
        assert tier.offer(wanted.label(block), payload_of(block, SIZE))
    tier.erase([wanted.label(block) for block in range(2, 6)]).result(10)
    assert kv(store) == 2
    assert tier.close(10)
    assert [tier.lacks(wanted.label(block).key) for block in range(5)] == [False, False, True, True, True]
    with pytest.raises(Unavailable):
        tier.erase([wanted.label(0)]).result(10)
