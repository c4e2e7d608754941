"""The journal beside a real runtime: after every step of the scheduler the router knows what is stored, and what is live."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import SLOW, examples
from harness import Pending, assistant, request_of, system, user
from headstart.config import Settings
from headstart.fleet.replica.journal import TIERS, Journal
from headstart.fleet.replica.reporter import Reporter
from headstart.fleet.router.chains import block_key, chain_of, checkpoint_key
from headstart.fleet.router.reports import RUMOUR, ReplicaReport, Tier
from headstart.fleet.router.router import ASK_AGAIN, FleetRouter
from headstart.interfaces.tokens import as_tokens
from headstart.interfaces.traits import Traits
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.planner import Mode, restorable
from headstart.serving import offload, scheduler, settle
from headstart.serving.request import Failed, Finished
from headstart.serving.runtime import Runtime
from headstart.serving.slots import Slot
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers import write_behind
from headstart.tiers.disk import Disk, Label
from headstart.tiers.disk import store as disk_store
from remains import Clock
from talks import talk

BLOCK_SIZE = 8
HOUR = 3600.0
DISK = disk_store.RESERVE + 40 * 8192
"""Room for some dozens of objects."""
NAME = "a"
Held = frozenset[tuple[int, Tier]]
KINDS: dict[str, dict[str, Any]] = {
    "sliceable": {},
    "any cut": {"decode_is_prefill": True},
    "stateful": {"sliceable": False},
    "state only": {"sliceable": False, "kv_bytes_per_token": 0},
    "live only": {"sliceable": False, "movable": False},
}


@pytest.fixture(scope="module", autouse=True)
def brisk() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_behind, "POLL", 0.005)
        patch.setattr(write_behind, "PATIENCE", 0.01)
        patch.setattr(scheduler, "IDLE_SAVE", 0.002)
        patch.setattr(scheduler, "IDLE_POLL", 0.01)
        patch.setattr(settle, "AFTER", 0.002)
        patch.setattr(offload, "LATER", 0.01)
        patch.setattr(os, "fsync", lambda _: None)
        yield


def truth(runtime: Runtime, slots: Sequence[Slot]) -> Held:
    """What a replica holds, from its index and its slots. For the engine thread."""
    exact, traits, found = runtime.reuse == "exact", runtime.engine.traits, set()
    for entry in runtime.cache.index:
        if len(entry.tokens) == BLOCK_SIZE:
            key = checkpoint_key(block_key(entry.parent)) if entry.state else block_key(entry.id)
            found |= {(key, TIERS[tier]) for tier, canonical in entry.copies.items() if canonical or not exact}
    for slot in slots:
        strict = exact and not traits.decode_is_prefill
        usable = slot.canonical if strict else len(slot)
        ids = Chain(slot.root, BLOCK_SIZE, as_tokens(slot.tokens[:usable])).ids
        found |= {(block_key(one), Tier.LIVE) for one in ids}
        if ids and not traits.sliceable and usable == len(slot):
            found.add((checkpoint_key(block_key(ids[-1])), Tier.LIVE))
    return frozenset(found)


class Watched(Journal):
    """A journal that is compared with the truth after every step, on the engine thread, where nothing else changes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.runtime: Runtime | None = None
        self.lock = threading.Lock()
        self.failures: list[BaseException] = []
        self.reports: list[ReplicaReport] = []
        self.truths: list[Held] = []
        self.keys: set[int] = set()
        self.router = FleetRouter()
        self.steps = 0

    def attach(self, runtime: Runtime, epoch: int, clock: Clock) -> None:
        with self.lock:
            self.reporter = Reporter(runtime, self, NAME, epoch=epoch, clock=clock)
            self.runtime = runtime
        runtime.scheduler.wake()

    def stepped(self, slots: Any, running: Any, waiting: Any) -> None:
        super().stepped(slots, running, waiting)
        with self.lock:
            if self.runtime is None:
                return
            try:
                self._compare(self.runtime, slots)
            except BaseException as error:
                self.failures.append(error)

    def _compare(self, runtime: Runtime, slots: Sequence[Slot]) -> None:
        self.steps += 1
        now = truth(runtime, slots)
        report = self.reporter.report()
        if report is None:
            assert now == self.truths[-1]
            return
        assert report.sequence == len(self.reports)
        self.reports.append(report)
        self.truths.append(now)
        self.keys |= {key for key, _ in now}
        for tiers in (report.added, report.removed):
            for keys in tiers.values():
                assert len(set(keys)) == len(keys)
        assert not self.router.report(report, 0.0)
        assert self.view(self.router) == now

    def view(self, router: FleetRouter) -> Held:
        return frozenset((key, tier) for key in self.keys for tier in router.holds(NAME, key) if tier is not Tier.COMING)

    def done(self) -> None:
        assert not self.failures, self.failures[0]


def start(kind: str, exact: bool, folder: str | None, journal: Journal, clock: Clock, **options: Any) -> Runtime:
    given: dict[str, Any] = {"memory_budget": 48 * 128, "disk_budget": DISK, "expire": HOUR, **options}
    chosen = Settings(reuse="exact" if exact else "fast", cache_dir=None if folder is None else Path(folder), **given)
    engine = {"slots": 2, "ctx": 768, "block_size": BLOCK_SIZE, **KINDS[kind]}
    return Runtime(lambda: FakeEngine(**engine), chosen, clock=clock, listener=journal)


def quiet(runtime: Runtime) -> None:
    """Waits until nothing runs and nothing is to be settled or written."""
    until, serving = time.monotonic() + 30, runtime.scheduler
    while not serving.idle or runtime.cache.store.offload.pending_notices or any(slot.dirty for slot in serving.slots):
        assert time.monotonic() < until
        time.sleep(0.001)


class History:
    """Conversations of two tenants at one replica, and a router behind a network that loses, doubles and reorders reports."""

    def __init__(self, kind: str, exact: bool, folder: str | None) -> None:
        self.options = kind, exact, folder
        self.clock, self.now, self.epoch = Clock(), Clock(0.0), 0
        self.talks: list[list[dict[str, Any]]] = [[system("You answer in the words of the house.")] for _ in range(3)]
        self.running: list[Pending] = []
        self.lossy = FleetRouter()
        self.network: list[ReplicaReport] = []
        self.seen = 0
        self.requests = 0
        self.open()

    def open(self) -> None:
        self.journal = Watched(self.now)
        self.runtime = start(*self.options, self.journal, self.clock)
        self.journal.attach(self.runtime, self.epoch, self.now)

    def close(self) -> None:
        self.runtime.close()
        self.journal.done()

    def restart(self) -> None:
        self.finish()
        self.close()
        self.epoch += 1
        self.network.clear()
        self.seen = 0
        self.open()

    def ask(self, number: int, tokens: int, words: str) -> None:
        chat = self.talks[number]
        if sum(len(message["content"]) for message in chat) > 300:
            del chat[1:]
        chat.append(user(words))
        self.requests += 1
        prompt = self.runtime.chat_prompt(talk(chat, salt=f"tenant {number % 2}"))
        request = request_of(prompt, max_tokens=tokens, id=str(self.requests))
        self.running.append(Pending(self.runtime, request))
        chat.append(assistant(words))

    def finish(self) -> None:
        for one in self.running:
            if not one.handle._ticket.cancelled:
                while not isinstance(one.next(), Finished | Failed):
                    pass
        self.running.clear()

    def cancel(self) -> None:
        for one in self.running:
            one.handle.cancel()
        self.running.clear()

    def fail(self, operation: Any) -> None:
        engine = self.runtime.engine
        assert isinstance(engine, FakeEngine)
        engine.fail_next(operation)

    def pass_on(self, dice: Any) -> None:
        """Some of the reports arrive, in some order."""
        with self.journal.lock:
            self.network += self.journal.reports[self.seen :]
            self.seen = len(self.journal.reports)
            dice.shuffle(self.network)
            lost, again = dice.random() < 0.5, dice.random() < 0.5
            some = self.network[: dice.randint(0, len(self.network))]
            self.network = self.network[len(some) :] + (some[:1] if again else [])
            for report in some[1 if lost else 0 :]:
                self._deliver(report, dice.random() < 0.5)
            if some:
                moments = [frozenset[tuple[int, Tier]](), *self.journal.truths]
                assert self.journal.view(self.lossy) in moments or self.epoch

    def _deliver(self, report: ReplicaReport, answered: bool) -> None:
        if self.lossy.report(report, self.now()) and answered:
            assert not self.lossy.report(self.journal.reporter.dump(), self.now())

    def heard(self) -> None:
        """The next reports arrive, and after a dump the router knows everything again."""
        self.now.now += 2 * ASK_AGAIN  # a heartbeat is due
        count = len(self.journal.reports)
        until = time.monotonic() + 30
        while len(self.journal.reports) == count:
            self.runtime.scheduler.wake()
            assert time.monotonic() < until
            self.journal.done()
            time.sleep(0.001)
        with self.journal.lock:
            self._deliver(self.journal.reports[-1], True)
            self.network.clear()
            self.seen = len(self.journal.reports)
            self.journal.keys |= {key for key, _ in self.journal.truths[-1]}
            assert self.journal.view(self.lossy) == self.journal.truths[-1]


WORDS = st.sampled_from(["yes", "tell me more", "and what of the harbour, the ships and all of the sailors?", "no " * 40])
OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.sampled_from([0, 1, 9, 20]), WORDS),
    st.tuples(st.just("finish")),
    st.tuples(st.just("quiet")),
    st.tuples(st.just("cancel")),
    st.tuples(st.just("erase"), st.integers(0, 1)),
    st.tuples(st.just("expire"), st.sampled_from([0.3 * HOUR, 1.1 * HOUR])),
    st.tuples(st.just("wipe")),
    st.tuples(st.just("fail"), st.sampled_from(["prefill", "export", "import", "export checkpoint", "import checkpoint"])),
    st.tuples(st.just("restart")),
)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("kind", KINDS)
@given(st.booleans(), st.lists(OPERATIONS, min_size=1, max_size=12), st.randoms(use_true_random=False))
@examples(48 if SLOW else 16)
def test_the_router_knows_what_is_held(kind: str, exact: bool, disk: bool, operations: list[Any], dice: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(kind, exact, folder if disk else None)
        try:
            for name, *arguments in operations:
                carry_out(history, name, arguments)
                history.pass_on(dice)
            history.finish()
            quiet(history.runtime)
            history.heard()
            check_reach(history)
        finally:
            history.close()


def carry_out(history: History, name: str, arguments: list[Any]) -> None:
    match name:
        case "quiet":
            history.finish()
            quiet(history.runtime)
        case "erase":
            history.runtime.erase(*arguments)
        case "expire":
            history.clock.now += arguments[0]
        case "wipe" if history.options[2] is not None:
            disk = Disk(Path(history.options[2]), 1 << 30, 1.0, history.clock)
            disk.erase((), before=history.clock.now)
            disk.close()
        case "wipe":
            pass
        case _:
            getattr(history, name)(*arguments)


def check_reach(history: History) -> None:
    """The router expects that at least so much of a prompt is reused as can be restored in whole blocks."""
    runtime, mode = history.runtime, history.runtime.scheduler._mode
    runtime.scheduler.close()
    for number, chat in enumerate(history.talks):
        prompt = runtime.chat_prompt(talk([*chat, user("?")], salt=f"tenant {number % 2}"))
        root = root_id(runtime.engine.fingerprint, prompt.salt)
        chain = chain_of(root, BLOCK_SIZE, prompt.tokens, stateful=not mode.traits.sliceable)
        chosen = history.lossy.choose("probe", chain, history.now())
        history.lossy.close("probe")
        assert chosen is not None
        index = runtime.cache.index
        blocks = list(restorable(index, Chain(root, BLOCK_SIZE, prompt.tokens), mode).blocks)
        while mode.traits.stateful and blocks and index.checkpoint(blocks[-1].id, canonical_only=mode.exact) is None:
            blocks.pop()  # an open tail with a checkpoint follows: the router does not know it
        assert chosen.reused >= BLOCK_SIZE * len(blocks)


@pytest.mark.parametrize(("kind", "exact"), [("sliceable", True), ("stateful", False)], ids=["sliceable", "stateful"])
def test_what_is_evicted_is_reported(kind: str, exact: bool) -> None:
    """The history above has evictions of both tiers in it, and every kind of coming and going."""
    with tempfile.TemporaryDirectory() as folder:
        history = History(kind, exact, folder)
        try:
            for number in range(9):
                history.ask(number % 3, 12, f"{number} and what of the harbour, the ships and all of the sailors? " * 3)
                history.finish()
                quiet(history.runtime)
            history.heard()
        finally:
            history.close()
    for tier in TIERS.values():
        assert any(report.removed.get(tier) for report in history.journal.reports), tier
    assert any(report.removed.get(Tier.LIVE) for report in history.journal.reports)
    checkpoints = {key for report in history.journal.reports for key in report.added.get(Tier.MEMORY, ()) if key & 1}
    assert bool(checkpoints) == (kind == "stateful")


def test_a_restarted_replica_tells_what_its_disk_has() -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History("sliceable", True, folder)
        history.ask(0, 4, "and what of the harbour?")
        history.finish()
        quiet(history.runtime)
        before = {key for key, tier in history.journal.truths[-1] if tier is Tier.DISK}
        history.restart()
        history.heard()
        assert history.epoch == 1
        assert before
        assert {key for key, tier in history.journal.view(history.lossy) if tier is Tier.DISK} == before
        history.close()


def test_a_derived_copy_counts_in_fast_mode_only() -> None:
    """In exact mode it appears when it becomes canonical, and leaves with its tier."""
    block = Entry(b"b" * 32, b"p" * 32, as_tokens(range(BLOCK_SIZE)), 0)
    tail = Entry(b"t" * 32, b"b" * 32, as_tokens(range(BLOCK_SIZE - 1)), BLOCK_SIZE)
    state = Entry(b"s" * 32, b"b" * 32, as_tokens(range(BLOCK_SIZE)), 0, state=True)
    key = block_key(block.id)
    for exact in (False, True):
        journal = Journal()
        journal.begin(Mode(exact, Traits(BLOCK_SIZE, sliceable=False)))
        index = Index(BLOCK_SIZE, journal)
        for entry in (block, tail, state):
            index.add(entry, "memory", canonical=False)
        found = {} if exact else {Tier.MEMORY: [key, checkpoint_key(key)]}
        assert journal.drain().added == found
        index.add(block, "memory", canonical=True)
        index.add(block, "disk", canonical=True)
        drained = journal.drain()
        assert drained.added == ({Tier.MEMORY: [key], Tier.DISK: [key]} if exact else {Tier.DISK: [key]})
        assert not drained.removed
        for entry in (block, tail, state):
            index.remove(entry.id, "memory")
        assert journal.drain().removed == ({Tier.MEMORY: [key]} if exact else {Tier.MEMORY: [key, checkpoint_key(key)]})
        assert journal.drained() == {Tier.DISK: [key]}
        index.remove(block.id, "disk")
        assert journal.drained() == {Tier.DISK: [key]}, "as it was when it was drained last"
        assert journal.drain().removed == {Tier.DISK: [key]}
        assert not journal.drained()


def test_a_rumour_is_withdrawn() -> None:
    clock = Clock(0.0)
    journal = Journal(clock)
    journal.begin(Mode(True, Traits(BLOCK_SIZE)))
    tokens = tuple(range(BLOCK_SIZE))
    labels = [Label(bytes([number]) * 32, b"p" * 32, b"model", 0, tokens, True) for number in (2, 4, 6)]
    state = Label(b"s" * 32, labels[0].key, b"model", 0, tokens, True, kind="state")
    first, second, third = (block_key(label.key) for label in labels)
    for label in (*labels, state):
        journal.in_store(label)
    assert journal.drain().added == {Tier.SHARED: [first, second, third, checkpoint_key(first)]}
    clock.now = 10.0
    journal.in_store(labels[2])
    journal.not_in_store(labels[1].key)
    journal.not_in_store(b"unknown")
    drained = journal.drain()
    assert (drained.added, drained.removed) == ({}, {Tier.SHARED: [second]})
    clock.now = RUMOUR
    assert set(journal.drain().removed[Tier.SHARED]) == {first, checkpoint_key(first)}
    clock.now += 10.0
    assert journal.drain().removed == {Tier.SHARED: [third]}
