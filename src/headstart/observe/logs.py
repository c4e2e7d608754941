"""Logs: structlog, on the console or as JSON lines. The loggers of the standard library write to the same place.

A finished request is one line: what its prompt cost, what was reused, how fast the reply was, and why not more was reused.
No line contains text of a prompt or a reply: docs/security.md.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import structlog

from headstart.errors import RequestError, for_log
from headstart.names import OptionText
from headstart.observe import redaction, tracebacks
from headstart.observe.report import Summary

LogFormat = Literal["console", "json"]

OURS = ("headstart",)
"""Loggers whose lines are written as they are."""

_FIELD = re.compile(r"[a-z_]{1,40}(?![^.\[])")
"""The name of a body's top field in an error's `param`, without the path inside it."""


def configure(
    log_format: LogFormat = "console",
    level: int = logging.INFO,
    stream: TextIO | None = None,
    fields: Mapping[str, str] | None = None,
) -> None:
    """Sets up logging for this process, to `stream` (stderr). `fields` stand in every line."""
    out = stream or sys.stderr
    always = dict(fields or {})
    shared: list[Any] = [
        lambda _, __, event: {**always, **event},
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso" if log_format == "json" else "%H:%M:%S", utc=log_format == "json"),
    ]
    if log_format == "json":
        last: Any = structlog.processors.JSONRenderer()
    else:
        last = structlog.dev.ConsoleRenderer(
            colors=out.isatty(), sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = _Handler(out)
    handler.addFilter(_guard)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                tracebacks.processor,
                redaction.processor,
                last,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "httpx", "httpx2"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(max(level, logging.WARNING))


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drops a line that cannot be written. Python's handler would print its arguments instead."""


def _guard(record: logging.LogRecord) -> bool:
    """Keeps callers' data out of the lines of other libraries.

    Their lines lose their arguments and all but the first line, because asyncio prints a task and then its exception. In
    headstart's lines, `errors.for_log` formats exceptions, and options are written as flags.
    """
    if isinstance(record.msg, dict):  # structlog's, which only headstart uses
        return True
    if record.name.partition(".")[0] not in OURS:
        record.msg, record.args = str(record.msg).partition("\n")[0], ()
    elif isinstance(record.args, tuple):
        record.args = tuple(map(_shown, record.args))
    return True


def _shown(value: object) -> object:
    """An argument in a form that may be logged."""
    if isinstance(value, BaseException):
        return for_log(value)
    return value.with_flags if isinstance(value, OptionText) else value


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and its route.

    Attributes:
        id: of the request.
        route: method and path pattern.
        client: its address, without a port.
        tenant: the first digits of the tenant's digest; "" without keys.
    """

    id: str
    route: str
    client: str
    tenant: str = ""

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "route": self.route, "client": self.client, **({"tenant": self.tenant} if self.tenant else {})}


@dataclass(frozen=True, slots=True)
class Figures:
    """The costs of an unfinished request, in tokens and seconds. None: not known yet."""

    prompt: int | None = None
    cached: int | None = None
    computed: int | None = None
    completion: int = 0
    seconds: float = 0.0

    def fields(self) -> dict[str, Any]:
        known = {"prompt": self.prompt, "cached": self.cached, "computed": self.computed}
        counts = {name: value for name, value in known.items() if value is not None}
        return {**counts, "completion": self.completion, "seconds": round(self.seconds, 3)}


def finished(caller: Caller, summary: Summary, reasons: Sequence[str], seconds: float) -> None:
    """The line of a finished request."""
    found = summary.explanation
    measured = summary.decode > 0 and summary.decoded  # one token has no pace
    structlog.get_logger("headstart.request").info(
        "finished",
        **caller.fields(),
        prompt=summary.prompt,
        cached=summary.cached,
        restored=summary.restored,
        **({"shared": summary.tiers["shared"]} if summary.tiers.get("shared") else {}),
        computed=summary.computed,
        completion=summary.completion,
        ttft_ms=round(1e3 * summary.ttft, 1),
        tokens_per_s=round(summary.decoded / summary.decode, 1) if measured else None,
        seconds=round(seconds, 3),
        finish=",".join(dict.fromkeys(reasons)),
        cause=found.cause.value if found is not None else None,
        **({"recomputed": found.recomputed} if found is not None and found.recomputed else {}),
        **({"dropped": summary.dropped} if summary.dropped else {}),
    )


UNFINISHED = {"abort": ("aborted", "info"), "error": ("failed", "error"), "shutdown": ("ended", "warning")}
"""The event and the level of an unfinished request's line, by how it ended."""


def unfinished(caller: Caller, how: str, figures: Figures, error: BaseException | None = None) -> None:
    """The line of a request that its caller aborted, that failed, or that a stopping server ended."""
    event, level = UNFINISHED[how]
    fields = {**caller.fields(), **figures.fields(), "finish": how}
    getattr(structlog.get_logger("headstart.request"), level)(event, **fields, **_what(error))


def refused(caller: Caller, status: int, error: BaseException) -> None:
    """The line of a call that was refused before anything was computed."""
    structlog.get_logger("headstart.request").info("refused", **caller.fields(), status=status, **_what(error))


def _what(error: BaseException | None) -> dict[str, Any]:
    """The fields of an error that may be logged: its code and field, and its message if it quotes no input."""
    if error is None:
        return {}
    if not isinstance(error, RequestError):
        return {"error": for_log(error)}
    found = {"code": error.code or error.type}
    if error.param is not None and (field := _FIELD.match(error.param)) is not None:
        found["param"] = field[0]  # the rest may be a key of the caller's data
    return found if error.quotes else {**found, "error": error.with_flags}
