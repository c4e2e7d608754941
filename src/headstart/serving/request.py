"""A request, and what comes back: the events of its life, in order.

Progress* → Started → Delta* → Finished          (one Started, Deltas and Finished for each choice)
                 any time: Failed                           (last event of the whole request)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from headstart.errors import HeadstartError
from headstart.explain.causes import Cause
from headstart.explain.explain import Explanation
from headstart.interfaces.conversation import Message
from headstart.interfaces.engine import Grammar, Logits, Sampling
from headstart.prompt.builder import Prompt

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """What to compute.

    Attributes:
        max_tokens: most tokens of a reply; None for as many as the context holds; 0 only fills the cache.
        stop: texts that end a reply and are not part of it.
        choices: replies to draw; the prompt is computed once.
        reuse: whether cached rows may be used for this request.
        ignore_eos: the model's end tokens are never drawn (benchmarks).
        prompt_logprobs: report the log-probability of each prompt token (bypasses the cache).
        keep_logits: return the logits at the end of the prompt.
        grammar: what a whole reply must be; one that `max_tokens` or a stop text cuts off is its beginning.
        visible: control tokens whose text is part of the reply.
        returns: makes of a reply's text, and of whether it was cut, the message that the client will send back; None if its
            content is the text.
        id: the name under which it can be explained later; "" for none.
        alias: the id that its answer has for the caller; "" for none.
        tenant: who asks; "" if nobody knows. Nobody is told of another's requests.
        session: a hint of the conversation that it belongs to; "" for none.
    """

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    reuse: bool = True
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    keep_logits: bool = False
    grammar: Grammar | None = None
    visible: frozenset[int] = frozenset()
    returns: Callable[[str, bool], Message] | None = None
    id: str = ""
    alias: str = ""
    tenant: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability under the model (before sampling options)."""

    token: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What a request (one choice of it) computed, and why. Tokens, and seconds.

    `prompt` = `live` + `restored` + `computed`; `cached` = `live` + `restored`.

    Attributes:
        prompt: all tokens of the prompt.
        live: prompt tokens that lay in the slot already.
        restored: prompt tokens that were loaded from memory or disk.
        cached: prompt tokens that were not computed.
        completion: tokens of the reply, the end token included.
        mode: `Settings.reuse`.
        computed: prompt tokens that entered the engine, counted there.
        tiers: tokens restored from each tier.
        explanation: why more was computed than the request newly brought; None if that is all that was.
        queued: seconds of waiting for a slot.
        prefill: seconds from the slot to the first token.
        ttft: seconds from arrival to the first token.
        decode: seconds from the first token to the last.
        dropped: messages that were left out of a conversation longer than the context (`overflow="slide"`).
    """

    prompt: int
    live: int
    restored: int
    computed: int
    completion: int
    mode: Literal["fast", "exact"]
    tiers: dict[str, int] = field(default_factory=dict)
    explanation: Explanation | None = None
    queued: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    decode: float = 0.0
    dropped: int = 0

    @property
    def cached(self) -> int:
        return self.live + self.restored

    @property
    def cause(self) -> Cause | None:
        """That of the explanation, if there is one."""
        return self.explanation.cause if self.explanation is not None else None


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill goes on: `done` of `total` prompt tokens are in place, `cached` of them were not computed."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt of this choice is in place; its first token is next."""

    choice: int
    report: Report
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    logits: Logits | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of a reply: what has become certain (whole characters, no part of a stop text).

    `tokens`: of the reply so far.
    """

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice is complete. `tokens`: what was sampled, the end token included. `stopped_by`: the stop text, if one was hit."""

    choice: int
    reason: StopReason
    report: Report
    tokens: tuple[int, ...] = ()
    stopped_by: str | None = None

    @property
    def cut(self) -> bool:
        """Whether the reply would have gone on."""
        return self.reason == "length" or self.stopped_by is not None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ends here."""

    error: HeadstartError


Event = Progress | Started | Delta | Finished | Failed
Sink = Callable[[Event], None]
"""Receives a request's events, on the engine thread: it must hand over and return at once."""
