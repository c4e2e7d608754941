"""The tap of a real runtime: each request in its stages, each entry, and nothing lost unnoticed."""

from __future__ import annotations

from harness import ask, user
from headstart.config import Settings
from headstart.events.tap import JobNews, News, Tap
from headstart.prefix_cache.entry import Entry
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import wait_until


def test_it_hears_requests_and_entries_as_long_as_it_listens() -> None:
    tap, found = Tap(), list[News]()
    with Runtime(lambda: FakeEngine(slots=1), Settings(memory_budget=1 << 20)) as runtime:
        ask(runtime, [user("Before.")], max_tokens=2)
        wait_until(lambda: bool(runtime.cache.memory) and not runtime.scheduler.slots[0].dirty)
        before = [*runtime.listen(tap)]
        assert before
        ask(runtime, [user("Roses.")], max_tokens=2)

        def heard() -> bool:
            found.extend(tap.drain() or ())
            return any(isinstance(one, Entry) for one in found)

        wait_until(heard)
        stages = [one.stage for one in found if isinstance(one, JobNews)]
        assert stages == ["queued", "prefill", "reply", "length"]
        assert not {id(entry) for entry in before} & {id(one) for one in found if isinstance(one, Entry) and not one.copies}
        runtime.unlisten(tap)
        ask(runtime, [user("After.")], max_tokens=2)
        wait_until(lambda: not runtime.scheduler.slots[0].dirty)
        assert tap.drain() == []


def test_too_many_news_are_lost_as_a_whole() -> None:
    tap = Tap(most=4)
    for _ in range(4):
        tap.pinned(())
    assert tap.drain() == [frozenset()] * 4
    for _ in range(5):
        tap.pinned(())
    assert tap.drain() is None
    assert tap.drain() == []
