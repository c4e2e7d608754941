"""Errors: every error in the format of the vendor whose path was requested.

OpenAI      {"error": {"message", "type", "param", "code"}}
Anthropic   {"type": "error", "error": {"type", "message"}, "request_id"}
Ollama      {"error": "…"}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from headstart.api.caller import caller_of
from headstart.api.paths import hint
from headstart.errors import ContextTooLong, HeadstartError, InvalidRequest, NotFound, Overloaded, RequestError, Unavailable

CLIENT_CLOSED = 499
"""Status after the caller closed the connection (nginx's number)."""


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """The format of errors, except for the clients of Anthropic and Ollama."""

    error: ErrorObject


class AnthropicErrorObject(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The format of errors for Anthropic's clients."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


class OllamaErrorBody(BaseModel):
    """The format of errors for Ollama's clients."""

    error: str


class TooLarge(RequestError):
    status = 413
    code = "request_too_large"


class Unauthorized(RequestError):
    quotes = False
    status = 401
    code = "invalid_api_key"


class WrongKey(Unauthorized):
    """The request has a key, and the server does not know it."""


class Forbidden(RequestError):
    status = 403
    type = "permission_error"
    code = "operator_only"


class UnsupportedMediaType(RequestError):
    quotes = False
    status = 415
    code = "unsupported_media_type"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class UnknownRoute(NotFound):
    code = "unknown_route"


class NotImplementedHere(RequestError):
    """A route of another server, for something that this one does not do."""

    quotes = False
    status = 501
    type = "not_supported_error"
    code = "not_supported"


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a vendor writes errors. `body` takes the error and the request's id."""

    body: Callable[[Exception, str], dict[str, Any]]
    status: Callable[[Exception], int]


def message_of(error: Exception) -> str:
    """The message of an error, for the caller."""
    if isinstance(error, RequestError):
        return error.with_flags
    if isinstance(error, HeadstartError):
        return f"The engine failed: {error.with_flags}"
    return "The server failed; its log says why."


def _status(error: Exception) -> int:
    return error.status if isinstance(error, RequestError) else 500


def _openai(error: Exception, request_id: str) -> dict[str, Any]:
    if isinstance(error, RequestError):
        rest = (error.type, error.param, error.code)
    else:
        rest = ("server_error", None, "engine_error" if isinstance(error, HeadstartError) else "internal_error")
    return {"error": dict(zip(("message", "type", "param", "code"), (message_of(error), *rest), strict=True))}


def _responses(error: Exception, request_id: str) -> dict[str, Any]:
    body = _openai(error, request_id)
    if body["error"]["param"] == "messages":  # what all dialects share; this one's bodies have no such field
        body["error"]["param"] = "input"
    return body


ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""By status. Others are `api_error` from 500 on, and `invalid_request_error` below."""


def _anthropic(error: Exception, request_id: str) -> dict[str, Any]:
    message = message_of(error)
    if isinstance(error, ContextTooLong):
        # Clients look for the vendor's words, and then shorten the conversation.
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum. {message}"
    status = _anthropic_status(error)
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _anthropic_status(error: Exception) -> int:
    status = _status(error)
    return 529 if status == 503 else status


def _ollama(error: Exception, request_id: str) -> dict[str, Any]:
    return {"error": message_of(error)}


OPENAI = ErrorFormat(_openai, _status)
RESPONSES = ErrorFormat(_responses, _status)
ANTHROPIC = ErrorFormat(_anthropic, _anthropic_status)
OLLAMA = ErrorFormat(_ollama, _status)


def format_of(scope: Scope) -> ErrorFormat:
    """The format of a request's errors, by its path. Both vendors have /v1/models; there a header decides."""
    path: str = scope["path"]
    if _under("/v1/messages", path):
        return ANTHROPIC
    if _under("/api", path):
        return OLLAMA
    if _under("/v1/responses", path):
        return RESPONSES
    asks = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return ANTHROPIC if asks and _under("/v1/models", path) else OPENAI


def _under(root: str, path: str) -> bool:
    return path == root or path.startswith(root + "/")


def answer(error: Exception, scope: Scope) -> JSONResponse:
    """The HTTP answer to an error."""
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    error_format = format_of(scope)
    return JSONResponse(error_format.body(error, scope.get("request_id", "")), error_format.status(error), headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Handles HeadstartError, HTTPException, RequestValidationError and ClientDisconnect."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED)
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        error = _of_http(request, error)
    elif isinstance(error, RequestValidationError):
        faults = "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors())
        error = InvalidRequest(f"The request is invalid: {faults}.")
    response = answer(error, request.scope)
    response.headers.update(headers)
    request.app.state.service.refused(caller_of(request.scope), response.status_code, error)
    return response


def _of_http(request: Request, error: HTTPException) -> RequestError:
    if error.status_code == 404:
        path = request.scope["path"][:200]
        return UnknownRoute(f"There is no route {request.method} {path}. {hint(path, request.app.state.paths)}")
    if error.status_code == 405:
        return MethodNotAllowed(f"{request.url.path} does not accept {request.method}.")
    converted = RequestError(str(error.detail))
    converted.status = error.status_code
    return converted
