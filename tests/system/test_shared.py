"""Two servers and one shared store: what one has computed, the other does not compute."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import Answer, ask, assistant, check, submit, system, user
from headstart.errors import ConfigError, Unavailable
from headstart.serving.runtime import SHARED_SHARE, Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.shared import tier as shared_tier
from headstart.tiers.shared.keys import FleetKeys
from live import wait_until
from sharing import BLOCK_SIZE, DELAY, answer, chat, cold, same, start, stored
from stores import ValkeyServer

pytestmark = pytest.mark.usefixtures("brisk")


@pytest.fixture
def store(tmp_path: Path, patient: None) -> str:
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store"


def objects(tmp_path: Path) -> list[Path]:
    """The stored entries, without the cards of servers."""
    found = [path for kind in ("kv", "state") for path in (tmp_path / "store").glob(f"hs1/*/{kind}/**/*")]
    return sorted(path for path in found if path.is_file())


def test_a_prompt_that_another_server_has_computed_is_not_computed(store: str, key_file: Path) -> None:
    with start(store, key_file) as one, start(store, key_file) as other:
        first = answer(one, "Hello, who are you?")
        assert first.report.computed == first.report.prompt
        stored(one)
        second = answer(other, "Hello, who are you?")
        same(second, first)
        assert second.report.tiers["shared"] == second.report.prompt - second.report.computed
        assert second.report.computed <= BLOCK_SIZE
        again = answer(other, "Hello, who are you?")
        assert "shared" not in again.report.tiers
        check(other)


@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
def test_conversations_move_and_nobody_computes_twice(store: str, key_file: Path, sliceable: bool) -> None:
    """Aim: at most the new message and 64 tokens. Each turn is asked at the other server; a third one computes cold."""

    def engine() -> FakeEngine:
        return FakeEngine(slots=1, ctx=1024, block_size=BLOCK_SIZE, sliceable=sliceable, delay=DELAY)

    with start(store, key_file, engine=engine) as one, start(store, key_file, engine=engine) as other, cold(engine) as alone:
        messages = chat("Tell me of the house.")
        for turn, rt in enumerate((one, other, one, other, one)):
            found = ask(rt, messages, max_tokens=12, keep_logits=True)
            same(found, ask(alone, messages, max_tokens=12, keep_logits=True))
            new = len(messages[-1]["content"]) + 40  # the template's words
            if turn:
                assert found.report.computed <= new + 64
                assert found.report.tiers["shared"] > 0
            messages = [*messages, assistant(found.text), user(f"And what of its room {turn}?")]
            stored(rt)
        for rt in (one, other):
            check(rt)
            assert not [name for name in rt.cache.shared.counters if name.startswith("fault")]


def test_only_canonical_entries_leave_the_machine(tmp_path: Path, store: str, key_file: Path) -> None:
    """Fast mode reuses derived KV too, and a reply's KV is derived here until the turn is settled."""
    with start(store, key_file, reuse="fast", settle="off") as one:
        answer(one, "Hello, who are you?")
        stored(one)
        canonical = {entry.id for entry in one.cache.index if entry.canonical and len(entry.tokens) == BLOCK_SIZE}
        derived = [entry for entry in one.cache.index if not entry.canonical]
        assert derived
        assert one.cache.shared.counters["saved"] == len(canonical)
    assert len(objects(tmp_path)) == len(canonical)


def test_tenants_share_nothing(store: str, key_file: Path) -> None:
    with start(store, key_file) as one, start(store, key_file) as other:
        ask(one, chat("Hello?"), salt="anna")
        stored(one)
        assert ask(other, chat("Hello?"), salt="berta").report.computed == ask(one, chat("Hello?"), salt="carl").report.prompt
        assert ask(other, chat("Hello?"), salt="anna").report.tiers["shared"] > 0


def test_without_a_key_file_a_store_is_refused(store: str) -> None:
    with pytest.raises(ConfigError, match="headstart fleet keygen"):
        start(store, None)  # type: ignore[arg-type]


def test_what_is_only_read_is_never_written(tmp_path: Path, store: str, key_file: Path) -> None:
    with start(store, key_file, shared_mode="read") as one:
        answer(one, "Hello?")
        stored(one)
    assert not objects(tmp_path)


@pytest.mark.parametrize("spoil", ["truncated", "altered", "swapped", "gone", "foreign key"])
def test_a_bad_object_is_a_counted_miss(tmp_path: Path, store: str, key_file: Path, spoil: str) -> None:
    """Fault: a poisoned, truncated, misplaced or evicted object changes an answer, or fails a request."""
    with start(store, key_file) as one:
        first = answer(one, "Hello, who are you?")
        stored(one)
        saved = one.cache.shared.counters["saved"]
    there = objects(tmp_path)
    assert len(there) == saved
    if spoil == "foreign key":
        FleetKeys(FleetKeys.load(key_file).name_key, FleetKeys.generate().secrets).save(key_file, replace=True)
    before = b""
    for number, path in enumerate(there):
        data = bytearray(path.read_bytes())
        if spoil == "truncated":
            path.write_bytes(data[: len(data) // 2])
        elif spoil == "altered":
            data[-40 - number] ^= 1
            path.write_bytes(data)
        elif spoil == "swapped" and number:
            path.write_bytes(before)
        elif spoil == "gone" and number % 2:
            path.unlink()
        before = path.read_bytes() if path.exists() else b""
    with start(store, key_file) as other:
        second = answer(other, "Hello, who are you?")
        same(second, first)
        counters = other.cache.shared.counters
        assert second.report.computed > BLOCK_SIZE
        if spoil != "gone":
            faults = sum(count for name, count in counters.items() if name.startswith("fault_"))
            assert faults >= 1, counters  # on a busy machine it asks once more
            stored(other)
            with start(store, key_file) as third:  # the bad objects were replaced by good ones
                assert answer(third, "Hello, who are you?").report.computed <= BLOCK_SIZE
        check(other)


def test_several_requests_for_one_prompt_fetch_it_once(store: str, key_file: Path) -> None:
    with start(store, key_file) as one, start(store, key_file) as other:
        answer(one, "Hello, who are you?")
        stored(one)
        pending = [submit(other, chat("Hello, who are you?")) for _ in range(4)]
        reports = [waits.answer().report for waits in pending]
        assert other.cache.shared.counters["fetched"] == (reports[0].prompt - 1) // BLOCK_SIZE
        assert all(report.computed <= BLOCK_SIZE for report in reports)


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(key_file: Path, valkey: ValkeyServer) -> None:
    with start(valkey.url, key_file) as one:
        answer(one, "Hello, who are you?")
        stored(one)
    with start(valkey.url, key_file) as other:
        valkey.hang()
        waits = submit(other, chat("Hello, who are you?"))
        waits.handle.cancel()
        until = time.monotonic() + 10
        while other.scheduler.queued:
            assert time.monotonic() < until
            time.sleep(0.005)
        valkey.go_on()
        assert answer(other, "Hello, who are you?").report.prompt
        check(other)


def test_a_store_that_hangs_or_dies_holds_nobody_up(key_file: Path, valkey: ValkeyServer) -> None:
    """Requests are computed; the breaker opens; and when the store is back, it is used again."""
    with start(valkey.url, key_file) as one, start(valkey.url, key_file) as other:
        first = [answer(one, f"Hello {number}") for number in range(5)]
        stored(one)
        valkey.hang()
        for number in range(3):
            same(answer(other, f"Hello {number}"), first[number])
        assert not other.cache.shared._link.breaker.closed  # type: ignore[attr-defined]
        same(answer(other, "Hello 3"), first[3])
        valkey.go_on()
        valkey.kill()
        same(answer(other, "Hello 4"), first[4])
        valkey.start()
        until = time.monotonic() + 30
        number = 10
        while "shared" not in answer(other, f"Hello again {number}").report.tiers:
            assert time.monotonic() < until, other.cache.shared.counters
            number += 1
            answer(one, f"Hello again {number}")
            time.sleep(0.1)
        check(other)


def test_what_only_this_server_has_is_stored_when_it_stops(key_file: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store like S3 gets what is reused, and everything when a server leaves."""
    monkeypatch.setitem(shared_tier.SAVES, "file", shared_tier.Saves(frozenset({"reused", "leaving"})))
    with start(store, key_file) as one:
        answer(one, "Hello, who are you?")
        stored(one)
        assert one.cache.shared.counters["saved"] == 0
        answer(one, "Hello, who is there?")
        stored(one)
        reused = one.cache.shared.counters["saved"]
        assert reused > 0
    assert one.cache.shared.counters["saved"] > reused
    with start(store, key_file) as other:
        assert answer(other, "Hello, who are you?").report.computed <= BLOCK_SIZE


def test_what_is_deleted_is_deleted_in_the_store_too(tmp_path: Path, key_file: Path, store: str) -> None:
    """But not what another chain needs."""
    with start(store, key_file) as one:
        for words in ("Name all rivers of the north.", "Name all mountains of the south."):
            answer(one, words)
        stored(one)
        before = objects(tmp_path)
        first, second = one.stored.all()
        shared = {*first.entries} & {*second.entries}
        assert shared
        one.stored.delete(first.id, first.owner)
        left = objects(tmp_path)
        assert len(before) > len(left) >= len(shared)
    with start(store, key_file) as other:
        assert answer(other, "Name all mountains of the south.").report.tiers.get("shared", 0) > 0
        assert answer(other, "Name all rivers of the north.").report.tiers.get("shared", 0) <= len(shared) * BLOCK_SIZE


def test_who_deletes_hears_that_the_store_failed(key_file: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(valkey.url, key_file) as runtime:
        answer(runtime, "Name all rivers of the north.")
        stored(runtime)
        (chain,) = runtime.stored.all()
        valkey.kill()
        with pytest.raises(Unavailable, match="deleted here, but not there"):
            runtime.stored.delete(chain.id, None)
        assert runtime.stored.all() == []


def test_memory_that_is_too_small_for_the_prompt_computes_the_rest(store: str, key_file: Path) -> None:
    with start(store, key_file) as one, start(store, key_file, memory_budget=4096) as other:
        first = answer(one, "Hello, who are you?")
        stored(one)
        same(answer(other, "Hello, who are you?"), first)
        check(other)


def test_a_prompt_that_nearly_fills_the_memory_is_fetched_whole(store: str, key_file: Path) -> None:
    """Fault: fetched entries had at most half of the memory, so the rest of a long prompt was computed."""
    with start(store, key_file) as one:
        first = answer(one, "Hello, who are you?")
        stored(one)
        with start(store, key_file, memory_budget=nearly(one, first)) as other:
            ask(other, [user("Something else. " * 8)], max_tokens=4)
            stored(other)  # what is being written stays in memory
            again = answer(other, "Hello, who are you?")
            same(again, first)
            assert again.report.computed <= BLOCK_SIZE
            check(other)


def test_the_beginning_of_a_prompt_stays_while_the_rest_is_fetched(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    """Fault: the beginning of a prompt was in memory, and was evicted by its rest, which then was of no use."""
    with start(valkey.url, key_file) as one, start(valkey.url, key_file) as other:
        answer(one, "Hello, who are you?")
        stored(one)
        ask(other, chat("")[:1], max_tokens=1)
        stored(other)
        valkey.hang()
        waits = submit(other, chat("Hello, who are you?"), max_tokens=4)
        wait_until(lambda: any(entry.holds for entry in other.cache.index), 20)
        valkey.go_on()
        report = waits.answer().report
        assert report.tiers["memory"] > 0
        assert report.computed <= BLOCK_SIZE
        stored(other)
        assert not any(entry.holds for entry in other.cache.index)
        check(other)


def test_what_is_fetched_is_joined_with_what_is_live(store: str, key_file: Path) -> None:
    """Fault: a conversation came back to a server that had its first turns live, and no more in memory. What was fetched beyond
    them could not be used, and was computed again."""
    more = [*chat("Hello, who are you?"), assistant("Somebody. " * 10), user("Go on.")]
    with start(store, key_file) as one, start(store, key_file) as other:
        answer(one, "Hello, who are you?")
        stored(one)
        second = ask(other, more, max_tokens=4, keep_logits=True)
        stored(other)
        budget, memory = one.cache.store.memory_budget, one.cache.store.memory
        assert second.report.tiers["shared"] > 0
        here = [entry for entry in one.cache.index if memory.name in entry.copies]
        one.scheduler.call(lambda: [budget.drop(entry) for entry in here]).result()
        third = ask(one, more, max_tokens=4, keep_logits=True)
        same(third, second)
        assert third.report.tiers["shared"] > 0
        assert third.report.computed <= BLOCK_SIZE
        check(one)


@pytest.mark.parametrize("share", [1.2, 1.6, 2.1])
def test_a_fetched_prompt_leaves_room_for_the_buffer_by_which_it_is_loaded(store: str, key_file: Path, share: float) -> None:
    """Fault: all of the memory was pinned for a prompt, so the engine's buffer did not fit, and nothing was loaded."""
    with start(store, key_file) as one:
        first = answer(one, "Hello, who are you?")
        stored(one)
        kv, shape = one.cache.store.memory.cell_bytes // BLOCK_SIZE, one.engine.shape
        engine = FakeEngine(slots=2, ctx=512, block_size=BLOCK_SIZE, delay=DELAY, transfer_bytes=shape.ctx * kv)
        budget = int(first.report.prompt * kv * share)
        with start(store, key_file, engine=lambda: engine, memory_budget=budget) as other:
            ask(other, [user("Something else. " * 8)], max_tokens=4)
            stored(other)  # what is being written is pinned too
            again = answer(other, "Hello, who are you?")
            same(again, first)
            fits = min(1.0, share / 2)
            assert again.report.computed <= (1 - fits) * first.report.prompt + 6 * BLOCK_SIZE
            check(other)


def nearly(rt: Runtime, answered: Answer) -> int:
    """A memory budget for little more than one prompt."""
    return answered.report.prompt // BLOCK_SIZE * rt.cache.store.memory.cell_bytes * 3 // 2


def test_prompts_that_do_not_fit_into_memory_together_are_fetched_one_after_the_other(store: str, key_file: Path) -> None:
    """Fault: when memory was full of what others had fetched, all of a prompt was computed."""
    with start(store, key_file) as one:
        rules = "You answer in the words of the house. " * 5
        chats = [[system(f"House {number}. {rules}"), user("Hello")] for number in range(4)]
        firsts = [ask(one, chat, max_tokens=4, keep_logits=True) for chat in chats]
        stored(one)
        with start(store, key_file, memory_budget=nearly(one, firsts[0])) as other:
            with ThreadPoolExecutor() as pool:
                answers = list(pool.map(lambda chat: ask(other, chat, max_tokens=4, keep_logits=True), chats))
            for again, first in zip(answers, firsts, strict=True):
                same(again, first)
                # What others hold when a prompt's turn comes is not there for it: some of its last blocks may be computed.
                assert again.report.computed < first.report.prompt // 2
            check(other)


def test_a_prompt_that_is_longer_than_the_queue_is_stored_whole(store: str, key_file: Path) -> None:
    """Fault: what did not fit into the queue at once was given up, so the store had the first part of a long prompt only."""
    with start(store, key_file, memory_budget=24 << 10) as one, start(store, key_file) as other:
        first = answer(one, "Hello, who are you?")
        blocks = first.report.prompt // BLOCK_SIZE
        assert blocks * one.cache.store.memory.cell_bytes > SHARED_SHARE * one.cache.store.memory.budget
        wait_until(lambda: one.cache.shared.counters["saved"] >= blocks, 20)
        assert one.cache.store.shared_offer.later == 0
        again = answer(other, "Hello, who are you?")
        same(again, first)
        assert again.report.computed <= BLOCK_SIZE


def test_others_get_a_prompt_while_its_reply_runs(key_file: Path, valkey: ValkeyServer, patient: None) -> None:
    """Fault: KV of a busy slot was saved after five seconds, so who began alike meanwhile computed it again."""
    long = FakeEngine(slots=2, ctx=2048, block_size=BLOCK_SIZE, delay=DELAY)
    with start(valkey.url, key_file, engine=lambda: long) as one, start(valkey.url, key_file) as other:
        first = submit(one, chat("Hello, who are you?"), max_tokens=10_000, ignore_eos=True)
        blocks = len(first.request.prompt.tokens) // BLOCK_SIZE
        wait_until(lambda: one.cache.shared.counters["saved"] >= blocks, 4)
        assert answer(other, "Hello, who are you?").report.computed <= BLOCK_SIZE
        assert any(slot.busy for slot in one.scheduler.slots)
        first.handle.cancel()


def test_nothing_of_it_is_loaded_without_a_store() -> None:
    code = (
        "import sys, headstart.serving.runtime as r\n"
        "from headstart.config import Settings\n"
        "from headstart.testing.fake_engine import FakeEngine\n"
        "r.Runtime(lambda: FakeEngine(), Settings(memory_budget=0)).close()\n"
        "print([name for name in sys.modules if name.startswith(('headstart.tiers.shared.', 'valkey', 'obstore'))])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
