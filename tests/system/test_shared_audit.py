"""The shared audit: an idle server computes some fetched blocks again. What is wrong goes, and what was deleted stays away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import Answer, Pending, ask, assistant, check, request_of, user
from headstart.errors import EngineError
from headstart.interfaces.engine import Span
from headstart.interfaces.tokens import Tokens
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.serving import shared_audit
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.shared import reading, writing
from headstart.tiers.shared import tier as shared_tier
from headstart.tiers.shared.folder import FolderStore
from headstart.tiers.shared.store import StoreError
from live import wait_until
from sharing import BLOCK_SIZE, DELAY, answer, chat, cold, same, start, stored

pytestmark = pytest.mark.usefixtures("brisk")

HELLO = "Hello, who are you?"


@pytest.fixture
def store(tmp_path: Path, patient: None) -> str:
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store"


@pytest.fixture(autouse=True)
def _all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_audit, "PORTION", 1.0)
    monkeypatch.setattr(shared_audit, "MOST", 1000)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No server has time to check anything until this is set."""
    free = threading.Event()
    pending = property(lambda audit: free.is_set() and bool(audit._tasks))
    monkeypatch.setattr(shared_audit.SharedAudit, "pending", pending)
    return free


def audited(rt: Runtime) -> None:
    """Waits until all blocks were checked."""
    wait_until(lambda: rt.scheduler.idle and not rt.scheduler.shared_audit.pending)


def texts(rt: Runtime) -> set[str]:
    return {bytes(entry.tokens.tolist()).decode() for entry in rt.cache.index}


class Broken(FakeEngine):
    """A server whose memory changes one byte of each block that it saves at `at`."""

    at = 0

    def export_kv(self, slot: int, spans: Sequence[Span]) -> None:
        super().export_kv(slot, spans)
        for span in spans:
            if span.start == self.at:
                span.data[-1] ^= 1


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
def test_what_was_computed_behind_a_wrong_block_leaves_the_store(
    store: str, key_file: Path, sliceable: bool, fails: bool, busy: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the wrong block was deleted there. Servers went on with what this one had computed behind it, and had stored as its
    own: other bits than those of a cold run. The store may also fail just then."""
    shape: dict[str, Any] = {"slots": 1, "ctx": 512, "block_size": BLOCK_SIZE, "delay": DELAY, "sliceable": sliceable}
    monkeypatch.setattr(shared_tier, "MISSING", 0.05)
    monkeypatch.setattr(writing, "LOOK", 0.05)
    with cold(lambda: FakeEngine(**shape)) as alone:
        first = answer(alone, HELLO)
        more = [*chat(HELLO), assistant(first.text), user("What else do you know of the house, and of all its rooms? " * 2)]
        right = ask(alone, more, max_tokens=4, keep_logits=True)
    monkeypatch.setattr(Broken, "at", (first.report.prompt - 1) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE)
    with start(store, key_file, engine=lambda: Broken(**shape), settle="off") as one:
        answer(one, HELLO)
        stored(one)
    with start(store, key_file, engine=lambda: FakeEngine(**shape), settle="off") as other:
        ask(other, more, max_tokens=4)
        stored(other)
        counters, delete, failed = other.cache.shared.counters, FolderStore.delete, list[object]()

        def refused(folder: FolderStore, names: Sequence[str]) -> None:
            if fails and not failed:
                failed.append(names)
                raise StoreError("refused", "not now")
            delete(folder, names)

        monkeypatch.setattr(FolderStore, "delete", refused)
        busy.set()
        other.scheduler.wake()
        wait_until(lambda: counters["fault_differs"] == 1 and counters["erased"] > 2)
        assert bool(failed) == fails
        monkeypatch.setattr(shared_audit, "PORTION", 0.0)
        with start(store, key_file, engine=lambda: FakeEngine(**shape), settle="off", shared_mode="read") as third:
            same(ask(third, more, max_tokens=4, keep_logits=True), right)
        ask(other, [user("Something else takes the slot.")], max_tokens=1)
        stored(other)
        time.sleep(0.1)
        same(ask(other, more, max_tokens=4, keep_logits=True), right)


@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
def test_a_wrong_block_of_another_server_is_found_and_named(
    store: str, key_file: Path, sliceable: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tag is right, because the server belongs to the fleet. All that follows it is computed again."""
    monkeypatch.setattr(Broken, "at", 5 * BLOCK_SIZE)
    shape: dict[str, Any] = {"slots": 1, "ctx": 512, "block_size": BLOCK_SIZE, "delay": DELAY, "sliceable": sliceable}
    with start(store, key_file, engine=lambda: Broken(**shape)) as one:
        answer(one, HELLO)
        stored(one)
    with start(store, key_file, engine=lambda: FakeEngine(**shape)) as other, cold(lambda: FakeEngine(**shape)) as alone:
        assert answer(other, HELLO).report.tiers["shared"] > 0
        audited(other)
        counters = other.cache.shared.counters
        assert counters["fault_differs"] == 1, counters
        assert counters["audited"] >= 5
        assert "of server" in caplog.text
        same(answer(other, HELLO), answer(alone, HELLO))
        check(other)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_a_wrong_block_goes_though_it_is_pinned(
    tmp_path: Path, store: str, key_file: Path, disk: bool, busy: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed, and exact mode went on serving other bits than a cold run."""
    monkeypatch.setattr(Broken, "at", 5 * BLOCK_SIZE)
    folder = tmp_path / "cache" if disk else None
    shape: dict[str, Any] = {"slots": 1, "ctx": 512, "block_size": BLOCK_SIZE, "delay": DELAY}
    with start(store, key_file, engine=lambda: Broken(**shape)) as one:
        answer(one, HELLO)
        stored(one)
    with start(store, key_file, engine=lambda: FakeEngine(**shape), cache_dir=folder) as other:
        answer(other, HELLO)
        wait_until(lambda: other.scheduler.idle and not other.cache.store.offload.pending_notices)
        last = max((entry for entry in other.cache.index if entry.length == BLOCK_SIZE), key=lambda entry: entry.stop)
        wrong = next(entry for entry in other.cache.index if entry.start == 5 * BLOCK_SIZE)
        assert other.stored.pin(last.id, None).pinned
        busy.set()
        audited(other)
        assert other.cache.shared.counters["fault_differs"] == 1
        wait_until(lambda: other.cache.index.get(wrong.id) is not wrong)  # perhaps the right one, from the audit
        wait_until(lambda: wrong.id not in other.cache.store.barred and not other.cache.store.offload.pending_notices)
        ask(other, chat("Something else takes the slot."), max_tokens=1)
        with cold(lambda: FakeEngine(**shape)) as alone:
            same(answer(other, HELLO), answer(alone, HELLO))
        check(other)
    if disk:
        with (
            start(store, key_file, engine=lambda: FakeEngine(**shape), cache_dir=folder, shared_mode="read") as again,
            cold(lambda: FakeEngine(**shape)) as alone,
        ):
            same(answer(again, HELLO), answer(alone, HELLO))


class Failing(FakeEngine):
    """Its next call that needs no logits fails, and leaves nothing in the slot."""

    fails = False

    def prefill(self, slot: int, tokens: Tokens, *, logits: bool) -> None:
        if self.fails and not logits:
            self.fails = False
            self.truncate(slot, 0)
            raise EngineError("out of memory")
        super().prefill(slot, tokens, logits=logits)


def test_a_check_that_fails_leaves_no_slot_that_claims_what_it_has_not(store: str, key_file: Path) -> None:
    """The next prompt with the same beginning continued there: its reply was computed without that beginning."""
    beginning = "A beginning of 3 blocks."
    engine = Failing(slots=1, ctx=512, block_size=BLOCK_SIZE, delay=DELAY)

    def say(rt: Runtime, text: str) -> Answer:
        return Pending(rt, request_of(rt.text_prompt(beginning + text), max_tokens=4, keep_logits=True)).answer()

    with start(store, key_file, settle="off") as one:
        say(one, "One prompt goes on so.")
        stored(one)
    with (
        start(store, key_file, settle="off", engine=lambda: engine) as other,
        cold(lambda: FakeEngine(slots=1, ctx=512, block_size=BLOCK_SIZE)) as alone,
    ):
        picks = iter(range(1000))
        other.scheduler.shared_audit._chance = lambda: 0.0 if next(picks) == 3 else 1.0
        say(other, "One prompt goes on so.")
        engine.fails = True
        wait_until(lambda: not engine.fails)
        audited(other)
        assert [len(slot) for slot in other.scheduler.slots] == [engine.length(0)]
        same(say(other, "And another one so."), say(alone, "And another one so."))


def test_a_check_does_not_bring_back_what_was_deleted(
    tmp_path: Path, store: str, key_file: Path, busy: threading.Event
) -> None:
    """The server was busy for a while, and then computed the deleted chain again, and stored it everywhere."""
    with start(store, key_file) as one:
        answer(one, HELLO)
        stored(one)
    with start(store, key_file, cache_dir=tmp_path / "cache", settle="off") as other:
        answer(other, HELLO)
        wait_until(lambda: other.scheduler.idle and not other.cache.store.offload.pending_notices)
        last = max((entry for entry in other.cache.index if entry.length == BLOCK_SIZE), key=lambda entry: entry.stop)
        other.stored.delete(last.id, None)
        busy.set()
        audited(other)
        assert not other.cache.shared.counters["audited"]
        assert not texts(other)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The store sends four objects, and no more until this is set."""
    goes, real, calls = threading.Event(), reading.Reading._bring, list[int]()

    def bring(self: reading.Reading, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            goes.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(reading.Reading, "_bring", bring)
    monkeypatch.setattr(reading, "BATCH", 4)
    yield goes
    goes.set()


def test_a_preload_does_not_bring_back_what_was_deleted(store: str, key_file: Path, gate: threading.Event) -> None:
    """The rest of the chain came into memory, without its beginning."""
    with start(store, key_file) as one:
        prompt = ask(one, chat(HELLO), max_tokens=1).prompt
        stored(one)
    with start(store, key_file) as other:
        chain = Chain(root_id(other.engine.fingerprint, ""), BLOCK_SIZE, prompt)
        loading = threading.Thread(target=lambda: other.preload(iter([chain]), 60.0))
        loading.start()
        wait_until(lambda: len(other.cache.index) == 4)
        other.stored.delete(max(other.cache.index, key=lambda entry: entry.stop).id, None)
        gate.set()
        loading.join(60)
        assert not texts(other)


def test_what_is_not_the_same_each_time_is_not_shared(
    tmp_path: Path, store: str, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others would have compared it with theirs, and trusted this server no more."""
    engine = FakeEngine(slots=1, ctx=512, block_size=BLOCK_SIZE, canonical=False)
    with start(store, key_file, engine=lambda: engine, reuse="fast") as one:
        assert not one.cache.shared.on
        answer(one, HELLO)
    assert "nothing is shared" in caplog.text
    assert not list((tmp_path / "store").iterdir())
