"""Anthropic's routes: messages, and counting their tokens."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.anthropic.encode import CacheMarks, MessageOptions, MessagesEncoder
from headstart.api.anthropic.prompt import messages_of
from headstart.api.anthropic.schema import CountTokensRequest, MessagesRequest
from headstart.api.body import parse
from headstart.api.handler import answer
from headstart.api.openapi import ANTHROPIC_ERRORS, ANTHROPIC_STREAMED, takes
from headstart.api.route import Route
from headstart.api.service import Service, service_of
from headstart.api.understood import Understood, compared
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import Sampling
from headstart.serving.runtime import Runtime

router = APIRouter(route_class=Route)


@router.post("/v1/messages", openapi_extra=takes(MessagesRequest), responses={**ANTHROPIC_ERRORS, **ANTHROPIC_STREAMED})
async def messages(request: HttpRequest) -> Response:
    """Continues a conversation."""
    return await answer(request, _messages)


@router.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokensRequest), responses=ANTHROPIC_ERRORS)
async def count_tokens(request: HttpRequest) -> Response:
    """Counts the tokens of a conversation, even if it is too long for a reply."""
    service = service_of(request)
    service.ready()
    data = await service.body(request)

    def counted() -> int:
        body = parse(CountTokensRequest, data)
        service.check_model(body.model)
        return service.chat.count(messages_of(body, service.salting(request)))

    return JSONResponse({"input_tokens": await asyncio.to_thread(counted)})


@router.post("/api/event_logging/{kind:path}", include_in_schema=False)
async def event_logging(request: HttpRequest, kind: str) -> Response:
    """Discards Claude Code's telemetry. The client would resend it after an error."""
    await service_of(request).body(request)
    return JSONResponse({})


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _messages(service: Service, runtime: Runtime, request: HttpRequest, data: bytes) -> Understood:
    body = parse(MessagesRequest, data)
    service.check_model(body.model)
    conversation = messages_of(body, service.salting(request))
    salt = conversation.salt
    message_id = f"msg_{uuid.uuid4().hex[:24]}"
    built, reader = service.chat.request(conversation, _params(body, runtime.sampling), message_id)
    previous = body.diagnostics.previous_message_id if body.diagnostics is not None else None
    options = MessageOptions(
        id=message_id,
        model=service.model_id,
        request_id=request.scope.get("request_id", ""),
        limit=body.max_tokens,
        marks=CacheMarks.of(built.prompt, body.hours, tools=any(tool.get("cache_control") for tool in body.tools or ())),
        shows=body.thinking is None or body.thinking.display != "omitted",
        edits=body.context_management is not None,
        compares=previous is not None,
        known=previous is None or service.chat.reply_memory.was_sent(salt, previous),
        explain=compared(runtime, request, built, previous),
    )
    encoder = MessagesEncoder(options, built, reader)
    return Understood(body, [built], encoder, bool(body.stream), lambda: service.chat.reply_memory.mark_sent(salt, message_id))


def _params(body: MessagesRequest, usual: Sampling) -> GenerationParams:
    given = {name: value for name in ("temperature", "top_k", "top_p") if (value := getattr(body, name)) is not None}
    stop = tuple(text for text in body.stop_sequences or () if text)
    return GenerationParams(replace(usual, **given), body.max_tokens, stop)
