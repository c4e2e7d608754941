"""The source of a real runtime keeps nothing of what it heard once nobody reads."""

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
