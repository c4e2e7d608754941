"""The scheduler beside an engine that fails, and while it ends: nobody waits for ever, and one fault stays with one request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from harness import Pending, check, request_of
from headstart.config import Settings
from headstart.errors import EngineError
from headstart.interfaces.engine import Logits
from headstart.serving.request import Finished, Started
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import wait_until


def started(engine: FakeEngine) -> Runtime:
    return Runtime(lambda: engine, Settings(memory_budget=1 << 20, settle="off"))


def test_who_calls_just_before_the_end_is_answered() -> None:
    """The loop ended with its step, and the caller waited for ever."""
    engine = FakeEngine(slots=2, ctx=4096)
    runtime = started(engine)
    goes, inside = threading.Event(), threading.Event()
    real = engine.prefill

    def prefill(*arguments: Any, **options: Any) -> None:
        inside.set()
        goes.wait(60)
        real(*arguments, **options)

    engine.prefill = prefill  # type: ignore[method-assign]
    Pending(runtime, request_of(runtime.text_prompt("x" * 500), max_tokens=4))
    assert inside.wait(60)
    calls: list[Callable[[], object]] = [lambda: runtime.erase(1), lambda: runtime.with_deletions(lambda _: None)]
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    wait_until(lambda: runtime.scheduler._calls.qsize() == len(calls))
    ends = threading.Thread(target=runtime.close)
    ends.start()
    wait_until(lambda: runtime.scheduler._closed)
    goes.set()
    for thread in (*threads, ends):
        thread.join(60)
        assert not thread.is_alive()


class Faulty(FakeEngine):
    """One of its calls fails once."""

    fault = ""
    at = 0  # in this slot

    def _meet(self, call: str, slot: int) -> None:
        if (self.fault, self.at) == (call, slot):
            self.fault = ""
            raise EngineError(f"simulated: {call}")

    def truncate(self, slot: int, length: int) -> None:
        if length:
            self._meet("truncate", slot)
        super().truncate(slot, length)

    def logits(self, slot: int) -> Logits:
        self._meet("logits", slot)
        return super().logits(slot)


@pytest.mark.parametrize("fault", ["truncate", "logits"])
def test_a_fault_of_one_reply_stays_with_it(fault: str) -> None:
    """All other requests failed too, and all slots were emptied."""
    engine = Faulty(slots=2, ctx=1024, delay=0.005)
    runtime = started(engine)
    try:
        options: dict[str, Any] = {"max_tokens": 40, "keep_logits": False}
        said = Pending(runtime, request_of(runtime.text_prompt("A question"), **options)).answer().text
        other = Pending(runtime, request_of(runtime.text_prompt("Another one"), max_tokens=200, ignore_eos=True))
        other.until(Started)
        engine.at = next(slot.number for slot in runtime.scheduler.slots if not slot.busy)
        if fault == "truncate":
            one = Pending(runtime, request_of(runtime.text_prompt("A question"), stop=(said[3:5],), **options))
            one.until(Started)
            engine.fault = fault
            assert isinstance(one.until(Finished), Finished)
        else:
            engine.fault = fault
            scored = request_of(runtime.text_prompt("A question"), prompt_logprobs=0, **options)
            with pytest.raises(EngineError, match="simulated"):
                Pending(runtime, scored).answer()
        assert not engine.fault
        assert other.answer().report.completion == 200
        time.sleep(0.05)
        check(runtime)
    finally:
        runtime.close()
