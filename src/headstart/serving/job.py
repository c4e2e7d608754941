"""Job: one choice of a request, from the queue to the end of its reply."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import numpy as np

from headstart.explain.explain import Explanation, NotFetched
from headstart.explain.record import Record
from headstart.interfaces.engine import Engine, Logits
from headstart.interfaces.sampling import Sampler, Sampling
from headstart.interfaces.tokens import BlockId, Tokens, as_tokens
from headstart.prefix_cache.blocks import Chain, block_id, root_id
from headstart.prefix_cache.planner import Plan
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.serving.detokenizer import Detokenizer
from headstart.serving.held_prefix import HeldPrefix
from headstart.serving.request import (
    Delta,
    Event,
    Failed,
    Finished,
    Progress,
    Report,
    Request,
    Sink,
    Started,
    StopReason,
    TokenLogprob,
)
from headstart.serving.slots import Slot
from headstart.serving.turn import Turn
from headstart.tiers.shared_tier import Fetch

log = logging.getLogger("headstart.job")


class Ticket:
    """A submitted request. The jobs of all its choices are cancelled together.

    Attributes:
        begun: a choice of it has had a slot.
        over: it has failed.
        reports: of its choices, by number, in the order in which they began.
    """

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.cancelled = False
        self.begun = False
        self.over = False
        self.reports: dict[int, Report] = {}

    def cancel(self) -> None:
        """Stops the request at the next token or block boundary. Finished blocks are kept. Thread-safe, idempotent."""
        self.cancelled = True

    def emit(self, event: Event) -> None:
        if self.cancelled or self.over:
            return
        self.over = isinstance(event, Failed)
        try:
            self.sink(event)
        except Exception:  # an error of one caller must not reach others
            log.exception("a sink failed; its request ends")
            self.over = True


@dataclass(slots=True, eq=False)
class Job:
    """The state of one choice. It waits without a slot, then prefills, then (with a `token`) decodes.

    Attributes:
        waits_for: the job that computes a shared prefix, and the length of that prefix.
        tiers: tokens restored from each tier.
        seen: how many leading tokens of its prompt were used before, and how many prompts continued after them.
        misses: how many restores failed. After a few, the job computes everything.
        computed: prompt tokens that the engine prefilled for this job, since it has its slot.
        before: those that it prefilled in a slot that it gave back, as far as they are not lost.
        prefilled: when its first call of prefill began, and when its last one ended.
        points: lengths at which its prefill takes checkpoints.
        protected: those of them that are protected points.
        last_checkpoint: the last checkpoint that was taken during its reply.
        fetch: what is on its way from the shared tier.
        late: what is on its way from there while it is computed.
        asks: when it asks there again, and how many seconds after that once more.
        deletion_count: `Expiry.deletion_count` when it asked.
        follows: another job whose fetch brings something that this one lacks.
        last_common: the last block that both prompts share.
        fetched: entries that the shared tier has brought for it, before it began to compute.
        not_fetched: why it did not wait for the shared tier any longer.
        held: its entries in memory, while it waits for the shared tier and until it has loaded them.
        token: the last sampled token, which the engine has not computed yet.
    """

    ticket: Ticket
    choice: int
    chain: Chain
    arrived: float
    reply: Detokenizer
    slot: Slot | None = None
    plan: Plan | None = None
    sampler: Sampler | None = None
    computed: int = 0
    before: int = 0
    prefilled: tuple[float, float] = (0.0, 0.0)
    token: int | None = None
    started: float = 0.0
    first: float = 0.0
    explanation: Explanation | None = None
    explained: bool = True
    waits_for: tuple[Job, int] | None = None
    points: tuple[int, ...] = ()
    protected: frozenset[int] = frozenset()
    last_checkpoint: BlockId | None = None
    misses: int = 0
    seen: tuple[int, int] = (0, -1)
    tiers: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    fetch: Fetch | None = None
    late: Fetch | None = None
    asks: tuple[float, float] = (0.0, 1.0)
    deletion_count: int = 0
    follows: Job | None = None
    last_common: BlockId = b""
    fetched: set[BlockId] = field(default_factory=set)
    not_fetched: NotFetched | None = None
    held: HeldPrefix = field(default_factory=HeldPrefix)

    def request_traits(self) -> RequestTraits:
        """The traits of the request while its reply is not complete."""
        known, siblings = self.seen
        return RequestTraits.of(len(self.chain.ids), new=len(self.chain) - known, siblings=siblings, reply=-1)

    @classmethod
    def all_of(cls, ticket: Ticket, engine: Engine, now: float) -> list[Job]:
        """One job for each choice."""
        request = ticket.request
        root = root_id(engine.fingerprint, request.prompt.salt)
        chain = Chain(root, engine.traits.block_size, request.prompt.tokens)
        hidden = frozenset(control.id for control in engine.tokenizer.controls) - request.visible
        known = engine.tokenizer.token_bytes

        def visible_bytes(token: int) -> bytes:
            return b"" if token in hidden else known(token)  # most control tokens are no part of the text

        return [
            cls(ticket, choice, chain, now, Detokenizer(visible_bytes, request.params.stop))
            for choice in range(request.params.choices)
        ]

    def sampling(self, engine: Engine) -> Sampling:
        """The sampling options of this choice: it has its own seed. With `ignore_eos`, end tokens are never drawn."""
        sampling = self.request.params.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + self.choice)
        if self.request.params.ignore_eos:
            never = tuple((token, float("-inf")) for token in sorted(engine.tokenizer.eog))
            sampling = replace(sampling, logit_bias=(*sampling.logit_bias, *never))
        return sampling

    @property
    def request(self) -> Request:
        return self.ticket.request

    @property
    def root(self) -> BlockId:
        return self.chain.root

    @property
    def parked(self) -> bool:
        """Whether it waits for the shared tier."""
        return self.fetch is not None or self.follows is not None

    @property
    def prefilling(self) -> bool:
        return self.slot is not None and self.token is None

    def prefill_left(self, tokens: int) -> float | None:
        """About how many seconds its prefill of `tokens` more takes; None if none has been computed yet."""
        begun, ended = self.prefilled
        return tokens * (ended - begun) / self.computed if self.computed else None

    def give_back(self) -> None:
        """It leaves its slot before its prompt is computed, to wait in the queue once more."""
        self.before += self.computed
        self.computed = 0
        self.explanation = self.not_fetched = None

    def report(self, *, exact: bool, now: float) -> Report:
        """What the job has computed so far. What it finds of its own, after it gave a slot back, is not cached but computed."""
        assert self.plan is not None
        own = min(self.before, self.plan.start)
        live, restored = max(0, self.plan.keep - own), max(0, self.plan.restored - own)
        tiers = dict(self.tiers)
        for tier in tiers:  # memory first
            taken = min(own, tiers[tier])
            tiers[tier], own = tiers[tier] - taken, own - taken
        return Report(
            prompt=len(self.chain),
            live=live,
            restored=restored,
            computed=self.before + self.computed,
            completion=len(self.reply.tokens),
            mode="exact" if exact else "fast",
            tiers={tier: tokens for tier, tokens in tiers.items() if tokens},
            explanation=self.explanation,
            explained=self.explained,
            queued=self.started - self.arrived,
            prefill=(self.first or now) - self.started,
            ttft=(self.first or now) - self.arrived,
            decode=now - self.first if self.first else 0.0,
            dropped=self.request.prompt.dropped,
        )

    def turn(self, now: float, deletion_count: int, *, settles: bool) -> Turn:
        """The turn, at `now`. Of a cancelled prompt its record has the tokens that were reached."""
        assert self.slot is not None
        request, reply, (known, siblings) = self.request, self.reply, self.seen
        ids = tuple(self.slot.ids)
        tokens = np.concatenate([self.chain.tokens[: len(self.slot)], as_tokens(reply.tokens)])
        record = Record(
            self.root,
            request.prompt.text + reply.text,
            tokens,
            self.slot.canonical,
            reply.text,
            source=request.prompt.source,
            id=request.id,
            alias=request.alias,
            tenant=request.tenant,
            salt=request.prompt.salt,
            session=request.session,
            time=now,
            reports=self.ticket.reports,
            written=self.slot.now,
            ids=self._completed(ids, tokens),
        )
        return Turn(
            prompt=request.prompt,
            chain=self.chain,
            ids=ids,
            reply=reply.text,
            tokens=tuple(reply.delivered()),
            written=self.slot.now,
            deletion_count=deletion_count,
            new=len(self.chain) - known,
            siblings=siblings,
            completion=len(reply.tokens),
            record=record,
            settles=settles and request.settles and bool(reply.tokens),
        )

    def _completed(self, ids: tuple[BlockId, ...], tokens: Tokens) -> tuple[BlockId, ...]:
        """The ids of all full blocks of `tokens`. The last token of a reply is in no slot, but it may end a block."""
        size = self.chain.block_size
        while len(ids) < len(tokens) // size:
            ids = (*ids, block_id(ids[-1] if ids else self.root, tokens[len(ids) * size : (len(ids) + 1) * size]))
        return ids

    def progress(self) -> None:
        assert self.slot is not None
        assert self.plan is not None
        self.ticket.emit(Progress(len(self.slot), len(self.chain), max(0, self.plan.start - self.before)))

    def start(self, report: Report, logits: Logits | None) -> None:
        self.ticket.reports[self.choice] = report
        self.ticket.emit(Started(self.choice, report, tuple(self.prompt_logprobs), logits))

    def deliver(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        if text or logprobs:
            self.ticket.emit(Delta(self.choice, text, logprobs, len(self.reply.tokens)))

    def finish(self, reason: StopReason, report: Report, turn: Turn | None) -> None:
        self.ticket.reports[self.choice] = report
        self.ticket.emit(Finished(self.choice, reason, report, tuple(self.reply.tokens), self.reply.stopped_by, turn))


def log_softmax(logits: Logits) -> Logits:
    """Natural log-probabilities."""
    shifted = logits - logits.max()
    result: Logits = shifted - np.log(np.exp(shifted).sum())
    return result


def token_logprob(logits: Logits, token: int, top: int, engine: Engine) -> TokenLogprob:
    """The log-probability of `token` under `logits`, with the `top` likeliest tokens."""
    scores = log_softmax(logits)
    token_bytes = engine.tokenizer.token_bytes
    best: list[int] = []
    if top:
        best = np.argpartition(-scores, min(top, len(scores) - 1))[:top].tolist()
        best.sort(key=lambda other: (-float(scores[other]), other))
    return TokenLogprob(
        token,
        token_bytes(token),
        float(scores[token]),
        tuple((other, token_bytes(other), float(scores[other])) for other in best),
    )
