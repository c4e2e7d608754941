"""The scheduler beside an engine that fails, and while it ends: nobody waits for ever, and one fault stays with one request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness import Pending, ask, check, request_of, user
from headstart.config import Settings
from headstart.errors import EngineError
from headstart.interfaces.engine import Logits, Step
from headstart.prefix_cache.blocks import Chain, last_block_boundary
from headstart.serving import scheduler, settle
from headstart.serving.job import Job
from headstart.serving.listener import NoListener
from headstart.serving.portions import LongWork
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
    wait_until(lambda: runtime.scheduler._calls._calls.qsize() == len(calls))
    ends = threading.Thread(target=runtime.close)
    ends.start()
    wait_until(lambda: runtime.scheduler._closed)
    goes.set()
    for thread in (*threads, ends):
        thread.join(60)
        assert not thread.is_alive()


def test_one_thread_at_a_time_works_after_the_end() -> None:
    """Fault: each caller did it on its own thread, and they met in what only the engine thread may touch (seed 18053437)."""
    runtime = started(FakeEngine())
    runtime.close()
    inside = list[int]()

    def work(pieces: int) -> LongWork[int]:
        for number in range(pieces):
            inside.append(number)
            time.sleep(0.0002)
            assert inside == [number], "another thread is at work"
            inside.clear()
            yield
        return pieces

    found = list[int]()

    def call() -> None:
        for number in range(10):
            found.append(runtime.scheduler.carry_out(work(10 + number)).result(60) - number)
            found.append(runtime.scheduler.call(lambda: len(inside)).result(60))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0] * 40 + [10] * 40


class Counting(FakeEngine):
    """It keeps the sizes of its prefill calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sizes = list[int]()

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        self.sizes.append(len(tokens))
        super().prefill(slot, tokens, logits=logits)


@pytest.mark.parametrize("reuse", ["exact", "fast"])
def test_a_tail_that_fills_a_block_is_computed_with_the_blocks_before_it(reuse: Any) -> None:
    """The blocks are canonical then, and the pace is that of whole blocks."""
    engine = Counting(slots=1, ctx=1024, block_size=8, batch=64, least_filling=4)
    with Runtime(lambda: engine, Settings(reuse=reuse, memory_budget=1 << 20, settle="off")) as runtime:
        ask(runtime, [user("The first calls of a server are small.")], max_tokens=1)
        for text, due in (("a" * 28, [28]), ("b" * 27, [24, 3]), ("c" * 32, [32]), ("d" * 68, [64, 4]), ("e" * 60, [60])):
            engine.sizes.clear()
            prompt = runtime.text_prompt(text)
            assert len(prompt.tokens) == len(text)
            Pending(runtime, request_of(prompt, max_tokens=1)).answer()
            assert engine.sizes == due
            slot = runtime.scheduler.slots[0]
            assert (slot.canonical, len(slot)) == (last_block_boundary(len(text), 8), len(text))
        check(runtime)


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


class Stuck(FakeEngine):
    """When a step of decoding fails, slots cannot be emptied for some calls."""

    stuck = 5
    refusals = 0

    def decode(self, steps: Sequence[Step]) -> None:
        try:
            super().decode(steps)
        except EngineError:
            self.refusals = self.stuck
            raise

    def truncate(self, slot: int, length: int) -> None:
        if self.refusals and not length:
            self.refusals -= 1
            raise RuntimeError("no memory")
        super().truncate(slot, length)


def test_a_slot_that_cannot_be_emptied_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: the scheduler ended, and took in requests that nobody answered."""
    engine = Stuck(slots=2, ctx=256)
    runtime = started(engine)
    try:
        wanted = Pending(runtime, request_of(runtime.text_prompt("A question"), keep_logits=True)).answer()
        engine.fail_next("decode")
        with pytest.raises(EngineError):
            Pending(runtime, request_of(runtime.text_prompt("Another question"), max_tokens=9)).answer()
        while engine.refusals:
            with suppress(EngineError):
                Pending(runtime, request_of(runtime.text_prompt("Another question"), max_tokens=9)).answer()
        again = Pending(runtime, request_of(runtime.text_prompt("A question"), keep_logits=True)).answer()
        assert again.text == wanted.text
        assert again.logits is not None
        assert wanted.logits is not None
        assert again.logits.tobytes() == wanted.logits.tobytes()
        wait_until(lambda: not any(slot.busy for slot in runtime.scheduler.slots))
        check(runtime)
    finally:
        runtime.close()
    assert "emptying a slot failed" in caplog.text


def test_idle_slots_that_could_not_be_emptied_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: nothing tried it before the next request, and settling gave its turns up with an internal error."""
    monkeypatch.setattr(scheduler, "IDLE_POLL", 0.01)
    monkeypatch.setattr(settle, "AFTER", 0.05)
    engine = Stuck(slots=2, ctx=1024)
    engine.stuck = 9
    with Runtime(lambda: engine, Settings(memory_budget=1 << 20, reuse="exact")) as runtime:
        ask(runtime, [user("A question that is long enough to be settled")])
        engine.fail_next("decode")
        with pytest.raises(EngineError):
            ask(runtime, [user("Another question")])
        wait_until(lambda: not (engine.refusals or runtime.scheduler._lost))
        wait_until(lambda: runtime.scheduler.idle)
        assert not any(slot.busy for slot in runtime.scheduler.slots)
        assert runtime.scheduler.settle.counters["turns"] == 1
    assert "settling failed" not in caplog.text


class Deaf(NoListener):
    """It cannot hear of some requests."""

    fails = 0

    def arrived(self, job: Job, available: Callable[[Chain], int]) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError


def test_a_request_that_cannot_be_queued_fails_alone() -> None:
    """Fault: all others failed with it, and its place in the queue was never free again."""
    deaf = Deaf()
    runtime = Runtime(lambda: FakeEngine(slots=2, ctx=1024, delay=0.005), Settings(queue=1), listener=deaf)
    try:
        other = Pending(runtime, request_of(runtime.text_prompt("Another one"), max_tokens=100, ignore_eos=True))
        other.until(Started)
        deaf.fails = 3
        for _ in range(3):
            with pytest.raises(EngineError, match="the log says which"):
                Pending(runtime, request_of(runtime.text_prompt("A question"))).answer()
            wait_until(lambda: runtime.scheduler.queued == 0)
        assert other.answer().report.completion == 100
        assert Pending(runtime, request_of(runtime.text_prompt("A question"))).answer().report.completion
    finally:
        runtime.close()
