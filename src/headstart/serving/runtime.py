"""Runtime: one loaded model, ready to serve. What the API, the library and the command line stand on."""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from headstart import templates
from headstart.config import Settings
from headstart.errors import ConfigError, ContextTooLong, InvalidRequest, Overloaded, Unavailable
from headstart.explain.explain import Explanation, compare
from headstart.explain.record import Record
from headstart.interfaces.conversation import Conversation
from headstart.interfaces.engine import Engine, Grammar, Sampling, Tokenizer
from headstart.interfaces.tokens import Tokens
from headstart.model_names import model_name
from headstart.names import OptionText, option
from headstart.prefix_cache.blocks import root_id
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.planner import Mode
from headstart.prefix_cache.quota import owner_of, quota
from headstart.prompt.builder import Prompt, Prompter
from headstart.prompt.chat_template import Template
from headstart.serving.cache import Cache
from headstart.serving.expiry import Erasure
from headstart.serving.job import Ticket
from headstart.serving.kv_store import KvStore
from headstart.serving.request import Event, Request, Sink
from headstart.serving.scheduler import Outcome, Scheduler
from headstart.tiers.disk import Disk, StoredModel
from headstart.tiers.disk_tier import DiskTier
from headstart.tiers.memory import Memory
from headstart.tiers.no_disk import NoDisk
from headstart.tiers.write_behind import WriteBehind
from headstart.units import count

log = logging.getLogger("headstart.model")

QUEUE_SHARE = 0.25
"""Most of the memory budget that may wait for the disk: what waits cannot be evicted."""
TRUNCATED_SHARE = 0.75
"""Share of the context that a sliding conversation may fill; the rest is for the reply."""


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
        """Stops it at the next token or block boundary; its finished blocks are kept. Thread-safe, idempotent, immediate."""
        self._ticket.cancel()
        self._scheduler.wake()


class Runtime:
    """Owns the engine, the cache and the scheduler of one model.

    Args:
        engine: closed together with the runtime.
        settings: here matter `reuse`, `overflow`, `queue`, `stall`, `chat_template` and those of the tiers.
        observe: told of every finished choice, on the engine thread.
        clock: seconds since 1970, for `expire`.

    Attributes:
        sampling: of requests that do not say how.
        chat_template: what conversations are rendered with, and where that comes from.

    Raises:
        ConfigError: exact mode was asked of an engine that cannot prove it, or the chat template is broken.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings | None = None,
        observe: Callable[[Outcome], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        settings = settings or Settings()
        if settings.reuse == "exact" and not engine.traits.exact:
            reasons = "; ".join(engine.traits.notes)
            raise ConfigError(f"Exact reuse cannot be proved for this model ({reasons}); use {option('reuse', 'fast')}.")
        self.engine = engine
        self.settings = settings
        self.reuse = settings.reuse
        self.overflow = settings.overflow
        chosen = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        self.sampling = Sampling(**{name: value for name, value in chosen.items() if value is not None})
        self._mode = Mode(settings.reuse == "exact", engine.traits)
        self.chat_template = settings.template() or templates.of_model(engine.tokenizer.chat_template)
        template = Template(self.chat_template.source, engine.tokenizer.names)
        self.prompter = Prompter(engine.tokenizer, template, use_reply_tokens=settings.reuse == "fast")
        if self.chat_template.origin == "none":
            log.warning("chat template: %s", self.template_facts)
        cell = engine.traits.block_size * engine.shape.kv_bytes_per_token
        budget = engine.shape.memory if settings.memory_budget is None else settings.memory_budget
        memory = Memory(cell, budget, engine.shape.state_bytes, quota(settings.tenant_memory, budget))
        self.clock = clock
        self._terms = Terms(math.inf if settings.expire is None else settings.expire)
        disk, reply_tokens = _disk(engine, settings, budget, self._terms, clock), self.prompter.reply_tokens
        store = KvStore(
            *(engine, memory, self._mode, time.monotonic), disk=disk, reply_tokens=reply_tokens, terms=self._terms, wall=clock
        )
        self.cache = Cache(engine, self._mode, store)
        self.cache.store.offload.settle()  # the first prompt is made before the first request is
        self._observers: list[Callable[[Outcome], None]] = [observe] if observe else []
        self.scheduler = Scheduler(
            engine,
            self.cache,
            self.prompter,
            self._mode,
            stall=settings.stall,
            settles=settings.settle == "on",
            explains=settings.explain == "on",
            observe=self._observed,
        )
        self._entrance = threading.Lock()  # the queue is looked at and joined in one step
        self._watchers: list[Callable[[Request], Sink]] = []
        self._users = 0  # of the tokenizer
        self._users_changed = threading.Condition()
        self._seconds = 1.0  # smoothed seconds a choice holds a slot, for retry-after
        self._closed = False

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def template_facts(self) -> OptionText:
        """One line on the chat template, for people."""
        return OptionText(self.chat_template.described(control.text for control in self.engine.tokenizer.controls))

    @property
    def ctx(self) -> int:
        """Tokens a conversation may hold."""
        return self.engine.shape.ctx

    def chat_prompt(self, conversation: Conversation, *, use_reply_tokens: bool = True) -> Prompt:
        """Renders and tokenises a conversation. Thread-safe; takes milliseconds.

        Args:
            spelled: whether earlier replies in it keep the tokens that they were made of.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
            ContextTooLong: the conversation exceeds the context, and `overflow` is `error` (or its last exchange does).
        """
        with self.tokenizer_open():
            if self.overflow == "slide":
                prompt = self.prompter.truncated_chat(
                    conversation, int(self.ctx * TRUNCATED_SHARE), use_reply_tokens=use_reply_tokens
                )
            else:
                prompt = self.prompter.chat(conversation, use_reply_tokens=use_reply_tokens)
            return self._fitting(prompt, "messages")

    def shared_prefix_prompt(self, conversation: Conversation) -> Prompt:
        """What all continuations of a conversation begin with. Raises what `chat_prompt` raises."""
        with self.tokenizer_open():
            return self._fitting(self.prompter.shared_prefix(conversation), "messages")

    def text_prompt(self, text: str | Sequence[int], *, salt: str = "", use_reply_tokens: bool = True) -> Prompt:
        """Tokenises a raw text (control spellings are control tokens), or takes tokens as they are. Thread-safe.

        Raises:
            InvalidRequest: an empty prompt, or unknown tokens.
            ContextTooLong: it exceeds the context.
        """
        with self.tokenizer_open():
            if isinstance(text, str):
                return self._fitting(self.prompter.text(text, salt=salt, use_reply_tokens=use_reply_tokens), "prompt")
            return self._fitting(self.prompter.tokens(text, salt=salt), "prompt")

    @contextmanager
    def tokenizer_open(self) -> Iterator[Tokenizer]:
        """Keeps the model from being freed while its tokenizer is in use. Thread-safe.

        Raises:
            Unavailable: the runtime is closed.
        """
        with self._users_changed:
            if self._closed:
                raise Unavailable("The server is stopping.")
            self._users += 1
        try:
            yield self.engine.tokenizer
        finally:
            with self._users_changed:
                self._users -= 1
                self._users_changed.notify_all()

    def _fitting(self, prompt: Prompt, param: str) -> Prompt:
        if not len(prompt):
            raise InvalidRequest("The prompt is empty.", param=param)
        if len(prompt) >= self.ctx:
            raise ContextTooLong(len(prompt), self.ctx, param=param, slides=self.overflow == "slide")
        return prompt

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def check_grammar(self, grammar: Grammar, *, salt: str = "", param: str | None = "grammar") -> Grammar:
        """Compiles a grammar ahead of `submit`, which would do it otherwise. Thread-safe; takes up to some seconds, once
        for each `salt`. Returns it as a request should have it.

        Raises:
            InvalidRequest: it cannot be followed; the message is about `param`.
            Overloaded: too many are in use.
        """
        with self.tokenizer_open():
            return self.engine.check_grammar(replace(grammar, salt=salt), param)

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Queues a request; its events go to `sink`, on the engine thread. Thread-safe.

        Raises:
            Overloaded: the queue is full.
            Unavailable: the runtime is closed.
            ContextTooLong: the prompt does not fit.
            InvalidRequest: a bias for a token that the model does not have, or a grammar that cannot be followed.
        """
        self._fitting(request.prompt, "prompt")
        n_vocab = self.engine.tokenizer.n_vocab
        if strange := [token for token, _ in request.sampling.logit_bias if not 0 <= token < n_vocab]:
            raise InvalidRequest(f"Invalid 'logit_bias': token {strange[0]} is not in [0, {n_vocab}).", param="logit_bias")
        if request.grammar is not None:
            if request.ignore_eos:
                raise InvalidRequest("Invalid 'ignore_eos': a grammar says where the reply ends.", param="ignore_eos")
            grammar = self.check_grammar(request.grammar, salt=request.prompt.salt)
            request = replace(request, grammar=grammar)  # which holds what was compiled until it is answered
        if self._closed:
            raise Unavailable("The server is stopping.")
        if request.prompt_logprobs is not None:
            request = replace(request, reuse=False)
        with self._entrance:
            waiting = self.scheduler.queued
            if waiting >= self.settings.queue:
                wait = max(1.0, waiting * self._seconds / self.engine.shape.slots)
                queue = count(waiting, "request")
                raise Overloaded(f"{queue} waiting already; try again in {wait:.0f} s.", retry_after=wait)
            ticket = Ticket(request, _both([sink, *(watcher(request) for watcher in self._watchers)]))
            self.scheduler.submit(ticket)
        return Handle(ticket, self.scheduler)

    def erase(self, slot: int) -> int | None:
        """Forgets what a slot holds, and nothing that is stored. Thread-safe; waits for the step under way.

        Returns: how many tokens that was; None if the slot is in use.

        Raises:
            Unavailable: the runtime is closed.
        """
        if self._closed:
            raise Unavailable("The server is stopping.")
        return self.scheduler.erase(slot).result()

    def keep(self, salt: str, seconds: float | None) -> None:
        """Says how long what is written under a salt of this owner may be kept; None for as long as anybody's. Thread-safe.

        It holds for what other models, engines and settings have left in the folder, too.
        """
        for fingerprint in (self.engine.fingerprint, *self.cache.disk.foreign()):
            self._terms.give(owner_of(root_id(fingerprint, salt)), seconds)

    def keep_all(self, seconds: float) -> None:
        """Says that nothing may be kept longer, whoever has written it. Thread-safe."""
        self._terms.cap(seconds)

    def due(self, salt: str, written: float) -> bool:
        """Whether what was written under a salt at a time has been kept for long enough. Thread-safe."""
        owner = owner_of(root_id(self.engine.fingerprint, salt))
        return written <= self._terms.due(owner, self.clock())

    def on_erase(self, tell: Callable[[Erasure], None]) -> None:
        """Adds somebody who keeps callers' texts; called on the engine thread when some have to go."""
        self.scheduler.expiry.observe(tell)

    def observe(self, observer: Callable[[Outcome], None]) -> None:
        """Adds an observer of finished choices; it is called on the engine thread and must return at once."""
        self._observers.append(observer)

    def watch(self, watcher: Callable[[Request], Sink]) -> None:
        """Gives the events of each later request also to a sink of `watcher`'s making."""
        self._watchers.append(watcher)

    def _observed(self, outcome: Outcome) -> None:
        report = outcome.report
        self._seconds = 0.8 * self._seconds + 0.2 * (report.prefill + report.decode)
        for observer in self._observers:
            observer(outcome)

    def snapshot(self) -> dict[str, Any]:
        """Gauges now. Thread-safe: each value is read once, together they may be a step apart."""
        memory, disk = self.cache.memory, self.cache.disk
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
            "counters": {memory.name: dict(self.cache.store.counters), disk.name: dict(disk.counters)},
            "settle": dict(self.scheduler.settle.counters),
        }

    def compare(self, prompt: Prompt, earlier: Prompt | Record) -> Explanation | None:
        """What `prompt` would compute again right after `earlier`, and why; None for its new text only. Thread-safe."""
        with self.tokenizer_open() as tokenizer:

            def characters(tokens: Tokens) -> int:
                return len(b"".join(map(tokenizer.token_bytes, tokens.tolist())).decode("utf-8", "replace"))

            pace = self.scheduler.pace
            return compare(prompt, earlier, block_size=self.engine.traits.block_size, pace=pace, characters=characters)

    def close(self, seconds: float | None = None) -> None:
        """Fails what is running, and frees the model. Idempotent.

        Args:
            seconds: how long that may take, in all; None to give as long as the settings say to the disk alone.
        """
        ends = None if seconds is None else time.monotonic() + seconds
        with self._users_changed:
            if self._closed:
                return
            self._closed = True
        self.scheduler.close()
        with self._users_changed:
            self._users_changed.wait_for(lambda: self._users == 0)
        if self.cache.disk.close(self.settings.drain if ends is None else max(0.0, ends - time.monotonic())):
            self.cache.memory.close()
        self.engine.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _disk(engine: Engine, settings: Settings, memory: int, terms: Terms, clock: Callable[[], float]) -> DiskTier:
    """The tier below memory. A disk that cannot be used is no reason not to serve."""
    folder = settings.cache_dir
    if folder is None or not engine.traits.movable:
        return NoDisk()
    file = str(engine.facts.details.get("path", ""))
    known = StoredModel.of(model_name(file) if file else engine.facts.name, file)

    def opened() -> Disk:
        disk = Disk(folder, settings.disk_budget, settings.tenant_disk, clock)
        with suppress(sqlite3.Error):  # names can wait; what else is wrong is found out soon enough
            disk.catalog.learn(engine.fingerprint, known)
        return disk

    return WriteBehind(opened, engine.fingerprint, int(QUEUE_SHARE * memory), terms, clock)


def _both(sinks: Sequence[Sink]) -> Sink:
    if len(sinks) == 1:
        return sinks[0]

    def tell(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return tell
