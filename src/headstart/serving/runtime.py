"""Runtime: one loaded model, ready to serve. The API, the library and the command line use it."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headstart import memory_plan
from headstart.config import Overflow, Settings
from headstart.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from headstart.explain.explain import Explanation, compare
from headstart.explain.record import Record
from headstart.interfaces.conversation import Conversation, Message
from headstart.interfaces.engine import Engine
from headstart.interfaces.sampling import Grammar, Sampling
from headstart.interfaces.tokens import Tokens
from headstart.model_names import model_name
from headstart.names import OptionText, option
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.planner import Mode
from headstart.prefix_cache.quota import owner_of, quota
from headstart.prompt.builder import Prompt
from headstart.prompt.continuation import returned
from headstart.prompt.reply_tokens import ReplyTokensRecord
from headstart.serving.cache import Cache
from headstart.serving.engine_thread import EngineThread
from headstart.serving.expiry import Erasure
from headstart.serving.job import Ticket
from headstart.serving.kv_store import KvStore
from headstart.serving.listener import Listener, Listeners
from headstart.serving.offload import ALL
from headstart.serving.portions import LongWork
from headstart.serving.prompt_maker import PromptMaker
from headstart.serving.request import Event, Request, Sink
from headstart.serving.running_jobs import Outcome
from headstart.serving.scheduler import Scheduler
from headstart.serving.shared_preload import Preload
from headstart.serving.stored import CachedChains, EntryArray, copied, unpacked
from headstart.serving.turn import ReturnedTurn, Turn
from headstart.tiers.disk import Disk, StoredModel
from headstart.tiers.disk_tier import DiskTier
from headstart.tiers.memory import Memory
from headstart.tiers.no_disk import NoDisk
from headstart.tiers.shared_tier import NoShared, SharedListener, SharedTier
from headstart.tiers.write_behind import WriteBehind
from headstart.units import count

log = logging.getLogger("headstart.model")

T = TypeVar("T")

QUEUE_SHARE = 0.25
"""Largest share of the memory budget that may wait for the disk. Waiting entries cannot be evicted."""
SHARED_SHARE = 0.125
"""The same for the shared store."""
SETTLE_SHARE = 0.5
"""Largest share of the stopping time in which finished turns are settled for those that go on with them."""


class Handle:
    """A submitted request."""

    def __init__(self, ticket: Ticket, scheduler: Scheduler) -> None:
        self._ticket = ticket
        self._scheduler = scheduler

    @property
    def begun(self) -> bool:
        """Whether it has had a slot. Thread-safe."""
        return self._ticket.begun

    def cancel(self) -> None:
        """Stops the request at the next token or block boundary. Finished blocks are kept.

        Thread-safe and idempotent. Returns at once.
        """
        self._ticket.cancel()
        self._scheduler.wake()


class Runtime:
    """Owns the engine, the cache and the scheduler of one model.

    Args:
        engine: a function that loads the engine; it runs on the thread that later computes with the engine and closes it. Or
            an engine thread, which the runtime then owns and closes.
        settings: the runtime uses those of prompts, reuse, sampling, the queue, stopping and the tiers.
        observe: called with every finished choice, on the engine thread.
        clock: a clock in seconds since 1970, for `expire`.
        listener: hears what the runtime holds and does, from its beginning.

    Attributes:
        sampling: the defaults for requests without sampling options.
        prompts: makes prompts that fit.
        chat_template: the template that renders conversations, and its origin.
        stored: lists, pins and deletes what is stored.
        listeners: hear what the runtime holds and does.

    Raises:
        ConfigError: the engine cannot prove exact mode, which the settings ask for, or the chat template is broken.

    It also raises whatever `engine` raises. If the engine was loaded, it is closed then.
    """

    def __init__(
        self,
        engine: Callable[[], Engine] | EngineThread,
        settings: Settings | None = None,
        observe: Callable[[Outcome], None] | None = None,
        clock: Callable[[], float] = time.time,
        listener: Listener | None = None,
    ) -> None:
        self._thread = engine if isinstance(engine, EngineThread) else EngineThread(engine)
        try:
            self._set_up(settings or Settings(), observe, clock, *(() if listener is None else (listener,)))
        except BaseException:
            self._thread.close()
            raise

    def _set_up(
        self,
        settings: Settings,
        observe: Callable[[Outcome], None] | None,
        clock: Callable[[], float],
        *listeners: Listener,
    ) -> None:
        engine = self._thread.engine
        if settings.reuse == "exact" and not engine.traits.exact:
            reasons = "; ".join(engine.traits.notes)
            raise ConfigError(f"Exact reuse cannot be proved for this model ({reasons}); use {option('reuse', 'fast')}.")
        self.engine = engine
        self.settings = settings
        self.reuse = settings.reuse
        chosen = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        self.sampling = Sampling(**{name: value for name, value in chosen.items() if value is not None})
        settles = settings.settle == "on" and engine.traits.movable and engine.traits.canonical
        # Derived KV never leaves the machine.
        self._mode = Mode(settings.reuse == "exact", engine.traits, settles and settings.shared is None)
        self.listeners = listener = Listeners(*listeners)
        listener.begin(self._mode)
        self.prompts = PromptMaker.of(engine.tokenizer, settings, engine.shape.ctx)
        self.prompter, self.chat_template = self.prompts.prompter, self.prompts.chat_template
        if self.chat_template.origin == "none":
            log.warning("chat template: %s", self.template_facts)
        cell = engine.traits.block_size * engine.shape.kv_bytes_per_token
        budget = settings.memory_budget
        if budget is None:
            budget = memory_plan.budget(engine.host, engine.shape.ctx, engine.shape.slots)
        memory = Memory(cell, budget, engine.shape.state_bytes, quota(settings.tenant_memory, budget))
        self.clock = clock
        self._terms = Terms(math.inf if settings.expire is None else settings.expire)
        shared = _shared(engine, settings, budget, self._terms, clock, listener)  # first: it may refuse the settings
        if shared.on and self._mode.any_cut and self.prompter.use_reply_tokens:
            self.prompter.look_elsewhere(partial(_reply_tokens_of, shared, engine.fingerprint))
        store = KvStore(
            *(engine, memory, self._mode, time.monotonic),
            disk=_disk(engine, settings, budget, self._terms, clock),
            shared=shared,
            reply_tokens=self.prompter.reply_tokens,
            terms=self._terms,
            wall=clock,
            tenant_memory=settings.tenant_memory,
            listener=listener,
        )
        self.cache = Cache(engine, self._mode, store)
        self.cache.store.offload.take_notices(ALL)  # before the first prompt is made, which is earlier than the first request
        self._observers: list[Callable[[Outcome], None]] = [observe] if observe else []
        self._entrance = threading.Lock()  # so that a request checks the queue and joins it in one step
        self._watchers: list[Callable[[Request], Sink]] = []
        self._seconds = 1.0  # smoothed seconds a choice holds a slot, for retry-after
        # Last: from here on the engine thread is busy, and could not close the engine after an error.
        self.scheduler = Scheduler(
            self._thread,
            self.cache,
            self.prompter,
            self._mode,
            stall=settings.stall,
            settles=settings.settle == "on",
            explains=settings.explain == "on",
            observe=self._observed,
            clock=time.monotonic,
        )
        self.stored = CachedChains(self.scheduler, self.cache)
        if engine.close_at_exit:
            atexit.register(self.close)

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def template_facts(self) -> OptionText:
        """One line about the chat template, for people."""
        return OptionText(self.chat_template.described(control.text for control in self.engine.tokenizer.controls))

    @property
    def ctx(self) -> int:
        """Tokens a conversation may hold."""
        return self.engine.shape.ctx

    @property
    def overflow(self) -> Overflow:
        return self.prompts.overflow

    def chat_prompt(self, conversation: Conversation, *, use_reply_tokens: bool = True) -> Prompt:
        """Renders and tokenises a conversation: see `PromptMaker.chat`. Thread-safe; takes milliseconds."""
        return self.prompts.chat(conversation, use_reply_tokens=use_reply_tokens)

    def shared_prefix_prompt(self, conversation: Conversation) -> Prompt:
        """The prefix that all continuations of a conversation share: see `PromptMaker.shared_prefix`. Thread-safe."""
        return self.prompts.shared_prefix(conversation)

    def text_prompt(self, text: str | Sequence[int], *, salt: str = "", use_reply_tokens: bool = True) -> Prompt:
        """Tokenises a raw text, or takes tokens as they are: see `PromptMaker.text`. Thread-safe."""
        return self.prompts.text(text, salt=salt, use_reply_tokens=use_reply_tokens)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def check_grammar(self, grammar: Grammar, *, salt: str = "", param: str | None = "grammar") -> Grammar:
        """Compiles a grammar before `submit`, which does it otherwise. Returns the grammar for the request.

        Thread-safe. It takes up to some seconds, once for each `salt`.

        Raises:
            InvalidRequest: the grammar cannot be followed. The message names `param`.
            Overloaded: too many grammars are in use.
        """
        with self.prompts.tokenizer_open():
            return self.engine.check_grammar(replace(grammar, salt=salt), param)

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Queues a request. `sink` receives its events on the engine thread. Thread-safe.

        Raises:
            Overloaded: the queue is full.
            Unavailable: the runtime is closed, or this process was forked after it was made.
            ContextTooLong: the prompt does not fit.
            InvalidRequest: a bias for a token that the model does not have, or a grammar that cannot be followed.
        """
        self.scheduler.process.check()
        self.prompts.check(request.prompt, "prompt")
        n_vocab = self.engine.tokenizer.n_vocab
        if strange := [token for token, _ in request.params.sampling.logit_bias if not 0 <= token < n_vocab]:
            raise InvalidRequest(f"Invalid 'logit_bias': token {strange[0]} is not in [0, {n_vocab}).", param="logit_bias")
        if request.grammar is not None:
            if request.params.ignore_eos:
                raise InvalidRequest("Invalid 'ignore_eos': a grammar says where the reply ends.", param="ignore_eos")
            grammar = self.check_grammar(request.grammar, salt=request.prompt.salt)
            request = replace(request, grammar=grammar)  # which keeps the compiled grammar until the request ends
        if self.prompts.gate.closed:
            raise Unavailable("The server is stopping.")
        if request.prompt_logprobs is not None:
            request = replace(request, params=replace(request.params, reuse=False))
        with self._entrance:
            waiting = self.scheduler.queued
            if waiting >= self.settings.queue:
                wait = max(1.0, waiting * self._seconds / self.engine.shape.slots)
                queue = count(waiting, "request")
                raise Overloaded(f"{queue} waiting already; try again in {wait:.0f} s.", retry_after=wait)
            ticket = Ticket(request, _both([sink, *(watcher(request) for watcher in self._watchers)]))
            self.scheduler.submit(ticket)
        return Handle(ticket, self.scheduler)

    def preload(self, chains: Iterator[Chain], seconds: float) -> Preload:
        """Brings prefixes from the shared tier into memory, in order, and computes nothing. It waits for that. Thread-safe.

        Args:
            chains: the prefixes, each with one token more, which is never reused. They are made on the engine thread.
            seconds: most seconds. What has arrived by then stays.

        Returns: what was brought.
        """
        preload = Preload(chains)
        if self.cache.shared.on:
            self.scheduler.preload(preload)
            if not preload.over.wait(seconds):
                preload.stopped = True
                self.scheduler.wake()
        return preload

    def remember(self, turn: Turn | None, message: Message | None = None, *, parsed: Message | None = None) -> None:
        """Records the message that the client will send back for a finished choice. Call it before the client can do so.

        Then the reply keeps its tokens when it comes back, the turn is settled, and later requests can be explained.
        Thread-safe. It takes milliseconds, because it renders the conversation once.

        Args:
            turn: the one in `Finished`; None does nothing.
            message: the reply as the client will send it back; None if that is its text.
            parsed: the reply as a parsed message; None parses it here.
        """
        if turn is None or self.scheduler.expiry.must_forget_turn(turn):
            return
        back: Message = message or {"role": "assistant", "content": turn.reply}
        learned: Sequence[ReplyTokensRecord] = ()
        continuation = None
        try:
            with self.prompts.tokenizer_open():
                if turn.settles and turn.prompt.source is not None:
                    with suppress(InvalidRequest):  # the template refuses the reply
                        continuation = self.prompter.continued(returned(turn.prompt.source, back), parsed=parsed)
                learned = self.prompter.remember(
                    turn.prompt, turn.reply, turn.tokens, back, parsed=parsed, continuation=continuation
                )
        except Unavailable:  # the runtime is closed
            return
        except Exception:  # a model may write anything. An error here costs only the reply tokens
            log.exception("a reply could not be read")
        self.scheduler.remember(ReturnedTurn(turn, back, continuation, tuple(learned)))
        if self.scheduler.expiry.must_forget_turn(turn):
            self.prompter.reply_tokens.drop(learned)

    def erase(self, slot: int) -> int | None:
        """Empties a slot. Stored entries stay. Thread-safe; waits for the current step.

        Returns: the number of tokens that the slot held; None if the slot is in use.

        Raises:
            Unavailable: the runtime is closed.
        """
        if self.prompts.gate.closed:
            raise Unavailable("The server is stopping.")
        return self.scheduler.erase(slot).result()

    def keep(self, salt: str, seconds: float | None) -> None:
        """Limits how long entries under a salt may be kept; None for no limit of their own. Thread-safe.

        The limit also holds for entries of other models, engines and settings in the folder.
        """
        before = self._terms.version
        for fingerprint in (self.engine.fingerprint, *self.cache.disk.foreign()):
            self._terms.give(owner_of(root_id(fingerprint, salt)), seconds, self.clock())
        self._look_sooner(before)

    def keep_all(self, seconds: float) -> None:
        """Limits how long any entry may be kept, of all owners. Thread-safe."""
        before = self._terms.version
        self._terms.cap(seconds)
        self._look_sooner(before)

    def _look_sooner(self, version: int) -> None:
        """An idle server without a disk sleeps until the next search, or for ever. `version`: of the terms, before a change."""
        if self._terms.version != version:
            self.scheduler.wake()

    def due(self, salt: str, written: float) -> bool:
        """Whether the time is over for a text that was written under a salt at the time `written`. Thread-safe."""
        return written <= self._terms.due(self.owner(salt), self.clock())

    def ends(self, salt: str, written: float) -> float:
        """When a text under a salt, written at the time `written`, must be deleted; infinite for never. Thread-safe."""
        return self._terms.ends(self.owner(salt), written)

    def with_deletions(self, use: Callable[[tuple[float, int] | None], T]) -> T:
        """Calls a function with the deletions by users that are obeyed here, as the disk counts them; None if that is unknown.
        Later ones are obeyed after the call. Thread-safe; waits for the current step.

        Raises:
            Unavailable: the runtime is closed.
        """
        if self.prompts.gate.closed:
            raise Unavailable("The server is stopping.")

        def call() -> T:
            deletions = self.cache.disk.deletions  # first: their notices are in the queue by now
            self.cache.store.offload.take_notices(ALL)
            self.scheduler.expiry.step()
            return use(deletions)

        return self.scheduler.call(call).result()

    def owner(self, salt: str) -> bytes:
        """The owner of what is stored under a salt."""
        return owner_of(root_id(self.engine.fingerprint, salt))

    def on_erase(self, observer: Callable[[Erasure], None]) -> None:
        """Adds a function that is called on the engine thread when texts of callers must be deleted."""
        self.scheduler.expiry.observe(observer)

    def observe(self, observer: Callable[[Outcome], None]) -> None:
        """Adds an observer of finished choices. It is called on the engine thread, and must return at once."""
        self._observers.append(observer)

    def watch(self, watcher: Callable[[Request], Sink]) -> None:
        """For each later request, `watcher` returns a sink that receives the same events."""
        self._watchers.append(watcher)

    def listen(self, listener: Listener) -> Iterator[Entry]:
        """Adds a listener, and returns what is stored. Thread-safe; waits for some steps.

        Entries that come or leave meanwhile may be in the list or not: the listener hears of them.
        """

        def add() -> LongWork[list[EntryArray]]:
            listener.begin(self._mode)
            self.listeners.add(listener)
            return (yield from copied(self.cache.index))

        return unpacked(self.scheduler.carry_out(add()).result())

    def unlisten(self, listener: Listener) -> None:
        """Removes a listener. Thread-safe; waits for the current step."""
        self.scheduler.call(lambda: self.listeners.remove(listener)).result()

    def _observed(self, outcome: Outcome) -> None:
        report = outcome.report
        self._seconds = 0.8 * self._seconds + 0.2 * (report.prefill + report.decode)
        for observer in self._observers:
            observer(outcome)

    @property
    def alive(self) -> bool:
        """Whether requests can be served: the engine thread runs."""
        return self.scheduler.alive

    def snapshot(self) -> dict[str, Any]:
        """Current gauges. Thread-safe. Each value is read once, so two values may differ by a step."""
        memory, disk, shared = self.cache.memory, self.cache.disk, self.cache.shared
        return {
            "running": self.scheduler.running,
            "waiting": self.scheduler.queued,
            "slots": [
                {"id": slot.number, "n_ctx": self.ctx, "tokens": len(slot), "is_processing": slot.busy}
                for slot in self.scheduler.slots
            ],
            "tiers": {
                tier.name: {"used": tier.used, "reserved": tier.reserved, "budget": tier.budget, "entries": len(tier)}
                for tier in (memory, disk)
                if tier.budget
            },
            "counters": {
                memory.name: dict(self.cache.store.counters),
                disk.name: dict(disk.counters),
                **({shared.name: dict(shared.counters)} if shared.on else {}),
            },
            "settle": dict(self.scheduler.settle.counters),
        }

    def compare(self, prompt: Prompt, earlier: Prompt | Record) -> Explanation | None:
        """Which tokens `prompt` would recompute right after `earlier`, and why. None if only its new text. Thread-safe."""
        with self.prompts.tokenizer_open() as tokenizer:

            def characters(tokens: Tokens) -> int:
                return len(b"".join(map(tokenizer.token_bytes, tokens.tolist())).decode("utf-8", "replace"))

            pace = self.scheduler.pace
            return compare(prompt, earlier, block_size=self.engine.traits.block_size, pace=pace, characters=characters)

    def close(self, seconds: float | None = None, *, settle: bool = False) -> None:
        """Fails all running requests, and frees the model. Idempotent. In a forked process it does nothing.

        Args:
            seconds: most seconds for all of this. None limits only the disk, by the setting `drain`.
            settle: whether to settle finished turns first, because the model will be loaded again soon. Where a shared store
                is written they always are.
        """
        if self.scheduler.process.left:  # the model, its threads and its files belong to the process that loaded it
            return
        ends = None if seconds is None else time.monotonic() + seconds
        if not self.prompts.gate.shut():
            return
        left = self.settings.drain if ends is None else max(0.0, ends - time.monotonic())
        # Only canonical KV leaves the machine, so what is not settled would be computed again elsewhere.
        settles = settle or "leaving" in self.cache.shared.saves
        self.scheduler.close(time.monotonic() + SETTLE_SHARE * left if settles else -math.inf)
        self.prompts.gate.wait()
        ends = time.monotonic() + self.settings.drain if ends is None else ends
        ended = [tier.close(max(0.0, ends - time.monotonic())) for tier in (self.cache.disk, self.cache.shared)]
        if all(ended):  # or one may still read from memory
            self.cache.memory.close()
        self._thread.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _disk(engine: Engine, settings: Settings, memory: int, terms: Terms, clock: Callable[[], float]) -> DiskTier:
    """The tier below memory. The server also starts if the disk cannot be used."""
    folder = settings.cache_dir
    if folder is None or not engine.traits.movable:
        return NoDisk()
    folder = folder.absolute()  # the process may change its current folder
    file = str(engine.facts.details.get("path", ""))
    name = model_name(file) if file else engine.facts.name
    known = StoredModel.of(name, str(Path(file).absolute()) if file else "")  # others look for it from other folders

    def opened() -> Disk:
        disk = Disk(folder, settings.disk_budget, settings.tenant_disk, clock, check=False)
        disk.learn(engine.fingerprint, known)
        return disk

    return WriteBehind(opened, engine.fingerprint, int(QUEUE_SHARE * memory), terms, clock)


def check_shared(settings: Settings) -> None:
    """Raises ConfigError if the shared store of the settings is set up wrongly. It is to be found before a model is loaded."""
    if settings.shared is not None:
        from headstart.tiers.shared.opened import check

        check(settings.shared, settings.shared_key_file, encrypt=settings.shared_encrypt)


def _shared(
    engine: Engine, settings: Settings, memory: int, terms: Terms, clock: Callable[[], float], listener: SharedListener
) -> SharedTier:
    """The tier that many servers share. Raises ConfigError if it is set up wrongly. The store itself need not be there."""
    if settings.shared is None or not engine.traits.movable:
        return NoShared()
    if not engine.traits.canonical:
        log.warning("nothing is shared: on this machine the model does not compute the same bits each time")
        return NoShared()
    from headstart.tiers.shared.opened import opened  # with libraries that only this needs

    return opened(
        settings.shared,
        settings.shared_key_file,
        encrypt=settings.shared_encrypt,
        writes=settings.shared_mode == "readwrite",
        expire=settings.shared_expire,
        engine=engine,
        room=int(SHARED_SHARE * memory),
        terms=terms,
        wall=clock,
        listener=listener,
    )


def _reply_tokens_of(shared: SharedTier, fingerprint: bytes, salt: str, key: bytes) -> ReplyTokensRecord | None:
    """The tokens of a reply that another server has made."""
    note = shared.find_note(owner_of(root_id(fingerprint, salt)), key)
    try:
        return None if note is None else ReplyTokensRecord.unpack(key, note.value)
    except ValueError:
        return None


def _both(sinks: Sequence[Sink]) -> Sink:
    if len(sinks) == 1:
        return sinks[0]

    def send(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return send
