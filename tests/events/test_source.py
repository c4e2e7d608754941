"""The source of a real runtime: what is evicted next and why, what has ended, and that it keeps nothing."""

from __future__ import annotations

import time

from harness import ask, user
from headstart.config import Settings
from headstart.events.source import RuntimeSource, SlotState
from headstart.interfaces.generation import GenerationParams
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import wait_until
from remains import kept, mark, marked


def test_it_says_why_an_entry_is_evicted_next() -> None:
    settings = Settings(memory_budget=1 << 16, tenant_memory=1 / 16)
    with Runtime(lambda: FakeEngine(slots=1, ctx=512), settings) as runtime:
        store, source = runtime.cache.store, RuntimeSource(runtime)
        ask(runtime, [user("Many words, one after the other. " * 9)], max_tokens=2, salt="large")
        ask(runtime, [user("Few words.")], max_tokens=2, salt="small")
        large, small = runtime.owner("large"), runtime.owner("small")
        wait_until(lambda: len(source.soon(16)) == 2)
        assert {*store.memory.quota.over()} == {large}
        found = [(entry.owner, why) for key, why in source.soon(16) if (entry := store.index.get(key)) is not None]
        assert found == [(large, "over_quota"), (small, "least_value")], "one leaf each; those above their quota go first"
        assert source.soon(1) == source.soon(16)[:1]
        store.terms.before = store.wall()
        assert {why for _, why in source.soon(16)} == {"expired"}


def test_it_knows_what_ended_before_anybody_listened() -> None:
    with Runtime(lambda: FakeEngine(slots=2, ctx=512), Settings(memory_budget=1 << 20)) as runtime:
        source = RuntimeSource(runtime)
        assert source.past() == []
        before = time.time()
        finish = ask(runtime, [user("One, two.")], max_tokens=2, salt="alice", id="first").finish
        ask(runtime, [user("Three.")], max_tokens=2, salt="alice", id="second", choices=2)
        wait_until(lambda: len(source.past()) == 3)
        first, *both = source.past()
        assert (first.id, first.owner, first.choice, first.report) == ("first", runtime.owner("alice"), 0, finish.report)
        assert before <= first.at <= both[0].at <= time.time()
        assert {(one.id, one.choice) for one in both} == {("second", 0), ("second", 1)}


def test_a_prefill_says_how_long_it_still_takes() -> None:
    """As long a token as so far, from the first call of the engine on; a restore before it does not count."""
    with Runtime(lambda: FakeEngine(slots=1, ctx=2048, delay=0.01), Settings(memory_budget=1 << 20)) as runtime:
        source, found = RuntimeSource(runtime), list[SlotState]()

        def look() -> bool:
            found.extend(source.slots())
            return found[-1].state == "reply"

        handle = runtime.submit(Request(runtime.text_prompt("x " * 800), GenerationParams(max_tokens=40)), lambda event: None)
        wait_until(look)
        handle.cancel()
        prefills = [one for one in found if one.state == "prefill"]
        assert all(one.left is None for one in found if one.state != "prefill")
        assert any(one.left for one in prefills)
        job = prefills[-1].job
        assert job is not None
        assert job.computed == len(job.chain)
        begun, ended = job.prefilled
        assert 0 < ended - begun <= job.first - job.started
        assert job.prefill_left(len(job.chain)) == ended - begun


def test_without_explaining_nothing_is_known_of_the_past() -> None:
    with Runtime(FakeEngine, Settings(memory_budget=1 << 20, explain="off")) as runtime:
        ask(runtime, [user("One, two.")], max_tokens=2)
        assert RuntimeSource(runtime).past() == []


def test_nothing_is_kept_of_what_nobody_took() -> None:
    with Runtime(lambda: FakeEngine(slots=1, ctx=512), Settings(memory_budget=1 << 20)) as runtime:
        source = RuntimeSource(runtime)
        source.open()
        ask(runtime, [user(marked(0))], max_tokens=2)
        wait_until(lambda: not runtime.scheduler.slots[0].dirty)
        assert kept(source._tap, [mark(0)])
        source.close()
        assert not kept(source._tap, [mark(0)])
        assert source.news() == []
