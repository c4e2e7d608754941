"""All errors that headstart raises on purpose.

HeadstartError
├── ConfigError             the set-up is wrong; the message names the remedy; the command line exits with 2
│   └── ModelError          the model file is missing, broken or unsupported
│       └── HubError        a model cannot be fetched: no network, no permission, no space on disk, or a wrong hash
├── RequestError            one request cannot be served; has the fields of the HTTP error
│   ├── InvalidRequest      400  the request contradicts itself or the model
│   ├── ContextTooLong      400  prompt (and reply) exceed the context of a conversation
│   ├── NotFound            404  unknown model
│   ├── Conflict            409  it cannot be done in the present state; the message says what to do first
│   ├── Overloaded          429  the queue is full; says when to try again
│   └── Unavailable         503  loading or stopping
├── EngineError             the engine failed to compute; the request fails, its KV is dropped
└── Cancelled               the caller cancelled the request
"""

from __future__ import annotations

import os
import sqlite3

from headstart.names import as_argument, as_flag, option


class HeadstartError(Exception):
    """Root of the tree above. Its `str` names options as the library does: `ctx=`.

    `quotes`: whether its message may contain text of a request or a reply.
    """

    quotes = False

    def __str__(self) -> str:
        return as_argument(super().__str__())

    @property
    def with_flags(self) -> str:
        """The text for the command line and HTTP, with options as flags: `--ctx`."""
        return as_flag(super().__str__())


class ConfigError(HeadstartError):
    """The set-up cannot work. The message is one line and names the remedy."""


class ModelError(ConfigError):
    """The model file is missing, broken or unsupported."""


class HubError(ModelError):
    """A model cannot be fetched. The message is one line and names the remedy."""


class RequestError(HeadstartError):
    """One request cannot be served.

    `status`, `type`, `code` and `param` are those of OpenAI's error object.
    """

    quotes = True
    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        return str(self)


class InvalidRequest(RequestError):
    """The request contradicts itself or the model."""


class ContextTooLong(RequestError):
    """The prompt does not fit into the context of one conversation."""

    quotes = False
    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit: int, *, param: str = "messages", truncates: bool = False) -> None:
        more = "." if truncates else f", or with {option('overflow', 'truncate')}."
        remedy = f"Shorten it, or load the model with a larger {option('ctx')}{more}"
        super().__init__(
            f"This model's context holds {limit} tokens a conversation, but the prompt has {prompt_tokens}. {remedy}",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class NotFound(RequestError):
    status = 404
    code = "model_not_found"


class Conflict(RequestError):
    """The request cannot be served in the present state. The message says what to do first."""

    quotes = False
    status = 409
    code = "conflict"


class Overloaded(RequestError):
    """The queue is full. `retry_after` is in seconds."""

    quotes = False
    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(RequestError):
    """The model is loading, or the server is stopping. `retry_after` is in seconds."""

    quotes = False
    status = 503
    type = "unavailable_error"
    code = "unavailable"

    def __init__(self, message: str, *, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(HeadstartError):
    """The engine failed to compute."""


class Cancelled(HeadstartError):
    """The caller cancelled the request before its answer was complete."""


def for_log(error: BaseException) -> str:
    """An error for the log: its type, and its message if that cannot contain text of a request or a reply."""
    kind = type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        return f"{kind}: [Errno {error.errno}] {os.strerror(error.errno)}"
    if isinstance(error, sqlite3.Error):
        return f"{kind}: {name}" if (name := getattr(error, "sqlite_errorname", "")) else kind
    message = error.with_flags if isinstance(error, HeadstartError) else str(error)
    return kind if getattr(error, "quotes", True) or not message else f"{kind}: {message}"
