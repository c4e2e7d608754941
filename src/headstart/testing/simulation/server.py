"""Server: one process of headstart in the simulation, and what its HTTP layer would do for callers."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import PosixPath
from typing import Any

import numpy as np

from headstart.config import Settings
from headstart.errors import HeadstartError
from headstart.interfaces.conversation import Conversation
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY, Sampling
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.entry import Entry
from headstart.serving.portions import LongWork
from headstart.serving.request import Delta, Event, Failed, Finished, Progress, Request, Started
from headstart.serving.runtime import Handle, Runtime
from headstart.testing.simulation.checks import Checks, Tenants, Watch
from headstart.testing.simulation.engine import SimulatedEngine
from headstart.testing.simulation.erasures import Deletion, open_tails
from headstart.testing.simulation.faults import Faults
from headstart.testing.simulation.filesystem import ROOT
from headstart.testing.simulation.history import Setup
from headstart.testing.simulation.kernel import World
from headstart.testing.simulation.talks import message, tokenizer
from headstart.testing.simulation.tasks import Process
from headstart.testing.simulation.threads import TIME, Queue
from headstart.testing.simulation.violation import require
from headstart.tiers.disk.store import RESERVE
from headstart.tiers.write_behind import WriteBehind

PATIENCE = 900.0
"""Virtual seconds without any event after which a request counts as stuck."""
HOT_SECONDS = 5.0
"""Most virtual seconds for bringing the hot prompts."""
KV_BYTES = 16
OBJECT = 8192
"""Bytes of disk that an object occupies."""


def options(setup: Setup) -> dict[str, Any]:
    """The options of the engine."""
    return {
        "slots": setup.slots,
        "ctx": 384,
        "block_size": 8,
        "batch": 32,
        "kv_bytes_per_token": KV_BYTES,
        "transfer_bytes": setup.transfer,
        "decode_is_prefill": setup.any_cut,
        "sliceable": not setup.stateful,
        "least_filling": setup.fills,
        "alphabet": b" thef",  # letters of words, so a text can be made of other tokens than the tokenizer's
        "tokenizer": tokenizer(setup.template),
        "seed": setup.model,
    }


def disk_budget(setup: Setup) -> int:
    return RESERVE + setup.objects * OBJECT


def settings(setup: Setup) -> Settings:
    return Settings(
        reuse=setup.mode,
        memory_budget=setup.memory * 8 * KV_BYTES + setup.transfer,
        cache_dir=PosixPath(ROOT) if setup.disk else None,
        disk_budget=disk_budget(setup),
        tenant_memory=setup.share,
        tenant_disk=setup.share,
        settle="on" if setup.settle else "off",
        explain="on" if setup.explain else "off",
        expire=setup.expire,
        queue=setup.queue,
        stall=setup.stall,
        drain=5.0,
        shared=f"{setup.shared}://simulated" if setup.shared else None,
        shared_encrypt=setup.encrypt,
    )


@dataclass(eq=False)
class Call:
    """A request of a client, and what has become of it: `answered`, `aborted`, `refused`, `failed` or `lost` in a crash."""

    who: int
    talk: int
    seed: int
    most: int
    outcome: str = ""
    reason: str = ""
    handle: Handle | None = None
    finished: Finished | None = None
    reply: str = ""
    aborted: bool = False
    events: Queue[Event | None] = field(default_factory=Queue)

    def abort(self) -> None:
        self.aborted = True
        if self.handle is not None:
            self.handle.cancel()
        self.events.put(None)


class SimulatedServer:
    """A process with a runtime.

    Attributes:
        setup: its options.
        ready: whether it takes requests.
        closing, closed: whether it is being stopped, or has stopped.
        deletions: what owners have deleted here, answered or not.
        deletes: called on the engine thread after it has deleted these entries, with the open tails among them.
        began: when it was started, in virtual seconds.
        hot: the prompts that it brings from the shared store before it is ready, as a replica of a fleet does.
    """

    def __init__(self, here: World, faults: Faults, setup: Setup, checks: Checks, tenants: Tenants, name: str) -> None:
        self._here = here
        self.setup = setup
        self._checks = checks
        self._tenants = tenants
        self.process: Process = here.process(name)
        self.engine = SimulatedEngine(faults, **options(setup))
        self._oracle = checks.oracles[self.engine.fingerprint]
        self.watch = Watch(checks, self.engine)
        self.runtime: Runtime | None = None
        self.ready = self.closing = self.closed = False
        self.began = here.now
        self.deletions: list[Deletion] = []
        self.deletes: Callable[[Collection[BlockId], Sequence[Entry]], None] = lambda keys, tails: None
        self.hot: Callable[[Runtime], Iterable[Chain]] = lambda runtime: ()
        here.spawn(self._start, f"{name}: start", self.process)

    def _start(self) -> None:
        self.runtime = Runtime(lambda: self.engine, settings(self.setup), clock=TIME.time, listener=self.watch)
        self.watch.runtime = self.runtime
        expiry, index = self.runtime.scheduler.expiry, self.runtime.cache.index
        delete = expiry.delete

        def deletes(keys: Set[BlockId], tails: Iterable[tuple[BlockId, bytes]] = ()) -> LongWork[None]:
            ends = open_tails(index, keys)
            for piece, _ in enumerate(delete(keys, tails)):
                if not piece:  # from here on nothing of it is used any more
                    self.deletes(keys, ends)
                yield

        expiry.delete = deletes  # type: ignore[method-assign]  # nothing else names the entries of a deletion
        if self.runtime.cache.shared.on:
            self.runtime.preload(iter(self.hot(self.runtime)), HOT_SECONDS)
        self.ready = True

    @property
    def stops(self) -> bool:
        """Whether it is being stopped."""
        return self.runtime is not None and self.closing and not self.closed

    @property
    def disk(self) -> WriteBehind | None:
        """Its disk, if it has one."""
        assert self.runtime is not None
        disk = self.runtime.cache.disk
        return disk if isinstance(disk, WriteBehind) else None

    def close(self) -> None:
        """Stops it as an operator does."""
        self.ready, self.closing = False, True

        def close() -> None:
            assert self.runtime is not None
            self.runtime.close()
            self.closed = True

        self._here.spawn(close, f"{self.process.name}: close", self.process)

    def serve(self, call: Call, conversation: Conversation) -> None:
        """Answers a call, in a task of this process."""

        def run() -> None:
            try:
                self._serve(call, conversation)
            except HeadstartError as error:
                call.outcome, call.reason = "refused", type(error).__name__

        self._here.spawn(run, f"{self.process.name}: call", self.process)

    def _serve(self, call: Call, conversation: Conversation) -> None:
        runtime = self.runtime
        assert runtime is not None
        dice = random.Random(call.seed)
        sampling = GREEDY if dice.random() < 0.6 else Sampling(seed=dice.randrange(1000))
        stop = ("e ",) if dice.random() < 0.1 else ()
        choices = 2 if dice.random() < 0.06 else 1
        reuse, eos = dice.random() > 0.04, dice.random() < 0.5
        params = GenerationParams(sampling, max_tokens=call.most, stop=stop, choices=choices, reuse=reuse, ignore_eos=eos)
        prompt = runtime.chat_prompt(conversation)
        request = Request(prompt, params, keep_logits=True, id=f"r{call.seed}", tenant=str(call.who))
        if call.aborted:
            call.outcome = "aborted"
            return
        self._tenants.adds(call.who, prompt.tokens, call)
        call.handle = runtime.submit(request, call.events.put)
        left, texts = choices, [""] * choices
        while left:
            try:
                event = call.events.get(timeout=PATIENCE)
            except queue.Empty:
                call.outcome = "stuck"
                return
            if event is None:
                call.outcome = "aborted"
                return
            if isinstance(event, Failed):
                call.outcome, call.reason = "failed", type(event.error).__name__
                return
            if isinstance(event, Started):
                own = choices > 1 or event.report.cached <= self._tenants.known(call.who, prompt.tokens, call)
                require(own, "reused what another tenant has sent")
                self._started(event, request)
            if isinstance(event, Delta):
                texts[event.choice] += event.text
            if isinstance(event, Progress):
                require(event.done <= event.total, "more progress than there is to do")
            if isinstance(event, Finished):
                left -= 1
                self._finished(event, request)
                self._tenants.adds(call.who, np.concatenate([prompt.tokens, as_tokens(event.tokens)]))
                if event.choice == 0:
                    call.finished = event
        for text in texts:
            answered = replace(conversation, messages=(*conversation.messages, message("assistant", text)))
            self._tenants.adds(call.who, runtime.shared_prefix_prompt(answered).tokens)
        call.outcome, call.reply = "answered", texts[0]
        if call.finished is not None:
            runtime.remember(call.finished.turn)

    def _started(self, event: Started, request: Request) -> None:
        report, tokens = event.report, request.prompt.tokens
        require(report.prompt == len(tokens), "a report of another prompt")
        require(report.prompt == report.live + report.restored + report.computed, "a report whose tokens do not add up")
        require(sum(report.tiers.values()) == report.restored, "a report whose tiers do not add up")
        require(request.params.reuse or not report.cached, "a request that must compute has reused something")
        assert event.logits is not None
        cold = self._oracle.logits(tokens)
        if self.setup.mode == "exact":
            require(event.logits.tobytes() == cold, "exact mode: other logits than those of a cold run")
        else:
            same = np.array_equal(np.argsort(event.logits), np.argsort(np.frombuffer(cold, np.float32)))
            require(same, "the logits are those of other tokens")

    def _finished(self, event: Finished, request: Request) -> None:
        params, report = request.params, event.report
        require(report.completion == len(event.tokens), "a report of another reply")
        sampling = params.sampling
        if sampling.seed is not None:
            sampling = Sampling(seed=sampling.seed + event.choice)
        if params.ignore_eos:
            never = tuple((token, float("-inf")) for token in sorted(self.engine.tokenizer.eog))
            sampling = Sampling(sampling.temperature, seed=sampling.seed, logit_bias=never)
        if self.setup.mode == "exact" or sampling.temperature <= 0:
            assert params.max_tokens is not None
            cold = self._oracle.reply(request.prompt.tokens, sampling, params.max_tokens)
            require(event.tokens == cold[: len(event.tokens)], "another reply than that of a cold run")
            whole = len(event.tokens) == len(cold) or event.stopped_by is not None
            require(whole, "a reply that ends too early")
