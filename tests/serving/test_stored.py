"""Pins and deletions beside a running server: what is pinned stays, within the share for pins, also after a restart."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from effort import SLOW
from harness import ask, assistant, check, submit, user
from headstart.cli.main import main
from headstart.config import Settings
from headstart.errors import Conflict, NotFound, Unavailable
from headstart.serving import scheduler, settle
from headstart.serving import stored as stored_chains
from headstart.serving.portions import LongWork
from headstart.serving.request import Started
from headstart.serving.runtime import Runtime
from headstart.serving.stored import CachedChain, CachedChains, DeletedStretch
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers import upkeep, write_behind
from headstart.tiers.disk import Disk, store
from headstart.tiers.disk.chains import StoredChains
from headstart.tiers.notices import ObjectFound, ObjectRefused
from headstart.tiers.write_behind import WriteBehind
from live import wait_until
from remains import Clock, kept, mark, marked, stored

LONG = "A text of some length, of which no other begins as it does. " * 4
KINDS: dict[str, dict[str, Any]] = {"rows": {}, "state": {"sliceable": False}}


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "POLL", 0.02)
    monkeypatch.setattr(scheduler, "IDLE_POLL", 0.05)
    monkeypatch.setattr(scheduler, "IDLE_SAVE", 0.01)
    monkeypatch.setattr(settle, "AFTER", 0.01)


@contextmanager
def started(
    folder: Path | None = None, *, budget: int = 64 << 10, engine: dict[str, Any] | None = None, **more: Any
) -> Iterator[Runtime]:
    settings = Settings(memory_budget=budget, cache_dir=folder, **more)
    with Runtime(lambda: FakeEngine(**{"slots": 1, "ctx": 1024, **(engine or {})}), settings, clock=Clock()) as runtime:
        # This engine computes as fast as it restores. On a busy machine, what is stored would sometimes be computed.
        runtime.scheduler._admission.pace.restore = 0.0
        yield runtime
        check(runtime)


def quiet(runtime: Runtime) -> None:
    """Waits until all is saved, on disk too."""
    offload = runtime.cache.store.offload
    runtime.scheduler.wake()
    wait_until(lambda: runtime.scheduler.idle and not any(slot.dirty for slot in runtime.scheduler.slots))
    wait_until(lambda: not (offload.writing or offload._queued or getattr(runtime.cache.disk, "_notices", ())))


def say(runtime: Runtime, text: str, *, salt: str = "") -> CachedChain:
    """Sends a prompt, and returns the chain of its last full block."""
    ask(runtime, [user(text)], salt=salt, max_tokens=1)
    quiet(runtime)
    owner, size = runtime.owner(salt), runtime.engine.traits.block_size
    whole = runtime.stored.all()[0]
    assert whole.owner == owner
    last = [entry for entry in whole.entries if len(entry.tokens) == size][-1]
    return runtime.stored.get(last.id, owner)


def flood(runtime: Runtime, count: int = 40, *, salt: str = "") -> None:
    for number in range(count):
        ask(runtime, [user(f"{number} {LONG}")], salt=salt, max_tokens=1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_pinned_stays_in_memory(kind: str) -> None:
    for pins in (False, True):
        with started(engine=KINDS[kind]) as runtime:
            chain = say(runtime, LONG)
            if pins:
                assert runtime.stored.pin(chain.id, chain.owner).pinned
            flood(runtime)
            assert runtime.cache.store.counters["evicted"]
            there = [entry.id for entry in runtime.stored.entries()]
            assert (chain.id in there) == pins
            report = ask(runtime, [user(LONG)], max_tokens=1).report
            assert (report.computed <= 8) == pins
            if pins:
                runtime.stored.unpin(chain.id, chain.owner)
                flood(runtime)
                with pytest.raises(NotFound):
                    runtime.stored.get(chain.id, chain.owner)
                assert runtime.cache.store.pins.held == len(runtime.cache.store.pins) == 0


def test_pins_fill_half_of_memory_and_no_more() -> None:
    with started(budget=32 << 10) as runtime:
        pinned, refusals = list[CachedChain](), list[Conflict]()
        for number in range(30):
            chain = say(runtime, f"{number} {LONG}")
            try:
                pinned.append(runtime.stored.pin(chain.id, chain.owner))
            except Conflict as error:
                refusals.append(error)
                assert not runtime.stored.get(chain.id, chain.owner).pinned
        held = runtime.cache.store.pins.held
        assert len(pinned) > 1 < len(refusals)
        assert {refusal.code for refusal in refusals} == {"pins_full"}
        assert "--memory-budget" in refusals[0].with_flags
        assert runtime.cache.memory.budget // 4 < held <= runtime.cache.memory.budget // 2
        assert {chain.id for chain in pinned} <= {entry.id for entry in runtime.stored.entries()}
        runtime.stored.unpin(pinned[0].id, pinned[0].owner)
        assert runtime.stored.pin(say(runtime, LONG).id, None).pinned, "there is room again"


def test_an_owner_pins_no_more_than_half_of_its_quota() -> None:
    with started(budget=64 << 10, tenant_memory=0.25) as runtime:
        most: dict[str, int] = {}
        for salt in ("a", "b"):
            for number in range(12):
                chain = say(runtime, f"{number} {LONG}", salt=salt)
                try:
                    runtime.stored.pin(chain.id, chain.owner)
                except Conflict:
                    break
            most[salt] = runtime.cache.store.pins.held - sum(most.values())
        assert 0 < most["a"] <= (64 << 10) // 8
        assert 0 < most["b"] <= (64 << 10) // 8


def test_only_the_owner_reaches_a_chain() -> None:
    with started() as runtime:
        chain = say(runtime, LONG, salt="a")
        other = runtime.owner("b")
        for reach in (runtime.stored.get, runtime.stored.pin, runtime.stored.unpin, runtime.stored.delete):
            with pytest.raises(NotFound):
                reach(chain.id, other)
        assert runtime.stored.get(chain.id, None).id == chain.id
        assert runtime.stored.get(chain.id, chain.owner).tokens == chain.tokens


def test_shared_beginnings_stay_pinned_as_long_as_one_needs_them() -> None:
    with started() as runtime:
        first, second = say(runtime, f"{LONG} And then?"), say(runtime, f"{LONG} But why?")
        shared = {entry.id for entry in first.entries} & {entry.id for entry in second.entries}
        assert shared
        for chain in (first, second):
            runtime.stored.pin(chain.id, None)
        runtime.stored.unpin(first.id, None)
        assert not runtime.stored.get(first.id, None).pinned
        assert shared <= {entry.id for entry in second.entries if entry.id in runtime.cache.store.pins}
        with pytest.raises(Conflict, match="pinned"):
            runtime.stored.delete(second.id, None)
        assert runtime.stored.unpin(max(shared, key=lambda key: runtime.stored.get(key, None).tokens), None).pinned


@pytest.mark.parametrize("disk", [False, True])
def test_what_is_deleted_is_nowhere(tmp_path: Path, disk: bool) -> None:
    with started(tmp_path if disk else None) as runtime:
        first = say(runtime, f"{LONG}{marked(0)}")
        second = say(runtime, f"{LONG}{marked(1)}")
        beginning = next(entry for entry in first.entries if entry in second.entries)
        with pytest.raises(Conflict, match="continue"):
            runtime.stored.delete(beginning.id, first.owner)
        common = len({*first.entries} & {*second.entries})
        whole = [one for one in runtime.stored.all() if len({*one.entries} & {*first.entries}) > common]
        gone = [runtime.stored.delete(one.id, one.owner) for one in whole]
        assert all(one.entries and one.tokens for one in gone)
        assert any(one.disk_bytes for one in gone) == disk
        wait_until(lambda: not kept(runtime, [mark(0)]))
        wait_until(lambda: not stored(tmp_path, [mark(0)]))
        quiet(runtime)
        assert kept(runtime, [mark(1)]), "the other chain stays"
        assert runtime.stored.get(second.id, second.owner).tokens == second.tokens


@pytest.mark.parametrize("disk", [False, True])
def test_what_is_deleted_while_a_slot_uses_it_is_nowhere_afterwards(tmp_path: Path, disk: bool) -> None:
    with started(tmp_path if disk else None, engine={"delay": 0.02}) as runtime:
        chain = say(runtime, f"{LONG}{marked(0)}")
        pending = submit(runtime, [user(f"{LONG}{marked(0)}")], max_tokens=30)
        pending.until(Started)
        assert runtime.stored.delete(chain.id, chain.owner).entries
        pending.answer()
        del pending, chain
        wait_until(lambda: not kept(runtime, [mark(0)]))
        quiet(runtime)
        assert not kept(runtime, [mark(0)])
        assert not stored(tmp_path, [mark(0)])


@pytest.mark.parametrize("disk", [False, True])
def test_what_another_server_deletes_while_a_request_computes_it_here_is_nowhere_afterwards(tmp_path: Path, disk: bool) -> None:
    with started() as other, started(tmp_path if disk else None, engine={"delay": 0.02}) as runtime:
        chain = say(other, f"{LONG}{marked(0)}")
        pending = submit(runtime, [user(f"{LONG}{marked(0)}")], max_tokens=30)
        pending.until(Started)
        gone = other.stored.delete(chain.id, chain.owner)
        with pytest.raises(NotFound):  # nothing is stored yet
            runtime.stored.delete(chain.id, chain.owner, gone.stretches)
        pending.answer()
        del pending, chain
        wait_until(lambda: not kept(runtime, [mark(0)]))
        quiet(runtime)
        assert not kept(runtime, [mark(0)])
        assert not stored(tmp_path, [mark(0)])


def test_a_deletion_elsewhere_leaves_a_chain_that_goes_on_behind_a_lost_block() -> None:
    with started(budget=256 << 10) as other, started(budget=256 << 10) as runtime:
        text = f"{LONG}{marked(0)}"
        chain = say(other, text)
        longer = say(runtime, f"{text} And then something else, which is longer. " * 2)
        gone = other.stored.delete(chain.id, chain.owner)
        lost = [entry for entry in longer.entries if entry.id in {one.id for one in gone.stretches}][5]
        runtime.scheduler.call(lambda: runtime.cache.store.memory_budget.drop(lost)).result()
        before = {entry.id for entry in runtime.stored.entries()}
        with pytest.raises(NotFound):
            runtime.stored.delete(chain.id, chain.owner, gone.stretches)
        quiet(runtime)
        assert {entry.id for entry in runtime.stored.entries()} == before


def test_what_was_deleted_shows_no_text() -> None:
    shown = repr(DeletedStretch(bytes(32), bytes(32), b"secret", b"owner"))
    assert "secret" not in shown


# ── on disk ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_pin_outlives_the_server(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RESERVE", 256 << 10)
    more: dict[str, Any] = {"disk_budget": 1 << 20, "engine": KINDS[kind]}
    with started(tmp_path, **more) as runtime:
        chain = runtime.stored.pin(say(runtime, LONG).id, None)
        assert chain.pinned
    for _ in range(2):
        with started(tmp_path, **more) as runtime:
            assert runtime.stored.get(chain.id, chain.owner).pinned
            flood(runtime, 60)
            quiet(runtime)
            assert runtime.cache.disk.counters["evicted"]
            assert runtime.stored.get(chain.id, chain.owner).pinned
            assert ask(runtime, [user(LONG)], max_tokens=1).report.computed <= 8
    with started(tmp_path, **more) as runtime:
        assert not runtime.stored.unpin(chain.id, chain.owner).pinned
    with started(tmp_path, **more) as runtime:
        assert not runtime.stored.get(chain.id, chain.owner).pinned


@pytest.mark.parametrize("kind", KINDS)
def test_a_pin_waits_for_what_is_not_on_disk_yet(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it outlives the process from its answer on."""
    writes, real = threading.Event(), Disk.write

    def write(self: Disk, *args: Any) -> Any:
        assert writes.wait(30)
        return real(self, *args)

    monkeypatch.setattr(Disk, "write", write)
    with started(tmp_path, engine=KINDS[kind]) as runtime, ThreadPoolExecutor() as others:
        ask(runtime, [user(LONG)], max_tokens=1)
        offload = runtime.cache.store.offload
        wait_until(lambda: offload.writing and runtime.scheduler.idle)
        chain = runtime.stored.all()[0]
        pinning = others.submit(runtime.stored.pin, chain.id, chain.owner)
        wait_until(lambda: len(runtime.cache.store.pins) > 0)
        assert not pinning.done()
        writes.set()
        chain = pinning.result(30)
        whole = {one.id for one in (*chain.entries, *chain.checkpoints) if one.length == runtime.engine.traits.block_size}
        assert len(whole) > 20
        with closing(Disk(tmp_path, 1 << 40)) as disk:
            assert disk.catalog.pinned(runtime.engine.fingerprint) == whole


def test_a_pin_does_not_fit_if_the_disk_refuses_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether that has been offered to the disk already or not."""
    monkeypatch.setattr(store, "RESERVE", 256 << 10)
    with started(tmp_path, disk_budget=400 << 10, budget=1 << 20) as runtime:
        ask(runtime, [user(LONG)], max_tokens=1)
        wait_until(lambda: runtime.stored.all() and runtime.scheduler.idle)
        chain = runtime.stored.all()[0]
        with pytest.raises(Conflict) as refusal:
            runtime.stored.pin(chain.id, chain.owner)
        assert "--disk-budget" in refusal.value.with_flags
        assert runtime.cache.store.pins.held == len(runtime.cache.store.pins) == 0
        with closing(Disk(tmp_path, 400 << 10)) as disk:
            assert not disk.catalog.pinned(runtime.engine.fingerprint)


def test_pins_fill_half_of_the_disk_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RESERVE", 256 << 10)
    with started(tmp_path, disk_budget=2 << 20, budget=1 << 20) as runtime:
        refusal = None
        for number in range(30):
            chain = say(runtime, f"{number} {LONG}")
            try:
                runtime.stored.pin(chain.id, None)
            except Conflict as error:
                refusal = error
                break
        assert refusal is not None
        assert "--disk-budget" in refusal.with_flags
        assert not runtime.stored.get(chain.id, None).pinned
        assert runtime.stored.all()[1].pinned


def test_a_derived_object_in_place_of_a_canonical_one_is_known_as_derived(tmp_path: Path) -> None:
    """Another process evicted an object and stored a derived one before this one looked: there was no ghost any more."""
    with started(tmp_path) as runtime:
        chain = say(runtime, LONG)
        first = chain.entries[0]
        assert first.copies["disk"]
        runtime.cache.disk._notices.append(ObjectFound(runtime.cache.store.label(first, False)))  # type: ignore[union-attr]
        found = runtime.stored.get(chain.id, chain.owner).entries[0]
        assert found.copies == {"memory": True, "disk": False}


def test_pins_of_the_command_line_reach_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started(tmp_path) as runtime:
        chain = say(runtime, LONG)
        for command, pinned in (("pin", True), ("unpin", False)):
            with pytest.raises(SystemExit) as left:
                main(["cache", command, chain.id.hex(), "--cache-dir", str(tmp_path)])
            assert not left.value.code
            wait_until(lambda pinned=pinned: runtime.stored.get(chain.id, None).pinned == pinned)  # type: ignore[misc]
            assert (runtime.cache.store.pins.held > 0) == pinned


def test_nothing_is_offered_to_the_disk_after_memory_was_returned(tmp_path: Path) -> None:
    """A deletion that ended after the server had stopped took a refusal of the disk, and offered the entry again."""
    runtime = Runtime(
        lambda: FakeEngine(slots=1, ctx=1024), Settings(memory_budget=64 << 10, cache_dir=tmp_path), clock=Clock()
    )
    store = runtime.cache.store
    entry = say(runtime, LONG).entries[0]
    label = store.label(entry, True)
    runtime.close()
    store.offload.gone(entry.id)
    store.offload.writing[entry.id] = entry
    runtime.cache.disk._notices.append(ObjectRefused(label, "fault"))  # type: ignore[union-attr]
    store.offload.take_notices()
    assert not store.offload.writing


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_deletion_of_everything_spares_can_still_be_used(tmp_path: Path, kind: str) -> None:
    """A running server took pinned chains for deleted until its next start: it computed them, and nobody could unpin them."""
    with started(tmp_path, engine=KINDS[kind]) as runtime:
        chain = say(runtime, LONG)
        say(runtime, f"Another text, which is not pinned. {LONG}")
        runtime.stored.pin(chain.id, None)
        before = runtime.clock()
        runtime.clock.now += 1  # type: ignore[attr-defined]
        with closing(Disk(tmp_path, 1 << 40, clock=runtime.clock)) as disk:
            disk.erase(disk.catalog.keys(), before, lambda: StoredChains(disk.catalog.rows()).needed())
            left = disk.catalog.keys()
        runtime.scheduler.wake()
        wait_until(lambda: runtime.cache.store.terms.before == before and not runtime.scheduler.expiry.busy)
        quiet(runtime)
        assert {entry.id for entry in runtime.cache.index} == left >= {entry.id for entry in chain.entries}
        assert ask(runtime, [user(LONG)], max_tokens=1).report.computed <= 8
        assert not runtime.stored.unpin(chain.id, None).pinned
        runtime.stored.delete(chain.id, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_behind_what_a_deletion_of_everything_has_spared(tmp_path: Path, kind: str) -> None:
    """Its new checkpoints cover old text too, so memory and disk refused them until the next start."""
    chat = [user(LONG), assistant("So it is."), user(f"And then? {LONG}")]
    with started(tmp_path, engine=KINDS[kind], settle="off") as runtime:
        chain = say(runtime, LONG)
        runtime.stored.pin(chain.id, None)
        before = runtime.clock()
        runtime.clock.now += 1  # type: ignore[attr-defined]
        with closing(Disk(tmp_path, 1 << 40, clock=runtime.clock)) as disk:
            disk.erase(disk.catalog.keys(), before, lambda: StoredChains(disk.catalog.rows()).needed())
        runtime.scheduler.wake()
        wait_until(lambda: runtime.cache.store.terms.before == before and not runtime.scheduler.expiry.busy)
        quiet(runtime)
        assert ask(runtime, chat, max_tokens=1).report.cached
        quiet(runtime)
        runtime.erase(0)
        assert ask(runtime, chat, max_tokens=1).report.computed <= 8, "memory has what follows"
        quiet(runtime)
        on_disk = {entry.id for entry in runtime.cache.index if len(entry.tokens) == 8}
        assert runtime.cache.disk.counters["skipped_erased"] == 0
    with closing(Disk(tmp_path, 1 << 40)) as disk:
        assert on_disk <= disk.catalog.keys()


def test_a_checkpoint_goes_with_the_oldest_text_before_it(tmp_path: Path) -> None:
    """The end of the conversation is younger, and stays. Its checkpoints cover the beginning too."""
    with started(tmp_path, engine=KINDS["state"], settle="off") as runtime:
        say(runtime, LONG)
        before = runtime.clock()
        runtime.clock.now += 1  # type: ignore[attr-defined]
        ask(runtime, [user(LONG), assistant("So it is."), user(f"And then? {LONG}")], max_tokens=1)
        quiet(runtime)
        assert any(entry.state and entry.written == before for entry in runtime.cache.index)
        with closing(Disk(tmp_path, 1 << 40, clock=runtime.clock)) as disk:
            disk.erase((), before)
            runtime.scheduler.wake()
            wait_until(lambda: runtime.cache.store.terms.before == before and not runtime.scheduler.expiry.busy)
            quiet(runtime)
            assert not any(entry.written <= before for entry in runtime.cache.index)
            assert any(entry.written > before for entry in runtime.cache.index)
            assert not disk.catalog.ages.old(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pinned_object_that_a_fault_destroys_is_pinned_again_when_it_is_stored_again(tmp_path: Path, kind: str) -> None:
    with started(tmp_path, engine=KINDS[kind]) as runtime:
        chain = say(runtime, LONG)
        runtime.stored.pin(chain.id, None)
    with started(tmp_path, engine=KINDS[kind]) as runtime:
        wait_until(lambda: len(runtime.cache.store.pins) > 0)
        with closing(Disk(tmp_path, 1 << 40)) as disk:
            pinned = disk.catalog.pinned(runtime.engine.fingerprint)
            path = disk.path(chain.id)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        say(runtime, LONG)
        assert runtime.cache.disk.counters["fault_corrupt"]  # type: ignore[union-attr]
        with closing(Disk(tmp_path, 1 << 40)) as disk:
            wait_until(lambda: disk.catalog.pinned(runtime.engine.fingerprint) == pinned)
        wait_until(lambda: runtime.stored.get(chain.id, None).pinned)


def test_unpinning_passes_over_what_a_fault_has_destroyed(tmp_path: Path) -> None:
    """Else the blocks before it would stay pinned, and it would be pinned when it is stored again."""
    with started(tmp_path) as runtime:
        chain = say(runtime, LONG)
        runtime.stored.pin(chain.id, None)
    with started(tmp_path) as runtime:
        wait_until(lambda: len(runtime.cache.store.pins) > 0)
        middle, pins = chain.entries[len(chain.entries) // 2].id, runtime.cache.store.pins
        with closing(Disk(tmp_path, 1 << 40)) as disk:
            disk.path(middle).write_bytes(b"bad")
            assert disk.quarantine(middle) is None
        wait_until(lambda: runtime.cache.index.get(middle) is None)
        runtime.stored.unpin(chain.id, None)
        assert not len(pins)
        say(runtime, LONG)
        with closing(Disk(tmp_path, 1 << 40)) as disk:
            assert not disk.catalog.pinned(runtime.engine.fingerprint)


@pytest.mark.parametrize("disk", [False, True])
def test_the_answer_says_what_is_pinned(tmp_path: Path, disk: bool) -> None:
    """However quickly pins come and go, while the disk's notices of the last ones are still on their way."""
    with started(tmp_path if disk else None) as runtime:
        chain = say(runtime, LONG)
        for _ in range(60):
            assert runtime.stored.pin(chain.id, None).pinned
            assert not runtime.stored.unpin(chain.id, None).pinned
        quiet(runtime)
        assert not runtime.stored.get(chain.id, None).pinned
        assert runtime.cache.store.pins.held == len(runtime.cache.store.pins) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("disk", [False, True])
def test_chains_are_pinned_and_deleted_while_they_are_used_and_evicted(tmp_path: Path, kind: str, disk: bool) -> None:
    """By several callers at once, who must agree with what is stored in the end."""
    folder = tmp_path if disk else None
    with started(folder, budget=32 << 10, engine={**KINDS[kind], "slots": 2}) as runtime:
        failed, over = list[BaseException](), threading.Event()

        def repeat(seed: int, work: Callable[[random.Random], object]) -> None:
            dice = random.Random(seed)
            try:
                while not over.is_set():
                    with suppress(Conflict, NotFound):
                        work(dice)
            except BaseException as error:
                failed.append(error)

        def some(dice: random.Random) -> bytes:
            chains = runtime.stored.all()
            return dice.choice(dice.choice(chains).entries).id if chains else b""

        def talk(dice: random.Random) -> None:
            text = f"{dice.randrange(4)} {LONG} {dice.randrange(6)} {LONG}"
            ask(runtime, [user(text)], max_tokens=dice.choice((1, 9)))

        works: list[Callable[[random.Random], object]] = [
            *(talk, talk),
            lambda dice: runtime.stored.pin(some(dice), None),
            lambda dice: runtime.stored.unpin(some(dice), None),
            lambda dice: runtime.stored.delete(some(dice), None),
        ]
        threads = [threading.Thread(target=repeat, args=pair) for pair in enumerate(works)]
        for thread in threads:
            thread.start()
        over.wait(8.0 if SLOW else 0.4)
        over.set()
        for thread in threads:
            thread.join()
        assert not failed
        quiet(runtime)
        pins, ids = runtime.cache.store.pins, {entry.id for entry in runtime.stored.entries()}
        assert {*pins._here, *pins._on_disk} <= ids
        assert not disk or pins._here.isdisjoint(pins._on_disk)
        for chain in runtime.stored.all():
            runtime.stored.unpin(chain.id, None)
        quiet(runtime)
        assert pins.held == len(pins) == 0


def test_what_is_being_deleted_is_not_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk deletes a chain that only it has, when a caller pins it."""
    with started(tmp_path) as runtime:
        chain = say(runtime, LONG)
    erase, erasing, refused = store.Disk.erase, threading.Event(), threading.Event()

    def slowly(disk: store.Disk, *arguments: Any, **more: Any) -> Any:
        erasing.set()
        assert refused.wait(60)
        return erase(disk, *arguments, **more)

    with started(tmp_path) as runtime:
        monkeypatch.setattr(store.Disk, "erase", slowly)
        deleting = threading.Thread(target=runtime.stored.delete, args=(chain.id, None))
        deleting.start()
        assert erasing.wait(60)
        with pytest.raises(NotFound):
            runtime.stored.pin(chain.id, None)
        assert ask(runtime, [user(LONG)], max_tokens=1).report.cached == 0, "nor loaded, though its objects are still there"
        refused.set()
        deleting.join()
        quiet(runtime)
        assert len(runtime.cache.store.pins) == len(runtime.cache.store.barred) == 0


def test_a_second_deletion_finds_nothing_only_when_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk hung. A second caller was told that there is no such chain, though all of it was still there. A fleet took that
    for a deletion (seed 8505007 of the simulation)."""
    erase, erasing, goes = store.Disk.erase, threading.Event(), threading.Event()

    def slowly(disk: store.Disk, *arguments: Any, **more: Any) -> Any:
        erasing.set()
        assert goes.wait(60)
        return erase(disk, *arguments, **more)

    def files() -> int:
        return len(list((tmp_path / "objects").iterdir()))

    with started(tmp_path) as runtime, ThreadPoolExecutor(3) as callers:
        owner, before = runtime.owner("a"), files()
        chain = say(runtime, LONG, salt="a")
        monkeypatch.setattr(store.Disk, "erase", slowly)
        first = callers.submit(runtime.stored.delete, chain.id, owner)
        assert erasing.wait(60)
        later = [callers.submit(runtime.stored.delete, chain.id, whose) for whose in (owner, None)]
        assert not wait(later, 0.3).done
        assert files() > before
        goes.set()
        for one in later:
            with pytest.raises(NotFound):
                one.result(60)
            assert files() == before
        assert first.result(60).tokens > 0
        again = say(runtime, LONG, salt="a")
        assert runtime.stored.delete(again.id, owner).tokens > 0


def test_deletions_that_wait_for_others_end_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They began when the disk's thread had ended. Nobody answered them, and the process could not end for a minute."""
    erase, erasing, goes = store.Disk.erase, threading.Event(), threading.Event()

    def slowly(disk: store.Disk, *arguments: Any, **more: Any) -> Any:
        erasing.set()
        assert goes.wait(60)
        return erase(disk, *arguments, **more)

    settings = Settings(memory_budget=64 << 10, cache_dir=tmp_path)
    with Runtime(lambda: FakeEngine(slots=1, ctx=1024), settings) as runtime, ThreadPoolExecutor(5) as callers:
        chains = [say(runtime, f"{number} {LONG}").id for number in range(5)]
        monkeypatch.setattr(store.Disk, "erase", slowly)
        deletions = [callers.submit(runtime.stored.delete, chains[0], None)]
        assert erasing.wait(60)
        deletions += [callers.submit(runtime.stored.delete, chain, None) for chain in chains[1:]]
        assert not wait(deletions, 0.2).done
        threading.Timer(0.3, goes.set).start()
        runtime.close()
        done = wait(deletions, 10).done
        assert len(done) == len(chains)
        assert {type(one.exception()) for one in done} <= {type(None), Unavailable}


@pytest.mark.parametrize("slow", ["engine", "disk"])
def test_a_deletion_for_which_nobody_waits_any_more_ends(tmp_path: Path, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks stayed barred: no prompt could use them again, nor could anybody delete what came after them."""
    goes, erase = threading.Event(), store.Disk.erase

    def slowly(disk: store.Disk, *arguments: Any, **more: Any) -> Any:
        assert goes.wait(60)
        return erase(disk, *arguments, **more)

    if slow == "disk":
        monkeypatch.setattr(store.Disk, "erase", slowly)
    with started(tmp_path) as runtime:
        chain = say(runtime, LONG)
        if slow == "engine":
            runtime.scheduler.call(lambda: goes.wait(60))
        with monkeypatch.context() as patch:
            patch.setattr(stored_chains, "PATIENCE", 0.1)
            threading.Timer(0.5, goes.set).start()
            with pytest.raises(Unavailable):
                runtime.stored.delete(chain.id, None)
        wait_until(lambda: not runtime.cache.store.barred and not any(e.owner for e in runtime.stored.entries()))
        again = say(runtime, LONG)
        assert ask(runtime, [user(LONG)], max_tokens=1).report.cached > 0
        runtime.stored.delete(again.id, None)
        quiet(runtime)
        assert not runtime.cache.store.barred


def test_a_chain_is_deleted_only_when_all_chains_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large folder is still being read. Another chain there may continue its blocks, or a pin may protect them."""
    with started(tmp_path) as runtime:
        for number in range(2):
            say(runtime, LONG + marked(number))
        quiet(runtime)
    monkeypatch.setattr(upkeep, "AT_ONCE", -1)
    monkeypatch.setattr(write_behind, "BACKLOG", 0)  # the engine has no time for the rest
    with started(tmp_path) as runtime:
        chain = say(runtime, LONG + marked(0))
        for change in (runtime.stored.delete, runtime.stored.unpin):
            with pytest.raises(Unavailable, match="still being read"):
                change(chain.id, None)
        monkeypatch.setattr(write_behind, "BACKLOG", 1000)
        wait_until(lambda: runtime.cache.disk.listed)
        assert runtime.stored.delete(chain.id, None).tokens < len(LONG)
    with started(tmp_path) as runtime:
        assert ask(runtime, [user(LONG + marked(1))], max_tokens=4).report.cached > len(LONG)


def test_a_chain_is_deleted_only_when_the_disk_has_been_asked(tmp_path: Path) -> None:
    """What is over here may be younger on disk, and continue the chain."""
    with started(tmp_path) as runtime:
        say(runtime, LONG)
        quiet(runtime)
        store, disk, answers = runtime.cache.store, runtime.cache.disk, threading.Event()
        assert isinstance(disk, WriteBehind)
        blocks = sorted((entry for entry in runtime.cache.index if disk.name in entry.copies), key=lambda entry: entry.start)
        parent, last = blocks[-2:]

        def over() -> None:
            disk._queue.ask(lambda _: answers.wait(30), after_writes=True)
            store.erase(last)
            store.offload.over(last.id)

        runtime.scheduler.call(over).result(30)
        for owner in (None, parent.owner):
            with pytest.raises(Unavailable, match="still being read"):
                runtime.stored.delete(parent.id, owner)
        other = runtime.scheduler.call(lambda: store.offload.unsure(b"bob45678")).result(30)
        assert not other
        answers.set()
        wait_until(lambda: not runtime.scheduler.call(lambda: store.offload.unsure(None)).result(30))
        with pytest.raises(Conflict):
            runtime.stored.delete(parent.id, None)
        assert runtime.stored.delete(last.id, None).entries


def test_a_chain_is_not_deleted_if_something_is_over_just_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces of the notices that a deletion handles first."""
    with started(tmp_path) as runtime:
        say(runtime, LONG)
        quiet(runtime)
        store, disk = runtime.cache.store, runtime.cache.disk.name
        blocks = sorted((entry for entry in runtime.cache.index if disk in entry.copies), key=lambda entry: entry.start)
        real, ends = CachedChains._take_notices, [blocks[-1]]

        def take_notices(self: CachedChains) -> LongWork[None]:
            yield from real(self)
            while ends:
                last = ends.pop()
                store.erase(last)
                store.offload.over(last.id)

        monkeypatch.setattr(CachedChains, "_take_notices", take_notices)
        with pytest.raises(Unavailable, match="still being read"):
            runtime.stored.delete(blocks[-2].id, None)
        assert runtime.cache.index.get(blocks[-2].id) is not None


def test_checkpoints_are_thinned_only_when_all_chains_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chain in a large folder, which is still being read, may branch off at any of them."""
    for listed in (False, True):
        monkeypatch.setattr(WriteBehind, "listed", listed)
        with started(tmp_path / str(listed), budget=1 << 20, engine={"sliceable": False, "ctx": 4096}) as runtime:
            chat = []
            for number in range(3):
                chat.append(user(f"{number} {LONG}"))
                chat.append(assistant(ask(runtime, chat, max_tokens=8).text))
                quiet(runtime)
            assert bool(runtime.cache.store.counters["thinned"]) == listed


def test_a_prompt_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it gets several replies. If nothing may be reused, it is not searched."""
    monkeypatch.setattr(WriteBehind, "listed", False)
    searches = list[Sequence[bytes]]()
    monkeypatch.setattr(WriteBehind, "find", lambda tier, keys: searches.append(keys) or [])
    with started(tmp_path, engine={"slots": 3}) as runtime:
        for options, expected in (({"choices": 3}, 1), ({"reuse": False}, 0)):
            searches.clear()
            ask(runtime, [user(f"{options} {LONG}")], max_tokens=1, **options)
            assert len(searches) == expected


@pytest.mark.parametrize("late", [False, True])
def test_a_pin_that_does_not_fit_takes_no_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """A server that has not read a large folder yet does not know what is pinned there. It took that for new, and undid it."""
    monkeypatch.setattr(store, "RESERVE", 4 << 20)
    more: Any = {"disk_budget": (4 << 20) + (1600 << 10), "budget": 4 << 20, "engine": {"ctx": 4096}}

    def pinned() -> set[bytes]:
        with closing(Disk(tmp_path, 1 << 40)) as disk:
            return {row.label.key for row in disk.catalog.rows() if row.pinned}

    with started(tmp_path, **more) as runtime:
        runtime.stored.pin(say(runtime, LONG).entries[24].id, None)
    before = pinned()
    if late:
        monkeypatch.setattr(upkeep, "AT_ONCE", -1)
        monkeypatch.setattr(write_behind, "BACKLOG", 0)
    with started(tmp_path, **more) as runtime:
        ask(runtime, [user(LONG + "and so on, much longer. " * 30)], max_tokens=1)
        wait_until(lambda: runtime.scheduler.idle and not any(slot.dirty for slot in runtime.scheduler.slots))
        wait_until(lambda: not runtime.cache.store.offload.pending_notices)
        longest = max(runtime.stored.all(), key=lambda chain: chain.tokens)
        with pytest.raises(Conflict):
            runtime.stored.pin(longest.id, None)
    assert len(before) == 25
    assert pinned() == before


@pytest.mark.parametrize("how", ["damaged", "removed"])
def test_a_server_hears_of_a_deletion_in_a_catalogue_that_was_replaced(tmp_path: Path, how: str) -> None:
    """It looked at the old one until it wrote again, and served what was deleted from its memory."""
    with started(tmp_path) as runtime:
        say(runtime, LONG)
        ask(runtime, [user(f"Another text, which takes the only slot. {LONG}")], max_tokens=1, salt="else")
        quiet(runtime)
        index = tmp_path / "index.sqlite"
        if how == "removed":
            for path in tmp_path.glob("index.sqlite*"):
                path.unlink()
        else:
            with closing(sqlite3.connect(index)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
                (page,) = connection.execute("PRAGMA page_size").fetchone()
                (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'objects'").fetchone()
            with index.open("r+b") as file:
                file.seek((root - 1) * page)
                file.write(b"\xff" * 64)
        with pytest.raises(SystemExit) as left:
            main(["cache", "rm", "--all", "--cache-dir", str(tmp_path)])
        assert not left.value.code
        wait_until(lambda: not runtime.stored.all())
        assert ask(runtime, [user(LONG)], max_tokens=1).report.cached == 0
