"""Job: one choice of a request on its way through the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import numpy as np

from headstart.explain.explain import Explanation
from headstart.explain.record import Record
from headstart.interfaces.conversation import Message
from headstart.interfaces.engine import Engine, Logits, Sampler, Sampling
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.planner import Plan
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.serving.detokenizer import Detokenizer
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

log = logging.getLogger("headstart.job")


class Ticket:
    """A submitted request, as its caller holds it: the jobs of all its choices are cancelled together.

    Attributes:
        begun: a choice of it has had a slot.
        over: it has failed.
        reports: of its choices by their numbers, in the order in which they began.
    """

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.cancelled = False
        self.begun = False
        self.over = False
        self.reports: dict[int, Report] = {}

    def cancel(self) -> None:
        """Stops it at the next token or block boundary; finished blocks are kept. Thread-safe, idempotent."""
        self.cancelled = True

    def emit(self, event: Event) -> None:
        if self.cancelled or self.over:
            return
        self.over = isinstance(event, Failed)
        try:
            self.sink(event)
        except Exception:  # a caller's fault must not reach other callers
            log.exception("a sink failed; its request ends")
            self.over = True


@dataclass(slots=True, eq=False)
class Job:
    """State of one choice. Waiting without a slot, then prefilling, then (with a `token`) decoding.

    Attributes:
        waits_for: the job that computes a shared prefix, and how far that goes.
        tiers: tokens restored from each tier.
        seen: leading tokens of its prompt that had been used before, and how many prompts had gone on behind them.
        misses: how often its rows turned out bad; after a few it computes everything.
        computed: prompt tokens that entered the engine for this job.
        points, protected: lengths at which its prefill takes checkpoints, and the firm ones of them.
        mark: the last checkpoint that its reply has taken.
        token: the last sampled token, not yet in the engine.
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
    token: int | None = None
    started: float = 0.0
    first: float = 0.0
    explanation: Explanation | None = None
    waits_for: tuple[Job, int] | None = None
    points: tuple[int, ...] = ()
    protected: frozenset[int] = frozenset()
    mark: BlockId | None = None
    misses: int = 0
    seen: tuple[int, int] = (0, -1)
    tiers: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def request_traits(self, pieces: int, reply: int = -1, called: bool | None = None) -> RequestTraits:
        """What is known of it for retention; without a reply, as long as that is not over."""
        known, siblings = self.seen
        return RequestTraits.of(pieces, new=len(self.chain) - known, siblings=siblings, reply=reply, called=called)

    @classmethod
    def all_of(cls, ticket: Ticket, engine: Engine, now: float) -> list[Job]:
        """One job for each choice."""
        request = ticket.request
        root = root_id(engine.fingerprint, request.prompt.salt)
        chain = Chain(root, engine.traits.block_size, request.prompt.tokens)
        hidden = frozenset(control.id for control in engine.tokenizer.controls) - request.visible
        known = engine.tokenizer.token_bytes

        def piece(token: int) -> bytes:
            return b"" if token in hidden else known(token)  # most control tokens are no part of what was said

        return [cls(ticket, choice, chain, now, Detokenizer(piece, request.stop)) for choice in range(request.choices)]

    def sampling(self, engine: Engine) -> Sampling:
        """The choice's own seed, and no end token where the caller wants to go on."""
        sampling = self.request.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + self.choice)
        if self.request.ignore_eos:
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
    def prefilling(self) -> bool:
        return self.slot is not None and self.token is None

    def report(self, mode: str, now: float) -> Report:
        """What it has done so far."""
        assert self.plan is not None
        restored = self.plan.restored
        return Report(
            prompt=len(self.chain),
            live=self.plan.keep,
            restored=restored,
            computed=self.computed,
            completion=len(self.reply.tokens),
            mode="exact" if mode == "exact" else "fast",
            tiers={tier: tokens for tier, tokens in self.tiers.items() if tokens},
            explanation=self.explanation,
            queued=self.started - self.arrived,
            prefill=(self.first or now) - self.started,
            ttft=(self.first or now) - self.arrived,
            decode=now - self.first if self.first else 0.0,
            dropped=self.request.prompt.dropped,
        )

    def record(self, returned: Message, now: float) -> Record:
        """What later requests are told of it. `returned`: the message that the caller will send back of its reply."""
        assert self.slot is not None
        request, reply = self.request, self.reply
        return Record(
            self.root,
            request.prompt.text + reply.text,
            as_tokens([*self.chain.tokens.tolist(), *reply.tokens]),
            self.slot.canonical,
            reply.text,
            source=request.prompt.source,
            returned=returned,
            id=request.id,
            alias=request.alias,
            tenant=request.tenant,
            salt=request.prompt.salt,
            session=request.session,
            time=now,
            reports=self.ticket.reports,
            written=self.slot.now,
        )

    def progress(self) -> None:
        assert self.slot is not None
        assert self.plan is not None
        self.ticket.emit(Progress(len(self.slot), len(self.chain), self.plan.start))

    def start(self, report: Report, logits: Logits | None) -> None:
        self.ticket.reports[self.choice] = report
        self.ticket.emit(Started(self.choice, report, tuple(self.prompt_logprobs), logits))

    def deliver(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        if text or logprobs:
            self.ticket.emit(Delta(self.choice, text, logprobs, len(self.reply.tokens)))

    def finish(self, reason: StopReason, report: Report) -> None:
        report = replace(report, completion=len(self.reply.tokens))
        self.ticket.reports[self.choice] = report
        self.ticket.emit(Finished(self.choice, reason, report, tuple(self.reply.tokens), self.reply.stopped_by))


def log_softmax(logits: Logits) -> Logits:
    """Natural log-probabilities."""
    shifted = logits - logits.max()
    result: Logits = shifted - np.log(np.exp(shifted).sum())
    return result


def token_logprob(logits: Logits, token: int, top: int, engine: Engine) -> TokenLogprob:
    """`token` under `logits`, with the `top` likeliest alternatives."""
    scores = log_softmax(logits)
    piece = engine.tokenizer.token_bytes
    best: list[int] = []
    if top:
        best = np.argpartition(-scores, min(top, len(scores) - 1))[:top].tolist()
        best.sort(key=lambda other: (-float(scores[other]), other))
    return TokenLogprob(
        token, piece(token), float(scores[token]), tuple((other, piece(other), float(scores[other])) for other in best)
    )
