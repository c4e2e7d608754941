"""Responses: OpenAI's newer endpoint. It has items in place of messages, and a store for clients that send only new items."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.body import parse
from headstart.api.generation import params_of
from headstart.api.handler import answer
from headstart.api.openai_responses.encode import ResponseEncoder
from headstart.api.openai_responses.prompt import ResponsesInputReader
from headstart.api.openai_responses.schema import ResponsesInput, ResponsesRequest
from headstart.api.openai_responses.store import PREFIX, StoredResponse, UnknownResponse, listed
from headstart.api.openapi import ERRORS, STREAMED, takes
from headstart.api.route import Route
from headstart.api.service import Service, service_of
from headstart.api.understood import Understood, compared
from headstart.errors import InvalidRequest, RequestError
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime

router = APIRouter(route_class=Route)


Who = Annotated[str | None, Query(max_length=1024)]


def _whose(request: HttpRequest, cache_salt: Who = None, user: Who = None) -> str:
    """The salt of a stored response. The query needs the `cache_salt` of the body that made it and, if users are isolated, its
    `user`."""
    service = service_of(request)
    service.ready()
    return service.salt(request, user or None, cache_salt or None)


Whose = Annotated[str, Depends(_whose)]


class NotHere(RequestError):
    status = 404
    code = "not_supported"


@router.post("/v1/responses", openapi_extra=takes(ResponsesRequest), responses={**ERRORS, **STREAMED})
async def responses(request: HttpRequest) -> Response:
    """Answers items with items."""
    return await answer(request, _response)


@router.post("/v1/responses/input_tokens", openapi_extra=takes(ResponsesInput), responses=ERRORS)
async def input_tokens(request: HttpRequest) -> Response:
    """Counts the tokens of a response's prompt, even if it is too long for a reply."""
    service = service_of(request)
    service.ready()
    data = await service.body(request)

    def counted() -> int:
        body = parse(ResponsesInput, data)
        service.check_model(body.model)
        conversation, _ = ResponsesInputReader(service.responses, service.salting(request), body).conversation()
        return service.chat.count(conversation)

    return JSONResponse({"object": "response.input_tokens", "input_tokens": await asyncio.to_thread(counted)})


@router.post("/v1/responses/compact", openapi_extra=takes(ResponsesInput), responses=ERRORS)
async def compact(request: HttpRequest) -> Response:
    """Not supported: says what to do instead."""
    raise NotHere("Compaction is not supported: ask the model for a summary of the conversation, and send it as a message.")


@router.get("/v1/responses/{response_id}", responses=ERRORS)
async def retrieve(request: HttpRequest, response_id: str, owner: Whose, stream: bool = False) -> Response:
    """A stored response."""
    if stream:
        raise InvalidRequest("Invalid 'stream': a complete response cannot be streamed again.", param="stream")
    return JSONResponse(service_of(request).responses.get(owner, response_id).response)


@router.delete("/v1/responses/{response_id}", responses=ERRORS)
async def delete(request: HttpRequest, response_id: str, owner: Whose) -> Response:
    """Forgets a stored response."""
    service_of(request).responses.drop(owner, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", responses=ERRORS)
async def input_items(
    request: HttpRequest,
    response_id: str,
    owner: Whose,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The items of the body that a stored response answered."""
    stored = service_of(request).responses.get(owner, response_id)
    items = [listed(item) for item in (stored.input if order == "asc" else reversed(stored.input))]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise UnknownResponse(f"Item with id '{after[:100]}' not found.", param="after", code="item_not_found")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    more = len(items) > limit
    return JSONResponse({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _response(service: Service, runtime: Runtime, request: HttpRequest, data: bytes) -> Understood:
    body = parse(ResponsesRequest, data)
    service.check_model(body.model)
    id = service.new_id(PREFIX)
    source = ResponsesInputReader(service.responses, service.salting(request), body, id)
    conversation, tools = source.conversation()
    options, reasoning = body.prompt_cache_options, body.reasoning
    limit = 0 if options is not None and options.prewarm else body.max_output_tokens
    params = replace(params_of(body, runtime.sampling, body.logprobs, limit), choices=1)
    built, reader = service.chat.request(conversation, params, id)
    summary = (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None
    summary = None if summary == "none" else summary
    moment = service.chat.moment()
    compared_id = options.comparison_response_id if options is not None else None

    def keep(response: dict[str, Any]) -> None:
        service.responses.meet(source.salt, id)
        stored = StoredResponse.of(response, source.own, source.before, moment.time)
        if body.store is not False and not service.must_forget(source.salt, replace(moment, time=stored.written)):
            service.responses.put(source.salt, stored)

    encoder = ResponseEncoder(
        _head(service, runtime, body, built, id, summary),
        built,
        reader,
        tools,
        summarised=summary is not None,
        sealed=body.includes("reasoning.encrypted_content"),
        logprobs=body.logprobs is not None,
        known=None if compared_id is None else service.responses.met(source.salt, compared_id),
        explain=compared(runtime, request, built, compared_id),
        keep=keep,
    )
    return Understood(body, [built], encoder, bool(body.stream))


def _head(
    service: Service, runtime: Runtime, body: ResponsesRequest, built: Request, id: str, summary: str | None
) -> dict[str, Any]:
    """The fields of a response's object that are known from the start."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
    chosen = body.tool_choice
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": service.model_id,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.effort, "summary": summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": built.params.sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": (chosen or "auto") if isinstance(chosen, str | None) else chosen.model_dump(exclude_none=True),
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": built.params.sampling.top_p,
        "truncation": "auto" if runtime.overflow == "truncate" else "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
