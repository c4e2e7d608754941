"""Ollama's routes: chats, prompts, and lists of models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from headstart.api.body import parse
from headstart.api.errors import NotImplementedHere
from headstart.api.framing import NDJSON
from headstart.api.handler import answer
from headstart.api.incoming import SMALL_BODY
from headstart.api.ollama.conversation import reply_seed
from headstart.api.ollama.encode import OllamaChatEncoder, OllamaGenerateEncoder, nothing_said
from headstart.api.ollama.model_list import listed, running, shown, tagged
from headstart.api.ollama.prompt import chat_of, generate_of, raw_of
from headstart.api.ollama.pull import SUCCESS, Download
from headstart.api.ollama.schema import (
    OllamaBody,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from headstart.api.openapi import OLLAMA_ERRORS, OLLAMA_MISSING, OLLAMA_PROGRESS, OLLAMA_STREAMED, takes
from headstart.api.route import Route
from headstart.api.service import Service, service_of
from headstart.api.understood import Understood
from headstart.chat.reply_builder import ReplyReader
from headstart.interfaces.conversation import Conversation
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import Sampling
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime
from headstart.version import __version__

router = APIRouter(route_class=Route)

SPOKEN = "0.13.0"
"""The version of Ollama whose API this is. Clients look at it, to see whether they can use the server."""

_EMBEDDINGS = "This server has no embeddings: give your client another server for them."
_FILES = "Models are files here: `headstart serve FILE.gguf` serves one, and `--alias` gives it another name."
MISSING = {
    ("POST", "/api/embed"): _EMBEDDINGS,
    ("POST", "/api/embeddings"): _EMBEDDINGS,
    ("POST", "/api/create"): f"This server makes no models. {_FILES}",
    ("POST", "/api/copy"): f"This server copies no models. {_FILES}",
    ("DELETE", "/api/delete"): f"This server deletes no models over HTTP. {_FILES}",
    ("POST", "/api/push"): f"This server sends no models anywhere. {_FILES}",
    ("POST", "/api/blobs/{digest}"): f"This server takes no files. {_FILES}",
}
"""Routes of Ollama's server for what this one does not do, and the answer."""


@router.post("/api/chat", openapi_extra=takes(OllamaChatRequest), responses={**OLLAMA_ERRORS, **OLLAMA_STREAMED})
async def chat(request: HttpRequest) -> Response:
    """Continues a conversation."""
    return await answer(request, _chat)


@router.post("/api/generate", openapi_extra=takes(OllamaGenerateRequest), responses={**OLLAMA_ERRORS, **OLLAMA_STREAMED})
async def generate(request: HttpRequest) -> Response:
    """Answers a prompt, or continues it with `raw`."""
    return await answer(request, _generate)


@router.get("/api/tags", responses=OLLAMA_ERRORS)
async def tags(request: HttpRequest) -> Response:
    """Lists the models of this server."""
    service = service_of(request)
    service.ready()
    return JSONResponse({"models": [listed(model) for model in service.models.all()]})


@router.get("/api/ps", responses=OLLAMA_ERRORS)
async def ps(request: HttpRequest) -> Response:
    """Lists the loaded models."""
    service = service_of(request)
    service.ready()
    return JSONResponse({"models": [running(model) for model in service.models.all() if model.state == "loaded"]})


@router.post("/api/show", openapi_extra=takes(OllamaShowRequest), responses=OLLAMA_ERRORS)
async def show(request: HttpRequest) -> Response:
    """Describes a model."""
    service = service_of(request)
    service.ready()
    body = parse(OllamaShowRequest, await service.body(request, SMALL_BODY))
    return JSONResponse(shown(service.models.find(body.model or body.name)))


@router.get("/api/version", responses=OLLAMA_ERRORS)
async def version(request: HttpRequest) -> Response:
    """The version of Ollama's API that this server speaks."""
    return JSONResponse({"version": SPOKEN, "headstart": __version__})


@router.post("/api/pull", openapi_extra=takes(OllamaPullRequest), responses={**OLLAMA_ERRORS, **OLLAMA_PROGRESS})
async def pull(request: HttpRequest) -> Response:
    """Fetches a model from a hub. It fills the disk, so only the operator may, and without keys a caller on this machine."""
    service, pulls = service_of(request), request.app.state.pulls
    pulls.check(request.scope)
    service.drain.check()
    body = parse(OllamaPullRequest, await service.body(request, SMALL_BODY))
    download = Download(service, pulls, body.wanted)
    if body.stream is not False:
        return StreamingResponse(download.lines(), media_type=NDJSON.media_type)
    await download.whole(request.receive)
    return JSONResponse(SUCCESS)


def _missing(method: str, path: str, message: str) -> None:
    async def refuse(request: HttpRequest) -> Response:
        await service_of(request).body(request)
        raise NotImplementedHere(message)

    refuse.__doc__ = "Not supported."
    refuse.__name__ = path.removeprefix("/api/").partition("/")[0]
    router.add_api_route(path, refuse, methods=[method], responses=OLLAMA_MISSING, status_code=501)


for (_method, _path), _message in MISSING.items():
    _missing(_method, _path, _message)


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chat(service: Service, runtime: Runtime, request: HttpRequest, data: bytes) -> Understood | Response:
    body = parse(OllamaChatRequest, data)
    name = _name(service, body)
    if not body.messages:
        return JSONResponse(nothing_said(name, chat=True, unload=body.unloads))
    built, reader = _built(service, runtime, body, chat_of(body, service.salting(request)))
    encoder = OllamaChatEncoder(name, built, reader, scored=body.scores is not None)
    return Understood(body, [built], encoder, body.streams)


def _generate(service: Service, runtime: Runtime, request: HttpRequest, data: bytes) -> Understood | Response:
    body = parse(OllamaGenerateRequest, data)
    name = _name(service, body)
    if not body.prompt:
        return JSONResponse(nothing_said(name, chat=False, unload=body.unloads))
    reader: ReplyReader | None = None
    if body.raw:
        prompt = raw_of(body, runtime.prompts, service.salting(request))
        grammar = service.chat.plain_grammar(body.reply_format)
        built = Request(prompt, _params(body, runtime.sampling), grammar=grammar)
    else:
        built, reader = _built(service, runtime, body, generate_of(body, service.salting(request)))
    encoder = OllamaGenerateEncoder(name, built, reader, scored=body.scores is not None)
    return Understood(body, [built], encoder, body.streams)


def _built(
    service: Service, runtime: Runtime, body: OllamaBody, conversation: Conversation
) -> tuple[Request, ReplyReader | None]:
    seed = reply_seed(conversation.messages)
    built, reader = service.chat.request(conversation, _params(body, runtime.sampling), seed)
    return replace(built, alias=""), reader  # the seed is no id: the caller never sees it


def _name(service: Service, body: OllamaBody) -> str:
    """The name to answer with: the caller's own. Raises NotFound."""
    model = service.check_model(body.model)
    return body.model or tagged(model.id)


def _params(body: OllamaBody, usual: Sampling) -> GenerationParams:
    wanted = body.wanted
    names = ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(wanted, name)) is not None}
    if wanted.top_k is not None:
        given["top_k"] = max(0, wanted.top_k)
    if wanted.repeat_last_n is not None:
        given["penalty_last_n"] = wanted.repeat_last_n
    seed = None if wanted.seed == -1 else wanted.seed  # -1: Ollama's value for a random seed
    return GenerationParams(replace(usual, **given, seed=seed, logprobs=body.scores), wanted.limit, wanted.stops)
