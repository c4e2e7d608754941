"""Generation: what bodies of all dialects in OpenAI's and llama-server's form say of how replies are generated."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from headstart.api.body import Body, Whole
from headstart.chat.chat_model import GenerationParams
from headstart.chat.messages import ChatBody
from headstart.chat.validation import Strict
from headstart.interfaces.engine import Sampling

TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Strict):
    include_usage: bool | None = None


class Generation(Body):
    """What all endpoints share. `id_slot` is a hint that nobody needs here: a prompt goes where most of it is.

    `n_predict` is what llama-server calls `max_tokens`.
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
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)


class TemplateRequest(ChatBody):
    """Messages that are rendered and counted, not answered: /apply-template, /v1/chat/completions/input_tokens."""


def wanted_beside(form: Generation) -> dict[str, bool]:
    """What a caller wants to know beside the reply, as llama-server has it."""
    return {"progress": bool(form.return_progress), "timed": bool(form.timings_per_token)}


def params_of(form: Generation, usual: Sampling, logprobs: int | None, limit: int | None) -> GenerationParams:
    """How a body wants its replies. `limit`: most tokens; None and less than 0 for as many as fit."""
    return GenerationParams(
        sampling=_sampling(form, usual, logprobs),
        max_tokens=None if limit is not None and limit < 0 else limit,
        stop=form.stops,
        choices=form.n or 1,
        reuse=form.cache_prompt is not False,
        ignore_eos=bool(form.ignore_eos),
    )


def _sampling(form: Generation, usual: Sampling, logprobs: int | None) -> Sampling:
    bias = tuple(sorted((int(token), value) for token, value in (form.logit_bias or {}).items()))
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
        if (value := getattr(form, name)) is not None
    }
    if form.top_k is not None:
        given["top_k"] = max(0, form.top_k)
    seed = None if form.seed == -1 else form.seed  # as llama-server's callers ask for one to be drawn
    return replace(usual, **given, logit_bias=bias, seed=seed, logprobs=logprobs)
