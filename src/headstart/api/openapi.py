"""OpenAPI: the API's description. `body.parse` parses the bodies, not FastAPI, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headstart.api import generation
from headstart.api.anthropic import schema as anthropic_schema
from headstart.api.errors import AnthropicErrorBody, ErrorBody, OllamaErrorBody
from headstart.api.llama_server import schema as llama_schema
from headstart.api.middleware import OPEN
from headstart.api.ollama import schema as ollama_schema
from headstart.api.openai_chat import schema
from headstart.api.openai_responses import schema as responses_schema

_EVENT: dict[str, Any] = {
    "type": "object",
    "description": "One event of the stream.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served; the message says why."},
    503: {"model": ErrorBody, "description": "Loading or stopping."},
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, server-sent events.",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
}
_NAMES = ["snapshot", "tree", "requests", "slots", "evicted_next", "sizes", "mark", "dropped", "end"]
_WATCHED = {**_EVENT, "properties": {**_EVENT["properties"], "event": {"type": "string", "enum": _NAMES}}}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events, until the reader closes the connection. docs/events.md describes the data of each.",
        "content": {"text/event-stream": {"schema": _WATCHED}},
    },
    429: {
        "model": ErrorBody,
        "description": "All places for readers are taken, and no owner has two readers more than you. Close one.",
    },
}
ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicErrorBody, "description": "The request cannot be served; the message says why."},
    529: {"model": AnthropicErrorBody, "description": "Loading or stopping."},
}
ANTHROPIC_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, server-sent events that end with `message_stop`.",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
}
OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaErrorBody, "description": "The request cannot be served; the message says why."},
    503: {"model": OllamaErrorBody, "description": "Loading or stopping."},
}
OLLAMA_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Lines of JSON, the last of which has `done`; with `stream` false, one object.",
        "content": {
            "application/x-ndjson": {"schema": {"type": "string"}},
            "application/json": {"schema": {"type": "object", "required": ["model", "created_at", "done"]}},
        },
    }
}
OLLAMA_PROGRESS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Lines of JSON: how far each file is, and `success` or an error; with `stream` false, one object.",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}, "application/json": {"schema": {"type": "object"}}},
    }
}
OLLAMA_MISSING: dict[int | str, dict[str, Any]] = {
    **OLLAMA_ERRORS,
    501: {"model": OllamaErrorBody, "description": "This server does not do that; the message says what it does instead."},
}
BODIES: tuple[type[BaseModel], ...] = (
    *schema.BODIES,
    generation.TemplateRequest,
    *llama_schema.BODIES,
    *responses_schema.BODIES,
    *anthropic_schema.BODIES,
    *ollama_schema.BODIES,
)
_REF = "#/components/schemas/{model}"


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route with this body."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *, keys: bool) -> dict[str, Any]:
    """The OpenAPI document; built once."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, schemas = models_json_schema([(model, "validation") for model in BODIES], ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas["$defs"])
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # errors in a path are 4XX like all others
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    if keys:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"x-api-key": []}]
        for name in OPEN & document["paths"].keys():
            document["paths"][name]["get"]["security"] = []
    app.openapi_schema = document
    return document
