"""OpenAI's routes: chat completions, completions."""

from __future__ import annotations

import asyncio
import time
import uuid

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.body import parse
from headstart.api.generation import Generation, TemplateRequest, params_of, wanted_beside
from headstart.api.handler import answer
from headstart.api.openai_chat.encode import ChatEncoder, CompletionEncoder, Head
from headstart.api.openai_chat.prompt import chat_of, prompts_of
from headstart.api.openai_chat.schema import ChatRequest, CompletionRequest
from headstart.api.openapi import ERRORS, STREAMED, takes
from headstart.api.route import Route
from headstart.api.service import Service
from headstart.api.understood import Understood, posted
from headstart.serving.request import Request, TokenLogprob
from headstart.serving.runtime import Runtime

router = APIRouter(route_class=Route)


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses={**ERRORS, **STREAMED})
async def chat_completions(request: HttpRequest) -> Response:
    """Continues a conversation."""
    return await answer(request, _chat)


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses={**ERRORS, **STREAMED})
async def completions(request: HttpRequest) -> Response:
    """Continues raw texts or tokens."""
    return await answer(request, _completion)


@router.post("/v1/chat/completions/input_tokens", openapi_extra=takes(TemplateRequest), responses=ERRORS)
async def input_tokens(request: HttpRequest) -> Response:
    """Counts the tokens of a conversation, even if it is too long for a reply."""
    service, conversation = await posted(request)

    def counted() -> int:
        return service.chat.count(conversation())

    return JSONResponse({"object": "response.input_tokens", "input_tokens": await asyncio.to_thread(counted)})


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chat(service: Service, runtime: Runtime, request: HttpRequest, data: bytes) -> Understood:
    body = parse(ChatRequest, data)
    service.check_model(body.model)
    head = _head(service, runtime, "chatcmpl-")
    top = (body.top_logprobs or 0) if body.logprobs else None
    limits = (body.max_completion_tokens, body.max_tokens, body.n_predict)
    limit = next((limit for limit in limits if limit is not None), None)
    conversation = chat_of(body, service.salting(request))
    built, reader = service.chat.request(conversation, params_of(body, runtime.sampling, top, limit), head.id)
    how = {"usage": _wants_usage(body), "logprobs": top is not None, **wanted_beside(body)}
    encoder = ChatEncoder(head, [built], reader, **how)
    return Understood(body, [built], encoder, bool(body.stream))


def _completion(service: Service, runtime: Runtime, request: HttpRequest, data: bytes) -> Understood:
    body = parse(CompletionRequest, data)
    service.check_model(body.model)
    limit = next((limit for limit in (body.max_tokens, body.n_predict) if limit is not None), 16)  # the endpoint's own default
    wanted = params_of(body, runtime.sampling, body.logprobs, limit)
    scored = body.logprobs if body.echo else None
    prompts = [*prompts_of(body, runtime.prompts, service.salting(request))]
    requests = [
        Request(
            prompt,
            wanted,
            prompt_logprobs=scored,
            grammar=service.chat.plain_grammar(next(iter(body.formats), None)),
        )
        for prompt in prompts
    ]
    firsts: list[TokenLogprob] = []
    if scored is not None:
        with runtime.prompts.tokenizer_open() as tokenizer:
            tokens = [int(prompt.tokens[0]) for prompt in prompts]
            firsts = [TokenLogprob(token, tokenizer.token_bytes(token), 0.0) for token in tokens]
    encoder = CompletionEncoder(
        _head(service, runtime, "cmpl-"),
        requests,
        echoed=[prompt.text for prompt in prompts] if body.echo else (),
        firsts=firsts,
        usage=_wants_usage(body),
        logprobs=body.logprobs is not None,
        **wanted_beside(body),
    )
    return Understood(body, requests, encoder, bool(body.stream))


def _head(service: Service, runtime: Runtime, prefix: str) -> Head:
    fingerprint = "fp_" + runtime.engine.fingerprint.hex()[:12]
    return Head(prefix + uuid.uuid4().hex, int(time.time()), service.model_id, fingerprint)


def _wants_usage(body: Generation) -> bool:
    options = body.stream_options
    return bool(body.stream and options is not None and options.include_usage)
