"""The source of a real runtime: what is evicted next, and why; and it keeps nothing once nobody reads."""

from __future__ import annotations

from harness import ask, user
from headstart.config import Settings
from headstart.events.source import RuntimeSource
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import wait_until
from remains import kept, mark, marked


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
