"""Extras: llama-server's other routes: health, metrics, slots, properties, tokens, templates."""

from __future__ import annotations

import asyncio
from pathlib import PurePath
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.body import parse
from headstart.api.drain import RETRY_AFTER, STOPPING
from headstart.api.errors import ErrorBody
from headstart.api.generation import TemplateRequest
from headstart.api.llama_server.schema import DetokenizeRequest, TokenizeRequest
from headstart.api.openapi import ERRORS, takes
from headstart.api.service import service_of
from headstart.api.understood import posted
from headstart.errors import InvalidRequest
from headstart.interfaces.tokenizer import Tokenizer
from headstart.observe.metrics import CONTENT_TYPE
from headstart.prompt.template_caps import capabilities
from headstart.serving.runtime import Runtime
from headstart.version import __version__

router = APIRouter()

_PART = 4096
"""Values of a list that are written together."""


@router.get("/", responses=ERRORS)
async def root(request: HttpRequest) -> Response:
    """The server's name and version. Some clients ask for it first."""
    return JSONResponse({"name": "headstart", "version": __version__, "docs": "/docs"}, headers={"vary": "accept"})


@router.get("/health", responses=ERRORS)
@router.get("/v1/health", responses=ERRORS)
async def health(request: HttpRequest) -> Response:
    """Whether the model is ready. It needs no key."""
    service = service_of(request)
    if service.drain.begun:
        return _llama_error(503, "unavailable_error", STOPPING)
    if service.runtime is not None:
        return JSONResponse({"status": "ok"})
    message = "Loading model"
    if service.failure is not None:
        why = f": {service.failure}" if request.scope["operator"] else "; the server's log says why."
        message = f"The model could not be loaded{why}"
    return _llama_error(503, "unavailable_error", message)  # llama-server's clients wait for this answer


@router.get(
    "/metrics",
    response_class=Response,
    responses={**ERRORS, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics."}},
)
async def metrics(request: HttpRequest) -> Response:
    """Prometheus metrics."""
    return Response(service_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.get("/slots", responses=ERRORS)
async def slots(request: HttpRequest, fail_on_no_slot: str = "") -> Response:
    """The live sequences. With `fail_on_no_slot=1` it is an error if all slots are in use."""
    found = service_of(request).ready().snapshot()["slots"]
    if fail_on_no_slot not in ("", "0") and all(slot["is_processing"] for slot in found):
        return _llama_error(503, "unavailable_error", "no slot available")
    return JSONResponse(found)


@router.post(
    "/slots/{slot}",
    responses={**ERRORS, 501: {"model": ErrorBody, "description": "Saving and restoring are not needed."}},
)
async def slot(
    request: HttpRequest, slot: int, action: Annotated[str, Query(json_schema_extra={"enum": ["erase"]})]
) -> Response:
    """Clears a slot. Entries in memory and on disk stay."""
    runtime = service_of(request).ready()
    if action in ("save", "restore"):
        remedy = "conversations are kept automatically, in memory and under --cache-dir, and are found from any slot"
        return _llama_error(501, "not_supported_error", f"You need not {action} a slot: {remedy}.")
    if action != "erase":
        return _llama_error(400, "invalid_request_error", "Invalid action: it must be erase.")
    if not 0 <= slot < runtime.engine.shape.slots:
        return _llama_error(400, "invalid_request_error", "Invalid slot ID")
    erased = await asyncio.to_thread(runtime.erase, slot)
    if erased is None:
        return _llama_error(409, "invalid_request_error", f"Slot {slot} is in use.")
    return JSONResponse({"id_slot": slot, "n_erased": erased})


def _llama_error(code: int, kind: str, message: str) -> Response:
    """An error in llama-server's format, whose code is a number."""
    headers = {"retry-after": f"{RETRY_AFTER:.0f}"} if code == 503 else {}
    return JSONResponse({"error": {"code": code, "message": message, "type": kind}}, code, headers)


@router.get("/props", responses=ERRORS)
async def props(request: HttpRequest) -> Response:
    """The served model and its settings."""
    service = service_of(request)
    runtime = service.ready()
    defaults = runtime.sampling
    path = str(runtime.engine.facts.details.get("path") or runtime.settings.model)
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": runtime.ctx,
                "params": {name: getattr(defaults, name) for name in names},
            },
            "total_slots": runtime.engine.shape.slots,
            "model_alias": service.model_id,
            "model_path": path if request.scope["operator"] else PurePath(path).name,
            "chat_template": runtime.prompter.template.source,
            "chat_template_caps": capabilities(runtime.prompter.template),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"headstart {__version__} ({runtime.engine.facts.engine})",
            "is_sleeping": False,
            "headstart": {
                "reuse": runtime.reuse,
                "chat_template": runtime.chat_template.as_json,
                "overflow": runtime.overflow,
                "block_size": runtime.engine.traits.block_size,
                "notes": list(runtime.engine.traits.notes),
                "tiers": runtime.snapshot()["tiers"] if request.scope["operator"] else {},
            },
        }
    )


@router.post("/apply-template", openapi_extra=takes(TemplateRequest), responses=ERRORS)
async def apply_template(request: HttpRequest) -> Response:
    """The text of a rendered conversation."""
    service, conversation = await posted(request)
    return await asyncio.to_thread(lambda: JSONResponse({"prompt": service.chat.prompt(conversation())[1].text}))


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=ERRORS)
async def tokenize(request: HttpRequest) -> Response:
    """Text → tokens."""
    service = service_of(request)
    runtime = service.ready()
    data = await service.body(request)
    return await asyncio.to_thread(lambda: _list("tokens", _tokens(runtime, data, service.salt(request))))


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=ERRORS)
async def detokenize(request: HttpRequest) -> Response:
    """Tokens → text."""
    service = service_of(request)
    runtime = service.ready()
    data = await service.body(request)
    return await asyncio.to_thread(lambda: JSONResponse({"content": _text(runtime, data)}))


def _list(name: str, values: list[Any]) -> Response:
    """The answer with a list, which may be long. It is written in parts, because all threads wait for each call of `json`."""
    parts = (JSONResponse(values[start : start + _PART]).body[1:-1] for start in range(0, len(values), _PART))
    return Response(b'{"%s":[%s]}' % (name.encode(), b",".join(parts)), media_type=JSONResponse.media_type)


def _text(runtime: Runtime, data: bytes) -> str:
    body = parse(DetokenizeRequest, data)
    with runtime.prompts.tokenizer_open() as tokenizer:
        if any(token >= tokenizer.n_vocab for token in body.tokens):
            raise InvalidRequest(f"Invalid 'tokens': they must lie in [0, {tokenizer.n_vocab}).", param="tokens")
        return b"".join(map(tokenizer.token_bytes, body.tokens)).decode("utf-8", "replace")


def _tokens(runtime: Runtime, data: bytes, salt: str) -> list[Any]:
    body = parse(TokenizeRequest, data)
    with runtime.prompts.tokenizer_open() as tokenizer:
        tokens = _split(runtime, tokenizer, body, salt)
        if not body.with_pieces:
            return tokens
        return [{"id": token, "piece": _readable(tokenizer.token_bytes(token))} for token in tokens]


def _split(runtime: Runtime, tokenizer: Tokenizer, body: TokenizeRequest, salt: str) -> list[int]:
    bos = tokenizer.bos
    if not body.parse_special:
        plain = tokenizer.tokenize(body.content)
        return [bos.id, *plain] if body.add_special and bos is not None else plain
    tokens: list[int] = runtime.prompter.text(body.content, salt=salt, use_reply_tokens=False).tokens.tolist()
    added = bos is not None and not body.content.startswith(bos.text)
    return tokens[1:] if added and not body.add_special else tokens


def _readable(token: bytes) -> Any:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return list(token)
