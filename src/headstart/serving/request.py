"""Request: the prompt and its parameters, and the events that come back, in this order:

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
from headstart.interfaces.engine import Logits
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import Grammar
from headstart.prompt.builder import Prompt
from headstart.serving.turn import Turn

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to compute, with everything that the scheduler needs to know.

    Attributes:
        prompt_logprobs: report the log-probability of each prompt token (bypasses the cache).
        keep_logits: return the logits at the end of the prompt.
        grammar: a complete reply follows it. A reply that `max_tokens` or a stop text cuts off is a prefix of such a text.
        visible: control tokens whose text is part of the reply.
        id: the name under which it can be explained later; "" for none.
        alias: the id of its answer, as the caller sees it; "" for none.
        tenant: who may see an explanation of the request: its owner; "" if unknown.
        session: a hint about the conversation of the request; "" for none.
    """

    prompt: Prompt
    params: GenerationParams = field(default_factory=GenerationParams)
    prompt_logprobs: int | None = None
    keep_logits: bool = False
    grammar: Grammar | None = None
    visible: frozenset[int] = frozenset()
    id: str = ""
    alias: str = ""
    tenant: str = ""
    session: str = ""

    @property
    def settles(self) -> bool:
        """Whether its turn can be settled (`serving/settle`): it is a conversation, gets one reply, and may use the cache."""
        params = self.params
        return self.prompt.source is not None and params.choices == 1 and params.max_tokens != 0 and params.reuse


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability under the model (before sampling options)."""

    token: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What one choice of a request computed, and why, in tokens and seconds.

    `cached` = `live` + `restored`; `prompt` = `cached` + `computed`, unless it was cancelled before.

    Attributes:
        prompt: all tokens of the prompt.
        live: prompt tokens that were in the slot already.
        restored: prompt tokens that were loaded from memory or disk.
        cached: prompt tokens that were not computed.
        completion: tokens of the reply, the end token included.
        mode: `Settings.reuse`.
        computed: prompt tokens that the engine prefilled, counted at the engine.
        tiers: tokens restored from each tier.
        explanation: why more than the new tokens was computed; None if no more was, or if the cause was not looked for.
        explained: whether the cause was looked for (`Settings.explain`).
        queued: seconds in the queue.
        prefill: seconds from getting a slot to the first token.
        ttft: seconds from arrival to the first token.
        decode: seconds from the first token to the last.
        dropped: messages that were left out of a conversation longer than the context (`overflow="truncate"`).
        cancelled: whether the caller stopped it. Times without a first token end there.
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
    explained: bool = True
    cancelled: bool = False

    @property
    def cached(self) -> int:
        return self.live + self.restored

    @property
    def cause(self) -> Cause | None:
        """The cause in the explanation, if there is one."""
        return self.explanation.cause if self.explanation is not None else None


@dataclass(frozen=True, slots=True)
class Progress:
    """The prefill continues: `done` of `total` prompt tokens are in the slot. `cached` of them were not computed."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt of this choice is in the slot. Its first token comes next."""

    choice: int
    report: Report
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    logits: Logits | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of a reply. The text is certain: complete characters, and no part of a stop text.

    Attributes:
        tokens: number of tokens of the reply so far.
    """

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice is complete.

    Attributes:
        tokens: the sampled tokens, the end token included.
        stopped_by: the stop text that ended the reply, if one did.
        turn: for `Runtime.remember`; None if the turn must leave no record.
    """

    choice: int
    reason: StopReason
    report: Report
    tokens: tuple[int, ...] = ()
    stopped_by: str | None = None
    turn: Turn | None = None

    @property
    def cut(self) -> bool:
        """Whether the model would have continued the reply."""
        return self.reason == "length" or self.stopped_by is not None


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole request has failed. No event follows."""

    error: HeadstartError


Event = Progress | Started | Delta | Finished | Failed
Sink = Callable[[Event], None]
"""Receives the events of a request on the engine thread. It must pass them on and return at once."""
