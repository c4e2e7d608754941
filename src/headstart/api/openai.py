"""OpenAI's routes: chat completions, completions, models."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.call import Call, Disconnected
from headstart.api.describe import ERRORS, STREAMED, takes
from headstart.api.faults import CLIENT_CLOSED
from headstart.api.normalise import normalise, normalise_tools
from headstart.api.schema import ChatRequest, CompletionRequest, Generation, TemplateRequest, parse
from headstart.api.service import Service, service_of
from headstart.api.stream import EventStream, Script
from headstart.api.wire import Chat, Dialect, Head, Text
from headstart.core.prompt import Prompt
from headstart.engines.base import Sampling
from headstart.runtime.request import Request
from headstart.runtime.runtime import Runtime

router = APIRouter()
Understand = Callable[[Service, Runtime, bytes], "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """A body, understood: one request for each prompt, and how to answer. `salt` and `model` are already checked."""

    form: Generation
    requests: list[Request]
    dialect: type[Dialect]
    logprobs: bool
    echo: bool = False


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses={**ERRORS, **STREAMED})
async def chat_completions(request: HttpRequest) -> Response:
    """Continues a conversation."""
    return await _serve(request, _chat)


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses={**ERRORS, **STREAMED})
async def completions(request: HttpRequest) -> Response:
    """Continues raw texts or tokens."""
    return await _serve(request, _completion)


@router.post("/v1/chat/completions/input_tokens", openapi_extra=takes(TemplateRequest), responses=ERRORS)
async def input_tokens(request: HttpRequest) -> Response:
    """Counts the tokens of a conversation."""
    prompt = await render(request)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt)})


@router.get("/v1/models", responses=ERRORS)
async def models(request: HttpRequest) -> Response:
    """Lists the served model."""
    service = service_of(request)
    service.ready()
    return JSONResponse({"object": "list", "data": [_card(service)]})


@router.get("/v1/models/{model_id:path}", responses=ERRORS)
async def model(request: HttpRequest, model_id: str) -> Response:
    """Describes the served model."""
    service = service_of(request)
    service.ready()
    service.check_model(model_id)
    return JSONResponse(_card(service))


async def render(request: HttpRequest) -> Prompt:
    """The prompt of a body with messages."""
    service = service_of(request)
    runtime = service.ready()
    data = await service.body(request)

    def build() -> Prompt:
        form = parse(TemplateRequest, data)
        return runtime.chat_prompt(
            normalise(form.messages), tools=normalise_tools(form.tools), **(form.chat_template_kwargs or {})
        )

    return await asyncio.to_thread(build)


def _card(service: Service) -> dict[str, object]:
    runtime = service.ready()
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "headstart",
        "aliases": list(service.aliases),
        "meta": {"n_ctx": runtime.ctx, "n_vocab": runtime.engine.tokenizer.n_vocab, **runtime.engine.facts.details},
    }


# ── the life of a call ───────────────────────────────────────────────────────────────────────────────────────────────


async def _serve(request: HttpRequest, understand: Understand) -> Response:
    arrived = time.monotonic()
    service = service_of(request)
    runtime = service.ready()
    data = await service.body(request)
    # Parsing, rendering and tokenising take milliseconds: never on the event loop, where every stream waits for them.
    work = await asyncio.to_thread(understand, service, runtime, data)
    request_id: str = request.scope.get("request_id", "")
    tenant: str = request.scope.get("tenant", "")
    work = replace(work, requests=[replace(one, id=request_id, tenant=tenant) for one in work.requests])
    script = _script(service, runtime, work)
    call = Call(runtime, work.requests, request.receive, beat=service.keep_alive / 2, metrics=service.metrics, arrived=arrived)
    if work.form.stream:
        return EventStream(call, script, service, request_id, progress=bool(work.form.return_progress))
    try:
        async with call:
            while not call.done:
                for number, event in await call.take():
                    script.take(number, event)
    except Disconnected:
        service.unfinished(request_id, "abort")
        return Response(status_code=CLIENT_CLOSED)
    if call.failure is not None:
        raise call.failure
    summary = call.summary()
    service.finished(request_id, summary, call.reasons, call.seconds)
    return JSONResponse(script.dialect.answer(script.choices, summary))


def _script(service: Service, runtime: Runtime, work: Work) -> Script:
    options = work.form.stream_options
    head = Head(
        ("chatcmpl-" if work.dialect is Chat else "cmpl-") + uuid.uuid4().hex,
        int(time.time()),
        service.model_id,
        "fp_" + runtime.engine.fingerprint.hex()[:12],
    )
    wants_usage = bool(work.form.stream and options is not None and options.include_usage)
    dialect = work.dialect(head, usage=wants_usage, logprobs=work.logprobs)
    with runtime.tokenizer_open() as tokenizer:
        return Script(dialect, work.requests, tokenizer.piece, echo=work.echo)


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chat(service: Service, runtime: Runtime, data: bytes) -> Work:
    form = parse(ChatRequest, data)
    service.check_model(form.model)
    top = (form.top_logprobs or 0) if form.logprobs else None
    sampling = _sampling(form, top)
    prompt = runtime.chat_prompt(
        normalise(form.messages),
        tools=normalise_tools(form.tools),
        salt=form.cache_salt or "",
        spelled=form.cache_prompt is not False,
        **(form.chat_template_kwargs or {}),
    )
    limit = form.max_completion_tokens if form.max_completion_tokens is not None else form.max_tokens
    return Work(form, [_request(form, prompt, sampling, limit)], Chat, top is not None)


def _completion(service: Service, runtime: Runtime, data: bytes) -> Work:
    form = parse(CompletionRequest, data)
    service.check_model(form.model)
    sampling = _sampling(form, form.logprobs)
    limit = 16 if form.max_tokens is None else form.max_tokens  # the endpoint's own default
    scored = form.logprobs if form.echo else None
    spelled = form.cache_prompt is not False and scored is None
    prompts = [runtime.text_prompt(prompt, salt=form.cache_salt or "", spelled=spelled) for prompt in form.prompts]
    requests = [replace(_request(form, prompt, sampling, limit), prompt_logprobs=scored) for prompt in prompts]
    return Work(form, requests, Text, form.logprobs is not None, bool(form.echo))


def _request(form: Generation, prompt: Prompt, sampling: Sampling, limit: int | None) -> Request:
    return Request(
        prompt=prompt,
        sampling=sampling,
        max_tokens=None if limit == -1 else limit,
        stop=form.stops,
        choices=form.n or 1,
        reuse=form.cache_prompt is not False,
        ignore_eos=bool(form.ignore_eos),
    )


def _sampling(form: Generation, logprobs: int | None) -> Sampling:
    bias = tuple(sorted((int(token), value) for token, value in (form.logit_bias or {}).items()))
    given = {
        name: value
        for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
        if (value := getattr(form, name)) is not None
    }
    if form.top_k is not None:
        given["top_k"] = max(0, form.top_k)
    seed = None if form.seed == -1 else form.seed  # as llama-server's callers ask for one to be drawn
    return Sampling(**given, logit_bias=bias, seed=seed, logprobs=logprobs)
