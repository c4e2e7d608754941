"""Anthropic's routes: messages, and their tokens counted."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.anthropic.conversation import conversation_of
from headstart.api.anthropic.encode import Manner, MessagesEncoder, SignatureMarks
from headstart.api.anthropic.schema import CountTokensRequest, MessagesRequest
from headstart.api.body import parse
from headstart.api.handler import answer
from headstart.api.openapi import ANTHROPIC_ERRORS, ANTHROPIC_STREAMED, takes
from headstart.api.route import Route
from headstart.api.service import Service, service_of
from headstart.api.understood import Understood, compared, remember
from headstart.chat.chat_model import GenerationParams
from headstart.interfaces.engine import Sampling
from headstart.serving.runtime import Runtime

router = APIRouter(route_class=Route)


@router.post("/v1/messages", openapi_extra=takes(MessagesRequest), responses={**ANTHROPIC_ERRORS, **ANTHROPIC_STREAMED})
async def messages(request: HttpRequest) -> Response:
    """Continues a conversation."""
    return await answer(request, _messages)


@router.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokensRequest), responses=ANTHROPIC_ERRORS)
async def count_tokens(request: HttpRequest) -> Response:
    """Counts the tokens of a conversation, also of one that is too long to be continued."""
    service = service_of(request)
    service.ready()
    data = await service.body(request)

    def counted() -> int:
        form = parse(CountTokensRequest, data)
        service.check_model(form.model)
        return service.chat.count(conversation_of(form, salt_of(service, request, form)))

    return JSONResponse({"input_tokens": await asyncio.to_thread(counted)})


@router.post("/api/event_logging/{kind:path}", include_in_schema=False)
async def event_logging(request: HttpRequest, kind: str) -> Response:
    """Claude Code's telemetry, thrown away. Refused, it would be sent again and again."""
    await service_of(request).body(request)
    return JSONResponse({})


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _messages(service: Service, runtime: Runtime, request: HttpRequest, data: bytes) -> Understood:
    form = parse(MessagesRequest, data)
    service.check_model(form.model)
    salt = salt_of(service, request, form)
    message_id = f"msg_{uuid.uuid4().hex[:24]}"
    made, reader = service.chat.request(conversation_of(form, salt), _params(form, runtime.sampling), message_id)
    previous = form.diagnostics.previous_message_id if form.diagnostics is not None else None
    manner = Manner(
        id=message_id,
        model=service.model_id,
        request_id=request.scope.get("request_id", ""),
        limit=form.max_tokens,
        marks=SignatureMarks.of(made.prompt, form.hours, tools=any(tool.get("cache_control") for tool in form.tools or ())),
        shows=form.thinking is None or form.thinking.display != "omitted",
        edits=form.context_management is not None,
        compares=previous is not None,
        known=previous is None or service.chat.reply_memory.has_told(salt, previous),
        told=compared(runtime, request, made, previous),
    )
    encoder = MessagesEncoder(manner, made, reader)

    def done() -> None:
        remember(service, encoder)
        service.chat.reply_memory.told(salt, message_id)

    return Understood(form, [made], encoder, bool(form.stream), done)


def salt_of(service: Service, request: HttpRequest, form: CountTokensRequest) -> str:
    """The salt of a body's prompt."""
    return service.salt(request, form.metadata.user_id if form.metadata is not None else None, form.cache_salt)


def _params(form: MessagesRequest, usual: Sampling) -> GenerationParams:
    given = {name: value for name in ("temperature", "top_k", "top_p") if (value := getattr(form, name)) is not None}
    stop = tuple(text for text in form.stop_sequences or () if text)
    return GenerationParams(replace(usual, **given), form.max_tokens, stop)
