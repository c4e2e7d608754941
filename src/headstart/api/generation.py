"""Generation: the body fields that set how replies are generated, in the dialects of OpenAI and llama-server."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from headstart.api.body import Body, Whole
from headstart.chat.messages import ChatBody
from headstart.chat.validation import Strict
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import Sampling

TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Strict):
    include_usage: bool | None = None


class Generation(Body):
    """The fields that all endpoints share.

    `n_predict` is llama-server's name for `max_tokens`. `id_slot` has no effect: the planner chooses the slot.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=16)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    max_tokens: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[TokenKey, Bias] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    cache_prompt: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    ignore_eos: bool | None = None
    n_predict: Annotated[Whole, Field(ge=-2, lt=2**31)] | None = None
    id_slot: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None

    @property
    def reuses(self) -> bool:
        """Whether the request may use the cache."""
        return self.cache_prompt is not False

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)


class TemplateRequest(ChatBody):
    """Messages that are only rendered or counted: /apply-template, /v1/chat/completions/input_tokens."""


def wanted_beside(body: Generation) -> dict[str, bool]:
    """Which of llama-server's extra data the caller wants: progress, timings."""
    return {"progress": bool(body.return_progress), "timed": bool(body.timings_per_token)}


def params_of(body: Generation, usual: Sampling, logprobs: int | None, limit: int | None) -> GenerationParams:
    """The generation parameters of a body. `limit`: most tokens; None or negative for as many as fit."""
    return GenerationParams(
        sampling=_sampling(body, usual, logprobs),
        max_tokens=None if limit is not None and limit < 0 else limit,
        stop=body.stops,
        choices=body.n or 1,
        reuse=body.reuses,
        ignore_eos=bool(body.ignore_eos),
    )


def _sampling(body: Generation, usual: Sampling, logprobs: int | None) -> Sampling:
    bias = tuple(sorted((int(token), value) for token, value in (body.logit_bias or {}).items()))
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
        if (value := getattr(body, name)) is not None
    }
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    seed = None if body.seed == -1 else body.seed  # -1: llama-server's value for a random seed
    return replace(usual, **given, logit_bias=bias, seed=seed, logprobs=logprobs)
