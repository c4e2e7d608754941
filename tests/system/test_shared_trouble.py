"""The shared tier in trouble, through a real Runtime and real stores: what is a miss, what waits, what is asked and written."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import valkey as library

from harness import ask, assistant, check, submit, system, user
from headstart.cli.doctor_shared import examine_shared
from headstart.config import Settings
from headstart.errors import NotFound, Unavailable
from headstart.explain.causes import Cause
from headstart.prefix_cache.blocks import root_id
from headstart.prefix_cache.quota import owner_of
from headstart.serving import late_fetch, shared_fetch
from headstart.serving.expiry import Expiry
from headstart.serving.request import Progress
from headstart.serving.runtime import Runtime
from headstart.serving.scheduler import Scheduler
from headstart.serving.shared_offer import SharedOffer
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from headstart.tiers.disk import Disk
from headstart.tiers.shared import reading
from headstart.tiers.shared import tier as shared_tier
from headstart.tiers.shared.data_keys import DataKeys
from headstart.tiers.shared.expiry import contents, erase
from headstart.tiers.shared.keys import FleetKeys
from headstart.tiers.shared.names import parse
from headstart.tiers.shared.pace import StorePace
from headstart.tiers.shared.recent import Recent
from headstart.tiers.shared.tier import StoreTier
from headstart.tiers.shared.valkey import ValkeyStore
from live import serving, wait_until
from sharing import stored
from stores import HOST, ValkeyServer

pytestmark = pytest.mark.usefixtures("brisk")
BLOCK_SIZE = 8
WORDS = "Hello, who are you?"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the stores of all servers are called."""
    counts: Counter[str] = Counter()
    for name in ("have", "get", "get_into", "put", "put_new", "touch"):
        method = getattr(ValkeyStore, name)

        def counted(*args: Any, _name: str = name, _method: Callable[..., Any] = method, **options: Any) -> Any:
            counts[_name] += 1
            return _method(*args, **options)

        monkeypatch.setattr(ValkeyStore, name, counted)
    return counts


def start(url: str, key_file: Path, **options: Any) -> Runtime:
    given: dict[str, Any] = {"reuse": "exact", "memory_budget": 1 << 20, **options}
    shape = {"sliceable": True, "slots": 2, "delay": 0.005}
    shape |= {name: given.pop(name) for name in ("sliceable", "slots", "delay", "batch") if name in given}
    settings = Settings(**given, shared=url, shared_key_file=key_file)
    return Runtime(lambda: FakeEngine(ctx=512, block_size=BLOCK_SIZE, **shape), settings)


def tier(rt: Runtime) -> StoreTier:
    assert isinstance(rt.cache.shared, StoreTier)
    return rt.cache.shared


def chat(words: str = WORDS) -> list[dict[str, Any]]:
    return [system("You answer in the words of the house, and never in others. " * 4), user(words)]


def entries(server: ValkeyServer) -> dict[str, bytes]:
    """Blocks and checkpoints in a store."""
    client = library.Valkey(HOST, server.port)
    names = [key.decode() for key in client.keys("hs1/*")]  # type: ignore[union-attr]
    kinds = {name: parsed.kind for name in names if (parsed := parse(name)) is not None}
    return {name: client.get(name) for name in names if kinds.get(name) in ("kv", "state")}  # type: ignore[misc]


# ── misses ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
@pytest.mark.parametrize("spoil", ["poisoned", "of another tenant", "cut", "evicted in the middle", "of another fleet"])
def test_a_bad_object_is_a_counted_miss(
    key_file: Path, valkey: ValkeyServer, patient: None, spoil: str, sliceable: bool
) -> None:
    """In a real store, for blocks and checkpoints; every object is bad."""
    with start(valkey.url, key_file, sliceable=sliceable) as one:
        first = ask(one, chat(), salt="anna", max_tokens=4, keep_logits=True)
        stored(one)
        ask(one, chat(), salt="berta", max_tokens=4)
        stored(one)
        anna = tier(one)._link.keys.names.prefix(owner(one, "anna"))
    client = library.Valkey(HOST, valkey.port)
    found = entries(valkey)
    mine = sorted(name for name in found if name.startswith(anna))
    others = sorted(name for name in found if not name.startswith(anna))
    assert len(mine) == len(others) > 8
    for number, name in enumerate(mine):
        data = bytearray(found[name])
        if spoil == "poisoned":
            data[100] ^= 1
            client.set(name, bytes(data))
        elif spoil == "of another tenant":
            client.set(name, found[others[number]])
        elif spoil == "cut":
            client.set(name, bytes(data[:90]))
    reason = {"poisoned": "tag", "of another tenant": "swapped", "cut": "truncated"}.get(spoil, "unknown_key")
    if spoil == "of another fleet":
        FleetKeys(FleetKeys.load(key_file).name_key, FleetKeys.generate().secrets).save(key_file, replace=True)
    with start(valkey.url, key_file, sliceable=sliceable) as other:
        if spoil == "evicted in the middle":  # between the question and the answer
            link = tier(other)._link
            ask_first = link.store.have

            def have(names: list[str]) -> list[bool]:
                there = ask_first(names)
                client.delete(*[name for name in mine if name in found and mine.index(name) % 3 == 1])
                return there

            link.store.have = have  # type: ignore[method-assign, assignment]
            reason = ""
        second = ask(other, chat(), salt="anna", max_tokens=4, keep_logits=True)
        assert second.logits is not None
        assert first.logits is not None
        assert second.logits.tobytes() == first.logits.tobytes()
        assert second.text == first.text
        counters = tier(other).counters
        if reason:
            assert counters[f"fault_{reason}"] >= 1, counters  # on a busy machine it asks once more
            assert second.report.computed == second.report.prompt
        else:
            assert counters["missing"] >= 1, counters
            assert second.report.computed > BLOCK_SIZE
        check(other)


def owner(rt: Runtime, salt: str) -> bytes:
    return owner_of(root_id(rt.engine.fingerprint, salt))


def test_keys_are_rotated_without_a_miss_and_the_oldest_opens_nothing(
    key_file: Path, valkey: ValkeyServer, patient: None
) -> None:
    with start(valkey.url, key_file) as one:
        ask(one, chat())
        stored(one)
    for expected in ("shared", "shared", None):
        with start(valkey.url, key_file, shared_mode="read") as other:
            report = ask(other, chat()).report
            assert ("shared" in report.tiers) == (expected is not None)
            assert tier(other).counters["fault_unknown_key"] == (expected is None)
        FleetKeys.load(key_file).rotated().save(key_file, replace=True)


def test_a_destroyed_data_key_ends_what_was_encrypted_with_it(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    with start(valkey.url, key_file, shared_encrypt=True) as one, start(valkey.url, key_file, shared_encrypt=True) as other:
        ask(one, chat(), salt="anna")
        ask(one, chat(), salt="berta")
        stored(one)
        assert b"words of the house" not in b"".join(entries(valkey).values())
        copies = entries(valkey)
        assert ask(other, chat(), salt="anna").report.tiers["shared"] > 0
        keys = tier(one)._link.keys
        assert isinstance(keys, DataKeys)
        keys.destroy(owner(one, "anna"))
    client = library.Valkey(HOST, valkey.port)
    for name, data in copies.items():  # a copy that lived on elsewhere comes back
        client.set(name, data)
    with start(valkey.url, key_file, shared_encrypt=True) as third:
        assert ask(third, chat(), salt="berta").report.tiers["shared"] > 0
        report = ask(third, chat(), salt="anna").report
        assert report.computed == report.prompt
        stored(third)  # it makes a new key and writes everything anew
    with start(valkey.url, key_file, shared_encrypt=True) as fourth:
        assert ask(fourth, chat(), salt="anna").report.tiers["shared"] > 0


def test_what_is_stored_is_listed_expires_and_is_deleted_by_tenant(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    with start(valkey.url, key_file, shared_expire=3600.0) as one:
        ask(one, chat(), salt="anna")
        ask(one, chat(), salt="berta")
        stored(one)
        prefix = tier(one)._link.keys.names.prefix(owner(one, "anna"))
    client, store = library.Valkey(HOST, valkey.port), valkey.store()
    lives = [client.pttl(name) for name in entries(valkey)]
    assert all(0 < life <= 3_600_000 for life in lives)  # type: ignore[operator]
    listed = {one.owner: one.objects for one in contents(store)}
    count = listed[prefix.split("/")[1]]
    assert count > 8
    assert erase(store, prefix) == count
    with start(valkey.url, key_file) as other:
        assert "shared" not in ask(other, chat(), salt="anna").report.tiers
        assert ask(other, chat(), salt="berta").report.tiers["shared"] > 0
    store.close()


# ── a store that hangs or is dead ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", ["have", "get_into", "put", "close"])
@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
def test_a_store_that_hangs_at_any_step_holds_nobody_up(
    key_file: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, step: str, sliceable: bool
) -> None:
    with start(valkey.url, key_file, sliceable=sliceable) as one:
        first = ask(one, chat(), max_tokens=4, keep_logits=True)
        stored(one)
    method = getattr(ValkeyStore, step)

    def hang(*args: Any, **options: Any) -> Any:
        valkey.hang()
        return method(*args, **options)

    with start(valkey.url, key_file, sliceable=sliceable) as other:
        monkeypatch.setattr(ValkeyStore, step, hang)
        second = ask(other, chat(), max_tokens=4, keep_logits=True)
        assert first.logits is not None
        assert second.logits is not None
        assert second.logits.tobytes() == first.logits.tobytes()
        stored(other)  # every pin is given back
        for number in range(3):
            assert ask(other, chat(f"And then {number}?"), max_tokens=4).report.prompt
        stored(other)
        assert not [entry for entry in other.cache.index if entry.holds]
        check(other)
    assert not other.cache.memory.used, "it has ended, so its memory was given back"


def test_a_dead_store_costs_local_hits_nothing(key_file: Path, valkey: ValkeyServer, calls: Counter[str]) -> None:
    """Fault: every request waits for it."""
    with start(valkey.url, key_file) as one:
        ask(one, chat())
        stored(one)
        valkey.kill()
        for number in range(4):
            ask(one, chat(f"Is it dead {number}?"))
        stored(one)
        breaker = tier(one)._link.breaker
        breaker._wait, breaker._until = 60.0, tier(one)._link.clock() + 1e9  # no trial while this test counts
        before = calls.total()
        for _ in range(5):
            report = ask(one, chat("Is it dead 3?")).report
            assert report.computed <= BLOCK_SIZE
        stored(one)
        assert calls.total() == before
        check(one)


def test_a_prompt_that_is_here_asks_the_store_nothing(
    key_file: Path, valkey: ValkeyServer, patient: None, calls: Counter[str]
) -> None:
    with start(valkey.url, key_file) as one:
        for _ in range(2):  # the second one touches what it reuses
            ask(one, chat())
            stored(one)
        before = calls.copy()
        for _ in range(4):
            assert ask(one, chat()).report.computed <= BLOCK_SIZE
            stored(one)
        assert calls == before


def test_a_request_costs_no_more_when_more_is_stored(
    key_file: Path, valkey: ValkeyServer, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks into the index and into what is known of the store, for one and the same kind of request."""
    looks: Counter[str] = Counter()
    with start(valkey.url, key_file, slots=1) as one:
        owners: tuple[tuple[Any, str], ...] = ((one.cache.index, "get"), (Recent, "__contains__"))
        for owner, name in owners:
            method = getattr(owner, name)

            def counted(*args: Any, _name: str = name, _method: Callable[..., Any] = method) -> Any:
                looks[_name] += threading.current_thread().name == "headstart-engine"
                return _method(*args)

            monkeypatch.setattr(owner, name, counted)
        costs = []
        for number in range(4):
            ask(one, chat(f"What is it, {number}?"), max_tokens=2)
            stored(one)
            looks.clear()
            assert ask(one, chat(f"What is it, {number}?"), max_tokens=2).report.computed <= BLOCK_SIZE
            costs.append(looks.copy())
            for other in range(8):
                ask(one, [user(f"{number} {other} is something else entirely, " * 5)], max_tokens=2)
        assert min(costs[0].values()) > 0
        assert max(costs[3].values()) <= 2 * max(costs[0].values()), costs


def test_heads_of_chains_are_touched_in_the_store(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    client = library.Valkey(HOST, valkey.port)

    def touches() -> int:
        return int(client.info("commandstats").get("cmdstat_touch", {}).get("calls", 0))  # type: ignore[union-attr]

    with start(valkey.url, key_file) as one:
        ask(one, chat())
        stored(one)
        assert touches() == 0
        ask(one, chat())
        until = time.monotonic() + 60
        while not touches():
            assert time.monotonic() < until
            time.sleep(0.01)
        count = touches()
        for _ in range(5):
            ask(one, chat())
        stored(one)
        assert touches() == count, "not at every use"


# ── waiting requests ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_when_a_deletion_is_answered_memory_has_nothing_of_it(
    key_file: Path, valkey: ValkeyServer, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = ValkeyStore.put

    def slow(store: ValkeyStore, *arguments: Any, **options: Any) -> bool:
        time.sleep(0.02)
        return put(store, *arguments, **options)

    monkeypatch.setattr(ValkeyStore, "put", slow)
    with start(valkey.url, key_file) as rt:
        for _ in range(3):
            ask(rt, chat(), max_tokens=1)
            wait_until(lambda: rt.cache.store.shared_offer.reading)
            (chain,) = rt.stored.all()
            assert rt.stored.delete(chain.id, chain.owner).entries
            assert not list(rt.cache.index)


def test_the_end_of_a_deletion_hears_what_the_store_has_just_answered(
    key_file: Path, valkey: ValkeyServer, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread has looked for answers. Then the store answers, and the deletion ends before another look."""
    put, erase, look, carry_out = ValkeyStore.put, StoreTier.erase, SharedOffer.take_answers, Scheduler.carry_out
    deletes, sends, ends = threading.Event(), threading.Event(), threading.Event()
    left: list[int] = []

    def held(store: ValkeyStore, *arguments: Any, **options: Any) -> bool:
        assert sends.wait(20)
        return put(store, *arguments, **options)

    def asked(store: StoreTier, labels: Any) -> Any:
        deletes.set()
        return erase(store, labels)

    def looked(offer: SharedOffer) -> bool:
        found = look(offer)
        if deletes.is_set() and not sends.is_set():
            sends.set()
            assert ends.wait(20)
        return found

    def carried(scheduler: Scheduler, work: Any) -> Any:
        is_end = sends.is_set()
        done = carry_out(scheduler, work)
        if is_end:
            ends.set()
        return done

    monkeypatch.setattr(ValkeyStore, "put", held)
    monkeypatch.setattr(StoreTier, "erase", asked)
    monkeypatch.setattr(SharedOffer, "take_answers", looked)
    monkeypatch.setattr(Scheduler, "carry_out", carried)
    monkeypatch.setattr(Expiry, "deletion_ended", lambda expiry: left.append(len(expiry._cache.index)))
    with start(valkey.url, key_file) as rt:
        ask(rt, chat(), max_tokens=1)
        wait_until(lambda: rt.cache.store.shared_offer.reading)
        (chain,) = rt.stored.all()
        assert rt.stored.delete(chain.id, chain.owner).entries
    assert ends.is_set()
    assert left == [0]


def test_a_request_does_not_load_what_was_deleted_while_it_was_on_its_way(
    key_file: Path, valkey: ValkeyServer, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All servers are asked, and one of them has read the objects already."""
    fetch, read, go_on = ValkeyStore.get_into, threading.Event(), threading.Event()

    def held(store: ValkeyStore, wanted: Any, at: int) -> Any:
        found = fetch(store, wanted, at)
        read.set()
        assert go_on.wait(20)
        return found

    with start(valkey.url, key_file) as one, start(valkey.url, key_file) as other:
        ask(one, chat(), max_tokens=1)
        stored(one)
        (chain,) = one.stored.all()
        monkeypatch.setattr(ValkeyStore, "get_into", held)
        pending = submit(other, chat(), max_tokens=1)
        assert read.wait(20)
        gone = one.stored.delete(chain.id, chain.owner)
        with pytest.raises(NotFound):
            other.stored.delete(chain.id, chain.owner, gone.stretches)
        go_on.set()
        report = pending.answer().report
        assert (report.restored, report.computed) == (0, report.prompt)


@pytest.mark.parametrize("read", [False, True], ids=["asked during the deletion", "read during the deletion"])
def test_a_request_does_not_fetch_what_the_store_has_still_to_delete(
    key_file: Path, valkey: ValkeyServer, patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """Memory and disk have deleted it already."""
    fetch, delete = ValkeyStore.get_into, ValkeyStore.delete
    deletes, has_read, deleted = threading.Event(), threading.Event(), threading.Event()

    def late(store: ValkeyStore, names: Any) -> None:
        assert deletes.wait(20)
        delete(store, names)

    def held(store: ValkeyStore, wanted: Any, at: int) -> Any:
        found = fetch(store, wanted, at)
        has_read.set()
        assert deleted.wait(20)
        return found

    with start(valkey.url, key_file, cache_dir=tmp_path / "cache") as rt:
        ask(rt, chat(), max_tokens=1)
        stored(rt)
        wait_until(lambda: len(rt.cache.disk) > 0)
        (chain,) = rt.stored.all()
        monkeypatch.setattr(ValkeyStore, "delete", late)
        monkeypatch.setattr(ValkeyStore, "get_into", held if read else fetch)
        deletion = threading.Thread(target=rt.stored.delete, args=(chain.id, chain.owner))
        deletion.start()
        wait_until(lambda: not len(rt.cache.disk))
        time.sleep(0.1)  # nothing else keeps it from the next request, if the deletion does not
        pending = submit(rt, chat(), max_tokens=1)
        if read:
            assert has_read.wait(20)
            deletes.set()
            deletion.join()
            deleted.set()
        report = pending.answer().report
        deletes.set()
        deletion.join()
        assert (report.restored, report.computed) == (0, report.prompt)


@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
@pytest.mark.parametrize("late", [False, True], ids=["during the deletion", "after it"])
def test_what_follows_deleted_text_is_not_fetched_without_it(
    key_file: Path, valkey: ValkeyServer, patient: None, monkeypatch: pytest.MonkeyPatch, late: bool, sliceable: bool
) -> None:
    """Fault: the store still had a longer prompt. Its blocks behind deleted ones came into memory, and named them on disk."""
    fetch, delete = ValkeyStore.get_into, ValkeyStore.delete
    deletes, has_read, deleted = threading.Event(), threading.Event(), threading.Event()

    def held_deletion(store: ValkeyStore, names: Any) -> None:
        assert deletes.wait(20)
        delete(store, names)

    def held_fetch(store: ValkeyStore, wanted: Any, at: int) -> Any:
        found = fetch(store, wanted, at)
        has_read.set()
        assert not late or deleted.wait(20)
        return found

    with start(valkey.url, key_file, sliceable=sliceable) as one, start(valkey.url, key_file, sliceable=sliceable) as other:
        ask(one, long_chat(), max_tokens=1)
        stored(one)
        ask(other, chat(), max_tokens=1)
        stored(other)
        (chain,) = other.stored.all()
        monkeypatch.setattr(ValkeyStore, "delete", held_deletion)
        monkeypatch.setattr(ValkeyStore, "get_into", held_fetch)
        deletion = threading.Thread(target=other.stored.delete, args=(chain.id, chain.owner))
        deletion.start()
        wait_until(lambda: not list(other.cache.index))
        pending = submit(other, long_chat(), max_tokens=1)
        assert has_read.wait(20)
        if late:
            deletes.set()
            deletion.join()
            deleted.set()
        pending.answer()
        deletes.set()
        deletion.join()
        index = other.cache.index
        known = {root_id(other.engine.fingerprint, ""), *(entry.id for entry in index)}
        assert all(entry.state or entry.parent in known for entry in index)
        check(other)


def test_what_waits_for_room_in_the_store_is_not_sent_there_after_its_deletion(
    key_file: Path, valkey: ValkeyServer, patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk writes it meanwhile, so memory still has it."""
    write, full, go_on = Disk.write, [True], threading.Event()

    def held(disk: Disk, *arguments: Any, **options: Any) -> Any:
        assert go_on.wait(20)
        return write(disk, *arguments, **options)

    monkeypatch.setattr(Disk, "write", held)
    with start(valkey.url, key_file, cache_dir=tmp_path / "cache") as rt:
        takes, offer = tier(rt).takes, rt.cache.store.shared_offer
        monkeypatch.setattr(tier(rt), "takes", lambda size: not full[0] and takes(size))
        ask(rt, chat(), max_tokens=1)
        wait_until(lambda: rt.cache.store.offload.writing and offer.later)
        (chain,) = rt.stored.all()
        deletion = threading.Thread(target=rt.stored.delete, args=(chain.id, chain.owner))
        deletion.start()
        wait_until(lambda: tier(rt).counters["erased"])
        full[0] = False
        rt.scheduler.wake()
        wait_until(lambda: not offer.later)
        go_on.set()
        deletion.join()
        stored(rt)
        assert not entries(valkey)


def test_who_needs_the_beginning_of_a_long_prompt_does_not_wait_for_its_end(
    key_file: Path, valkey: ValkeyServer, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = chat("A long question. " * 12)
    with start(valkey.url, key_file) as one:
        for messages in (long, chat()):
            ask(one, messages, max_tokens=1)
        stored(one)
    monkeypatch.setattr(reading, "BATCH", 4)
    answered, fetch, threads = threading.Event(), ValkeyStore.get_into, list[int]()

    def held(store: ValkeyStore, wanted: Any, at: int) -> Any:
        threads.append(threading.get_ident())
        late = threads.count(threads[0]) > 9  # 36 blocks are more than both prompts share
        assert not (late and threads[-1] == threads[0]) or answered.wait(20), "the short one waits for the end of the long one"
        return fetch(store, wanted, at)

    monkeypatch.setattr(ValkeyStore, "get_into", held)
    with start(valkey.url, key_file) as two:
        pending = submit(two, long, max_tokens=1)
        assert ask(two, chat(), max_tokens=1).report.computed <= BLOCK_SIZE
        answered.set()
        assert pending.answer().report.computed <= BLOCK_SIZE


@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
def test_several_choices_fetch_once(key_file: Path, valkey: ValkeyServer, patient: None, sliceable: bool) -> None:
    with start(valkey.url, key_file, sliceable=sliceable) as one, start(valkey.url, key_file, sliceable=sliceable) as other:
        first = ask(one, chat(), max_tokens=4)
        stored(one)
        answer = ask(other, chat(), max_tokens=4, choices=3)
        assert set(answer.texts.values()) == {first.text}
        blocks = (first.report.prompt - 1) // BLOCK_SIZE
        assert tier(other).counters["fetched"] <= blocks + (not sliceable)
        assert all(finish.report.computed <= BLOCK_SIZE for finish in answer.finishes.values())
        check(other)


def test_a_server_that_stops_while_it_fetches_ends(
    key_file: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(valkey.url, key_file) as one:
        ask(one, chat())
        stored(one)
    monkeypatch.setattr(shared_fetch, "STALL", 30.0)
    before = set(threading.enumerate())
    other = start(valkey.url, key_file)
    valkey.hang()
    pending = submit(other, chat())
    until = time.monotonic() + 60
    while not any(job.parked for job in other.scheduler.waiting):
        assert time.monotonic() < until
        time.sleep(0.005)
    other.close(1.0)
    with pytest.raises(Unavailable):
        pending.answer()
    valkey.go_on()
    until = time.monotonic() + 60
    while left := [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("headstart")]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def test_others_run_while_a_request_is_parked(key_file: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(valkey.url, key_file) as one:
        ask(one, chat())
        stored(one)
    monkeypatch.setattr(shared_fetch, "STALL", 30.0)
    with start(valkey.url, key_file) as other:
        tier(other)._link.store._pool.connection_kwargs["socket_timeout"] = 30.0  # type: ignore[attr-defined]
        valkey.hang()
        parked = submit(other, chat())
        until = time.monotonic() + 60
        while not any(job.parked for job in other.scheduler.waiting):
            assert time.monotonic() < until
            time.sleep(0.005)
        assert ask(other, [user("Something else entirely.")], reuse=False).text
        assert not parked.handle.begun
        valkey.go_on()
        assert parked.answer().report.tiers["shared"] > 0


def test_every_waiter_of_a_stalled_fetch_goes_on(key_file: Path, valkey: ValkeyServer) -> None:
    """Fault: each of them begins to fetch in its turn, and waits as long again."""
    with start(valkey.url, key_file) as one:
        ask(one, chat())
        stored(one)
    with start(valkey.url, key_file, slots=4) as other:
        valkey.hang()
        pending = [submit(other, chat()) for _ in range(4)]
        for one_of_them in pending:
            assert one_of_them.answer().report.prompt
        assert tier(other).counters["fault_stalled"] <= 1
        check(other)


def long_chat() -> list[dict[str, Any]]:
    return [system("You answer in the words of the house, and never in others. " * 6), user(WORDS)]


def slow(url: str, key_file: Path, **options: Any) -> Runtime:
    """A server that computes a block in 0.03 s, so that a long prompt takes more than a second."""
    return start(url, key_file, **{"delay": 0.03, "batch": BLOCK_SIZE, **options})


@pytest.mark.parametrize(
    ("sliceable", "choices"),
    [(True, 1), (False, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 3), (False, 1)))],
    ids=["attention", "hybrid, three choices", "attention, three choices", "hybrid"],
)
def test_a_pause_of_the_store_does_not_cost_the_whole_prompt(
    key_file: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, sliceable: bool, choices: int
) -> None:
    """Fault: after 0.25 s without an answer the store was not asked any more, and the rest of the prompt was computed."""
    with start(valkey.url, key_file, sliceable=sliceable) as one:
        first = ask(one, long_chat(), max_tokens=4, keep_logits=True)
        stored(one)
    monkeypatch.setattr(reading, "BATCH", 4)
    get_into, calls = ValkeyStore.get_into, list[int]()

    def pause_at_the_third_batch(self: ValkeyStore, wanted: Any, at: int) -> Any:
        calls.append(len(wanted))
        if len(calls) == 3:
            valkey.hang()
        return get_into(self, wanted, at)

    with slow(valkey.url, key_file, sliceable=sliceable) as other:
        monkeypatch.setattr(ValkeyStore, "get_into", pause_at_the_third_batch)
        pending = submit(other, long_chat(), max_tokens=4, keep_logits=True, choices=choices)
        until = time.monotonic() + 60
        while not pending.handle.begun:
            assert time.monotonic() < until
            time.sleep(0.005)
        valkey.go_on()
        second = pending.answer()
        report = second.finishes[0].report
        assert 0 < report.computed < report.prompt // 2, "it has begun to compute, and then it has gone on fetching"
        assert report.cached + report.computed == report.prompt
        assert sum(report.tiers.values()) == report.restored
        last = [event for event in second.events if isinstance(event, Progress)][-1]
        assert last.cached <= report.cached, "what it has computed itself is not cached"
        assert choices > 1 or report.tiers == {"shared": report.restored}
        assert first.logits is not None
        assert second.logits is not None
        assert second.logits.tobytes() == first.logits.tobytes()
        assert set(second.texts.values()) == {first.text}
        stored(other)
        assert not [entry for entry in other.cache.index if entry.holds]
        check(other)


@pytest.mark.parametrize("sliceable", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["attention", "hybrid"])
def test_what_another_server_writes_meanwhile_is_not_computed(
    key_file: Path, valkey: ValkeyServer, patient: None, monkeypatch: pytest.MonkeyPatch, sliceable: bool
) -> None:
    """Fault: a conversation moved before its blocks were written, and was computed from its beginning to its end."""
    monkeypatch.setattr(shared_tier, "MISSING", 0.1)
    monkeypatch.setattr(late_fetch, "BARRED", 0.1)
    shape = {"sliceable": sliceable}
    with start(valkey.url, key_file, **shape) as one, slow(valkey.url, key_file, delay=0.06, **shape) as other:
        pending = submit(other, long_chat(), max_tokens=4)
        until = time.monotonic() + 60
        while not pending.handle.begun:
            assert time.monotonic() < until
            time.sleep(0.005)
        ask(one, long_chat(), max_tokens=4)
        report = pending.answer().report
        assert 0 < report.computed < report.prompt * 0.8
        assert report.cached + report.computed == report.prompt
        assert report.tiers["shared"] > 0
        stored(other)
        check(other)


def test_a_request_is_told_why_it_computed_what_the_store_has(
    key_file: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: it was told that nothing like it was found, or that it had been evicted."""
    with start(valkey.url, key_file) as one:
        ask(one, long_chat())
        stored(one)
    with start(valkey.url, key_file) as other, monkeypatch.context() as patch:
        ask(other, [user("Something else entirely, and long enough to measure how fast this server computes.")])
        patch.setattr(shared_fetch, "STALL", 30.0)
        patch.setattr(StorePace, "pays", lambda *_: False)
        found = ask(other, long_chat()).report.explanation
        assert found is not None
        assert (found.cause, found.recomputed) == (Cause.SLOWER, found.recomputed)
        assert found.recomputed > 300
    with start(valkey.url, key_file) as other:
        valkey.hang()
        found = ask(other, long_chat()).report.explanation
        valkey.go_on()
        assert found is not None
        assert (found.cause, found.recomputed) == (Cause.STORE, 0), "the store has not said what it has"
    with start(valkey.url, key_file) as other:
        get_into = ValkeyStore.get_into

        def hang(self: ValkeyStore, wanted: Any, at: int) -> Any:
            valkey.hang()
            return get_into(self, wanted, at)

        monkeypatch.setattr(ValkeyStore, "get_into", hang)
        found = ask(other, long_chat()).report.explanation
        assert found is not None
        assert found.cause == Cause.STORE
        assert found.recomputed > 300
        tier(other)._link.breaker.trip(tier(other)._link.clock())
        again = ask(other, [user("Nobody has asked this before, and the store is left alone.")]).report.explanation
        assert again is not None
        assert again.cause == Cause.STORE


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
def test_bytes_written_are_at_most_the_bytes_computed(
    key_file: Path, valkey: ValkeyServer, patient: None, sliceable: bool
) -> None:
    """A conversation of several turns at two servers. Envelopes count apart: here a block has a few hundred bytes only."""
    computed = saved = written = 0
    with start(valkey.url, key_file, sliceable=sliceable) as one, start(valkey.url, key_file, sliceable=sliceable) as other:
        messages = chat()
        for turn in range(4):
            for rt in (one, other):
                answer = ask(rt, messages, max_tokens=12)
                computed += answer.report.computed
                stored(rt)
            messages = [*messages, assistant(answer.text), user(f"And then {turn}?")]
        for rt in (one, other):
            computed += rt.scheduler.settle.counters["tokens"]
            saved += tier(rt).counters["saved"]
            written += tier(rt).counters["saved_bytes"]
        shape = one.engine.shape
        stored_kv = [name for name in entries(valkey) if (parsed := parse(name)) is not None and parsed.kind == "kv"]
        states = (saved - len(stored_kv)) * shape.state_bytes
        assert saved == len(entries(valkey)), "nothing was written twice"
        assert len(stored_kv) * BLOCK_SIZE <= computed
        assert written <= computed * shape.kv_bytes_per_token + states + 1000 * saved


def test_what_is_computed_by_both_is_written_once(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    with start(valkey.url, key_file) as one, start(valkey.url, key_file) as other:
        pending = [submit(rt, chat()) for rt in (one, other)]
        reports = [one_of_them.answer().report for one_of_them in pending]
        for rt in (one, other):
            stored(rt)
        saved = sum(tier(rt).counters["saved"] for rt in (one, other))
        assert saved >= len(entries(valkey)) >= (reports[0].prompt - 1) // BLOCK_SIZE


def test_the_last_turn_is_settled_when_the_server_stops(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    """Derived KV stays here, so without it the reply would be computed again elsewhere."""
    with start(valkey.url, key_file) as one:
        messages = chat()
        answer = ask(one, messages, max_tokens=60)
    assert one.scheduler.settle.counters["turns"] == 1
    messages = [*messages, assistant(answer.text), user("And then?")]
    with start(valkey.url, key_file) as other:
        report = ask(other, messages, max_tokens=4).report
        assert report.computed <= len("And then?") + 40 + BLOCK_SIZE
        assert report.tiers["shared"] > 0


def test_logs_and_names_show_no_prompt(
    key_file: Path, valkey: ValkeyServer, patient: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with start(valkey.url, key_file) as one, start(valkey.url, key_file) as other:
        for rt in (one, other):
            ask(rt, chat("The secret word is marmalade."), salt="anna")
            stored(rt)
        valkey.kill()
        ask(other, chat("The secret word is quincunx."), salt="anna")
    said = caplog.text + " ".join(entries_named(key_file))
    assert "marmalade" not in said
    assert "quincunx" not in said
    assert "anna" not in said


def entries_named(key_file: Path) -> list[str]:
    return [str(path.name) for path in key_file.parent.rglob("*")]


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_doctor_warns_of_a_store_that_evicts_nothing_and_names_servers_that_differ(tmp_path: Path, key_file: Path) -> None:
    server = ValkeyServer(tmp_path, ["--maxmemory", "50mb", "--maxmemory-policy", "noeviction"])
    try:
        with start(server.url, key_file) as one:
            ask(one, chat())
            stored(one)
            until = time.monotonic() + 60
            while not any("server " in topic for topic, _ in examined(server.url, key_file, one)[1]):
                assert time.monotonic() < until
                time.sleep(0.05)
            usable, lines = examined(server.url, key_file, one)
            assert usable
            assert any("noeviction" in text for _, text in lines)
            assert any("shares its cache with this one" in str(text) for _, text in lines)
            strange = FakeEngine(ctx=512, block_size=16)
            assert any("cannot share" in str(text) for _, text in examine_shared(settings(server.url, key_file), strange)[1])
    finally:
        server.kill()
    usable, lines = examine_shared(settings(server.url, key_file), FakeEngine(ctx=512, block_size=8))
    assert not usable
    assert "cannot be used" in lines[0][1]


def settings(url: str, key_file: Path) -> Settings:
    return Settings(shared=url, shared_key_file=key_file)


def examined(url: str, key_file: Path, rt: Runtime) -> tuple[bool, list[tuple[str, str]]]:
    return examine_shared(settings(url, key_file), rt.engine)


# ── reply tokens ─────────────────────────────────────────────────────────────────────────────────────────────────────


def writer_of_other_tokens() -> FakeEngine:
    """Its replies have other tokens than the tokenizer would choose. Its decoding gives the KV of prefill (as with bf16)."""
    tokenizer = FakeTokenizer(["aa", "ab", "ba", "bb"])
    shape: dict[str, Any] = {"ctx": 1024, "block_size": BLOCK_SIZE, "delay": 0.005, "slots": 2}
    return FakeEngine(**shape, alphabet=b"ab", tokenizer=tokenizer, decode_is_prefill=True)


def test_a_conversation_that_moves_keeps_the_tokens_of_its_replies(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    """Without the notes, the other server would choose other tokens for the replies, and compute all after the first one."""
    given: dict[str, Any] = {"reuse": "fast", "memory_budget": 1 << 20, "shared": valkey.url, "shared_key_file": key_file}
    with (
        Runtime(writer_of_other_tokens, Settings(**given, settle="off")) as one,
        Runtime(writer_of_other_tokens, Settings(**given, settle="off")) as other,
    ):
        messages = chat()
        for turn in range(4):
            answer = ask(one, messages, max_tokens=40, ignore_eos=True)
            messages = [*messages, assistant(answer.text), user(f"And then {turn}?")]
        stored(one)
        count = tier(one).counters["notes_saved"]
        assert count >= 3, "the replies have the tokenizer's own tokens: nothing is tested"
        report = ask(other, messages, max_tokens=4).report
        assert report.computed <= len("And then 3?") + 40 + BLOCK_SIZE
        assert tier(other).counters["notes_fetched"] == count
        ask(other, messages, max_tokens=4)
        assert tier(other).counters["notes_fetched"] == count, "it knows them now"
        check(other)


def test_notes_of_a_dead_store_or_of_a_stranger_are_misses(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    given: dict[str, Any] = {"reuse": "fast", "memory_budget": 1 << 20, "shared": valkey.url, "shared_key_file": key_file}
    with Runtime(writer_of_other_tokens, Settings(**given, settle="off")) as one:
        messages = chat()
        answer = ask(one, messages, max_tokens=40, ignore_eos=True, salt="anna")
        messages = [*messages, assistant(answer.text), user("And then?")]
        stored(one)
        assert tier(one).counters["notes_saved"] == 1
    with Runtime(writer_of_other_tokens, Settings(**given, settle="off")) as other:
        assert ask(other, messages, max_tokens=4, salt="berta").report.prompt
        assert tier(other).counters["notes_fetched"] == 0
        client = library.Valkey(HOST, valkey.port)
        for key in client.keys("hs1/*/note/*"):  # type: ignore[union-attr]
            client.set(key, b"x" * 100)
        assert ask(other, messages, max_tokens=4, salt="anna").report.prompt
        assert tier(other).counters["fault_foreign"] == 1
        valkey.kill()
        assert ask(other, [*messages, assistant("abab"), user("And?")], max_tokens=4, salt="anna").report.prompt
        check(other)


# ── what people see ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_answers_timings_and_metrics_know_the_tier(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    body = {"messages": chat(), "max_tokens": 4}
    with serving(start(valkey.url, key_file)) as one, serving(start(valkey.url, key_file)) as other:
        assert one.post("/v1/chat/completions", json=body).json()["headstart"]["tiers"] == {}
        assert one.runtime is not None
        stored(one.runtime)
        answer = other.post("/v1/chat/completions", json=body).json()
        tokens = answer["headstart"]["tiers"]["shared"]
        assert tokens > 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens == answer["timings"]["cache_n"]
        assert other.metric("headstart:cached_tokens_total", tier="shared") == tokens
        assert other.metric("headstart:store_fetched_total", tier="shared") == tokens // BLOCK_SIZE
        assert other.metric("headstart:store_fetched_bytes_total", tier="shared") > 0
        assert one.metric("headstart:store_saved_bytes_total", tier="shared") > 0
        assert one.metric("headstart:store_missing_total", tier="shared") == 0
