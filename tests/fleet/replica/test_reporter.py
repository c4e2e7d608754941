"""Reports of a real runtime with the fake engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import Pending, request_of, submit, system, user
from headstart.config import Settings
from headstart.fleet.replica.journal import Journal
from headstart.fleet.replica.reporter import HEARTBEAT, REPEATED, RepeatedIds, Reporter
from headstart.fleet.replica.wire import decode, encode
from headstart.fleet.router.chains import PromptChain, block_key, chain_of
from headstart.fleet.router.reports import Load, Tier
from headstart.fleet.router.router import FleetRouter
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.disk import Label
from headstart.tiers.shared.keys import FleetKeys
from remains import Clock

BLOCK_SIZE = 8
WORDS = "and what of the harbour, the ships and all of the sailors? "


class Gated(FakeEngine):
    """While the gate is closed, a prefill call waits until it is let through."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"slots": 2, "ctx": 1024, "block_size": BLOCK_SIZE, **options})
        self._open = True
        self._let = threading.Semaphore(0)
        self._waiting = threading.Semaphore(0)

    def shut(self) -> None:
        self._open = False

    def open(self) -> None:
        self._open = True
        self._let.release()

    def pass_one(self) -> None:
        """Lets one call through, after it has come, and waits until the next one has come."""
        assert self._waiting.acquire(timeout=30)
        self._let.release()
        assert self._waiting.acquire(timeout=30)
        self._waiting.release()

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        if not self._open:
            self._waiting.release()
            assert self._let.acquire(timeout=30)
        super().prefill(slot, tokens, logits=logits)


class Replica:
    """A runtime, its reporter, and a router that hears the reports as bytes."""

    def __init__(self, epoch: int = 0, router: FleetRouter | None = None, **settings: Any) -> None:
        self.clock = Clock(0.0)
        self.journal = Journal(self.clock)
        given = {"memory_budget": 1 << 20, "settle": "off", **settings}
        self.runtime = Runtime(Gated, Settings(**given), listener=self.journal)
        self.reporter = Reporter(self.runtime, self.journal, "a", epoch=epoch, clock=self.clock)
        self.router = FleetRouter() if router is None else router

    @property
    def engine(self) -> Gated:
        assert isinstance(self.runtime.engine, Gated)
        return self.runtime.engine

    def tell(self) -> bool:
        """Whether there was something to say."""
        report = self.reporter.report()
        if report is not None:
            assert not self.router.report(decode(encode(report)), self.clock())
        return report is not None

    def chain(self, text: str) -> PromptChain:
        tokens = self.runtime.text_prompt(text).tokens
        return chain_of(root_id(self.runtime.engine.fingerprint, ""), BLOCK_SIZE, tokens)

    def send(self, text: str, id: str, **options: Any) -> Pending:
        return Pending(self.runtime, request_of(self.runtime.text_prompt(text), id=id, **{"max_tokens": 2, **options}))


@contextmanager
def replica(**options: Any) -> Iterator[Replica]:
    started = Replica(**options)
    try:
        yield started
    finally:
        started.engine.open()
        started.runtime.close()


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.001)


def quiet(one: Replica) -> None:
    wait_until(lambda: one.runtime.scheduler.idle and not any(slot.dirty for slot in one.runtime.scheduler.slots))
    wait_until(lambda: one.journal.queue.seconds(one.reporter._measured().prefill) == 0.0)
    wait_until(lambda: not one.journal._open)


def test_it_is_silent_while_nothing_happens() -> None:
    with replica() as one:
        first = one.reporter.report()
        assert first is not None
        assert (first.sequence, first.epoch, first.replica, first.dump) == (0, 0, "a", False)
        assert one.reporter.report() is None
        one.clock.now += HEARTBEAT / 2
        assert one.reporter.report() is None
        one.clock.now += HEARTBEAT / 2
        beat = one.reporter.report()
        assert beat is not None
        assert (beat.sequence, beat.speed, beat.added, beat.removed) == (1, first.speed, {}, {})
        one.send(WORDS, "").answer()
        quiet(one)
        news = one.reporter.report()
        assert news is not None
        assert news.added


def test_the_router_sends_a_prompt_to_whom_has_it() -> None:
    with replica() as one:
        one.send(WORDS, "1").answer()
        quiet(one)
        one.tell()
        chosen = one.router.choose("2", one.chain(WORDS + "And?"), 0.0)
        assert chosen is not None
        assert chosen.reused == len(WORDS) // BLOCK_SIZE * BLOCK_SIZE
        answer = one.send(WORDS + "And?", "2").answer()
        assert answer.report.cached >= chosen.reused


def test_a_request_arrives_and_is_done() -> None:
    """Its seconds are booked until it is part of the load; then they fall to nothing."""
    with replica() as one:
        one.send("w" * 64, "").answer()  # so that the speed is known
        quiet(one)
        one.tell()
        chain = one.chain(WORDS * 6)
        assert one.router.choose("1", chain, 0.0) is not None
        booked = one.router.status(0.0)[0].wait
        assert booked > 0
        one.engine.shut()
        running = one.send(WORDS * 6, "1")
        queued = one.send(WORDS * 5, "2", max_tokens=0)
        one.engine.pass_one()
        report = one.reporter.report()
        assert report is not None
        assert "1" in report.arrived
        assert not report.done
        assert report.load.prefills
        assert one.reporter.waiting() == pytest.approx(sum(report.load.prefills) + report.load.queued)
        assert one.reporter.waiting() > 0
        one.router.report(report, 0.0)
        one.engine.open()
        running.answer()
        queued.answer()
        quiet(one)
        assert one.tell()
        assert not one.tell()
        one.clock.now += HEARTBEAT
        last = one.reporter.report()
        assert last is not None
        assert ({*last.arrived}, {*last.done}, last.load) == ({"1", "2"}, {"1", "2"}, Load())
        assert one.reporter.waiting() == 0.0
        one.router.report(last, one.clock())
        assert one.router.status(one.clock())[0].wait == 0.0
        assert not any(Tier.COMING in one.router.holds("a", key) for key in chain.keys)
        one.clock.now += REPEATED
        silent = one.reporter.report()
        assert silent is not None
        assert (silent.arrived, silent.done) == ((), ())


def test_a_request_arrives_with_the_load_that_it_is_part_of() -> None:
    """Fault: a report in the middle of a step named it with the load of before, so its replica seemed to have nothing to do."""
    with replica() as one:
        one.send("w" * 64, "").answer()  # so that the speed is known
        quiet(one)
        one.tell()
        assert one.router.choose("1", one.chain(WORDS * 6), 0.0) is not None
        booked = one.router.status(0.0)[0].wait
        one.engine.shut()
        pending = one.send(WORDS * 6, "1")
        assert one.engine._waiting.acquire(timeout=30)
        one.clock.now += HEARTBEAT
        early = one.reporter.report()
        assert early is not None
        assert (early.arrived, early.load.prefills) == ((), ())
        one.router.report(early, 0.0)
        assert one.router.status(0.0)[0].wait == booked
        one.engine._waiting.release()
        one.engine.pass_one()
        report = one.reporter.report()
        assert report is not None
        assert report.arrived == ("1",)
        assert report.load.prefills
        one.engine.open()
        pending.answer()


def test_requests_that_wait_for_a_slot_are_in_the_queue() -> None:
    """What is cached of them does not count."""
    known = WORDS * 4
    with replica() as one:
        one.send(known, "").answer()
        quiet(one)
        one.engine.shut()
        all_of_them = [one.send(text * 200, text) for text in "fs"] + [one.send(f"{known}And?", "k"), one.send("t" * 200, "t")]
        wait_until(lambda: one.runtime.scheduler.queued + one.runtime.scheduler.running == 4)
        one.engine.pass_one()
        one.engine.pass_one()
        drained, waiting = one.journal.drain(), one.reporter.waiting()
        one.engine.open()
        for pending in all_of_them:
            pending.answer()
        quiet(one)
    assert {*drained.arrived} == {*"fskt"}
    assert sorted(length for _, length in drained.queue.prefills) == [200, 200]
    assert {length: start for start, length in drained.queue.queued} == {len(known) + 4: len(known), 200: 0}
    assert waiting > 0


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_request_that_ends_early_is_done(end: str) -> None:
    """A cancelled one has no event any more."""
    with replica() as one:
        assert one.tell()
        assert one.router.choose("1", one.chain(WORDS * 6), 0.0) is not None
        one.engine.shut()
        pending = one.send(WORDS * 6, "1")
        one.engine.pass_one()
        if end == "cancel":
            pending.handle.cancel()
        else:
            one.engine.fail_next("prefill")
        one.engine.open()
        wait_until(lambda: one.runtime.scheduler.idle)
        quiet(one)
        wait_until(lambda: not one.journal._open)
        report = one.reporter.report()
        assert report is not None
        assert report.arrived == report.done == ("1",)
        assert report.load == Load()
        one.router.report(report, 0.0)
        assert one.router.status(0.0)[0].wait == 0.0


def test_a_dump_has_the_number_of_the_last_report() -> None:
    """So it can go to the one router that asks, and the next report follows it everywhere."""
    with replica() as one:
        one.send(WORDS, "").answer()
        quiet(one)
        early = one.reporter.dump()
        assert (early.sequence, early.dump, early.removed) == (0, True, {})
        one.send(WORDS * 2, "").answer()
        quiet(one)
        lost = one.reporter.report()
        one.send(WORDS * 3, "").answer()
        quiet(one)
        dump = one.reporter.dump()
        after = one.reporter.report()
        assert lost is not None
        assert after is not None
        assert (lost.sequence, dump.sequence, after.sequence) == (1, 1, 2)
        steady, late = FleetRouter(), FleetRouter()
        for report in (early, lost, dump, after):
            assert not steady.report(report, 0.0)
        assert late.report(after, 0.0), "a gap"
        assert not late.report(dump, 0.0)
        keys = [key for tiers in (dump.added, after.added) for found in tiers.values() for key in found]
        assert len(keys) > 20
        assert all(late.holds("a", key) == steady.holds("a", key) for key in keys)
        assert after.added


def test_a_second_process_replaces_the_first() -> None:
    router = FleetRouter()
    with replica(epoch=1, router=router) as one:
        one.send(WORDS, "").answer()
        quiet(one)
        one.tell()
        old = one.chain(WORDS).keys
        assert router.holds("a", old[0])
        late = one.reporter.dump()
    with replica(epoch=2, router=router) as other:
        other.send("t" * 80, "").answer()
        quiet(other)
        other.tell()
        assert not router.report(late, 0.0)
        assert not any(router.holds("a", key) for key in old)
        assert router.holds("a", other.chain("t" * 80).keys[0])


def test_it_reports_beside_the_engine() -> None:
    """Reports are made on another thread while requests run. Nothing is lost or doubled."""
    with replica(memory_budget=40 * 128) as one:
        stop = threading.Event()

        def report() -> None:
            while not stop.wait(0.001):
                one.tell()

        thread = threading.Thread(target=report)
        thread.start()
        for number in range(12):
            submit(one.runtime, [system(WORDS), user(f"{number % 7} {WORDS}")], max_tokens=8).answer()
        quiet(one)
        stop.set()
        thread.join()
        one.runtime.scheduler.close()
        one.tell()
        held = {(key, tier) for tier, keys in one.journal.drained().items() for key in keys}
        counts = one.runtime.cache.store.counters
        assert counts["evicted"]
        assert len({key for key, _ in held}) == one.router.status(0.0)[0].blocks
        assert all(tier in one.router.holds("a", key) for key, tier in held)
        index = one.runtime.cache.index
        whole = sum(len(entry.tokens) == BLOCK_SIZE for entry in index if "memory" in entry.copies)
        assert sum(tier is Tier.MEMORY for _, tier in held) == whole > 0


@pytest.mark.parametrize("end", ["missing", "bad"])
def test_it_speaks_of_the_shared_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """What one replica has written, and what another has read, until it is missing, or what is before it is bad."""
    monkeypatch.setattr("headstart.tiers.shared.pace.StorePace.seconds", lambda *_: 0.0)
    monkeypatch.setattr("headstart.serving.shared_fetch.STALL", 30.0)
    (store := tmp_path / "store").mkdir()
    FleetKeys.generate().save(tmp_path / "key")
    options = {"shared": f"file://{store}", "shared_key_file": tmp_path / "key", "reuse": "exact"}

    def rumours(of: Replica) -> set[int]:
        of.journal.drain()
        return set(of.journal.drained().get(Tier.SHARED, ()))

    with replica(**options) as one, replica(**options) as other:
        keys = set(one.chain(WORDS).keys)
        assert one.reporter.dump().speed.fetch == 0.0
        one.send(WORDS, "").answer()
        quiet(one)
        wait_until(lambda: one.runtime.scheduler.wake() or keys <= rumours(one))
        assert not rumours(other)
        other.engine.delay = 0.01  # so that computing is slower than fetching
        other.send("t" * 64, "").answer()
        assert other.send(WORDS, "").answer().report.tiers["shared"] == len(keys) * BLOCK_SIZE
        wait_until(lambda: other.runtime.scheduler.wake() or keys <= rumours(other))
    for path in store.glob("**/kv/**/*"):  # now that nobody writes
        if path.is_file() and end == "bad":
            path.write_bytes(path.read_bytes()[:-1])
        elif path.is_file():
            path.unlink()
    with replica(**options) as third:
        third.engine.delay = 0.01
        third.send("u" * 64, "").answer()
        tokens = third.runtime.text_prompt(WORDS).tokens
        chain = Chain(root_id(third.runtime.engine.fingerprint, ""), BLOCK_SIZE, as_tokens(tokens))
        second, fingerprint = chain.ids[1], third.runtime.engine.fingerprint
        text = tuple(chain.block(1).tolist())
        third.journal.in_store(Label(second, chain.ids[0], fingerprint, BLOCK_SIZE, text, True))
        assert block_key(second) in rumours(third)
        third.engine.shut()  # until it is computed here, and stored again
        pending = third.send(WORDS, "")
        wait_until(lambda: block_key(second) not in rumours(third))
        third.engine.open()
        pending.answer()


def test_the_journal_must_be_the_listener() -> None:
    with replica() as one, pytest.raises(ValueError, match="listener"):
        Reporter(one.runtime, Journal(), "a", epoch=0)


def test_ids_are_repeated_for_a_while() -> None:
    ids = RepeatedIds(5.0)
    ids.add(["a", "b"], 0.0)
    ids.add(["c", "a"], 3.0)
    assert ids.at(4.9) == ("a", "b", "c")
    assert ids.at(5.0) == ("c", "a")
    assert ids.at(8.0) == ()
