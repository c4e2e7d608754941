"""Faults: every error in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from headstart.errors import HeadstartError, InvalidRequest, NotFound, Overloaded, RequestError
from headstart.observe import logs

CLIENT_CLOSED = 499
"""Status of an answer that nobody reads (nginx's number)."""


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """The form of every error."""

    error: ErrorObject


class TooLarge(RequestError):
    status = 413
    code = "request_too_large"


class Unauthorized(RequestError):
    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    type = "permission_error"
    code = "operator_only"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class UnknownRoute(NotFound):
    code = "unknown_route"


def form(error: Exception) -> dict[str, Any]:
    """The error object, with its `error` key."""
    if isinstance(error, RequestError):
        parts = (error.message, error.type, error.param, error.code)
    elif isinstance(error, HeadstartError):
        parts = (f"The engine failed: {error}", "server_error", None, "engine_error")
    else:
        parts = ("The server failed; its log says why.", "server_error", None, "internal_error")
    return {"error": dict(zip(("message", "type", "param", "code"), parts, strict=True))}


def status(error: Exception) -> int:
    return error.status if isinstance(error, RequestError) else 500


def answer(error: Exception) -> JSONResponse:
    """The HTTP answer to an error."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(form(error), status(error), headers)


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
    response = answer(error)
    response.headers.update(headers)
    service = request.app.state.service
    request_id = request.scope.get("request_id", "")
    if response.status_code == 500:
        service.unfinished(request_id, "error", str(error))
    else:
        logs.refused(request_id, response.status_code, form(error)["error"]["message"])
    service.metrics.refused(response.status_code)
    return response


def _of_http(request: Request, error: HTTPException) -> RequestError:
    if error.status_code == 404:
        return UnknownRoute(f"There is no route {request.method} {request.url.path}.")
    if error.status_code == 405:
        return MethodNotAllowed(f"{request.url.path} does not take {request.method}.")
    made = RequestError(str(error.detail))
    made.status = error.status_code
    return made
