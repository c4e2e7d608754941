"""Logs: structlog, on the console or as JSON lines; the standard library's loggers end in the same place.

A finished request is one line: what its prompt cost, what was reused, how fast the reply was, and why not more was reused.
No line has what a caller sent or a model said: docs/security.md.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
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
"""The name of a body's field, in front of what is inside of it."""


def configure(log_format: LogFormat = "console", level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Sets up logging for this process, to `stream` (stderr)."""
    out = stream or sys.stderr
    shared: list[Any] = [
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
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(max(level, logging.WARNING))


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written is lost: Python would print its arguments instead."""


def _guard(record: logging.LogRecord) -> bool:
    """Keeps values out of lines that were not made for this log.

    Other libraries' lines lose their arguments, and all but their first line: asyncio prints a task with its exception behind
    it. Exceptions among our own arguments are said as `errors.for_log` says them, and options as flags.
    """
    if isinstance(record.msg, dict):  # structlog's, which only headstart uses
        return True
    if record.name.partition(".")[0] not in OURS:
        record.msg, record.args = str(record.msg).partition("\n")[0], ()
    elif isinstance(record.args, tuple):
        record.args = tuple(map(_shown, record.args))
    return True


def _shown(value: object) -> object:
    """An argument as it may be shown."""
    if isinstance(value, BaseException):
        return for_log(value)
    return value.with_flags if isinstance(value, OptionText) else value


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and which.

    Attributes:
        id: of the request.
        route: method and path, as the route is declared.
        client: its address, without a port.
        tenant: the first digits of the tenant's digest; "" if nobody knows.
    """

    id: str
    route: str
    client: str
    tenant: str = ""

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "route": self.route, "client": self.client, **({"tenant": self.tenant} if self.tenant else {})}


@dataclass(frozen=True, slots=True)
class Figures:
    """What a request has cost that did not finish. Tokens, and seconds; None for what is not known yet."""

    prompt: int | None = None
    cached: int | None = None
    computed: int | None = None
    completion: int = 0
    seconds: float = 0.0

    def fields(self) -> dict[str, Any]:
        known = {"prompt": self.prompt, "cached": self.cached, "computed": self.computed}
        told = {name: value for name, value in known.items() if value is not None}
        return {**told, "completion": self.completion, "seconds": round(self.seconds, 3)}


def finished(caller: Caller, summary: Summary, reasons: Sequence[str], seconds: float) -> None:
    """The line of a finished request."""
    found = summary.explanation
    structlog.get_logger("headstart.request").info(
        "finished",
        **caller.fields(),
        prompt=summary.prompt,
        cached=summary.cached,
        restored=summary.restored,
        computed=summary.computed,
        completion=summary.completion,
        ttft_ms=round(1e3 * summary.ttft, 1),
        tokens_per_s=round((summary.completion - 1) / summary.decode, 1) if summary.decode > 0 else None,
        seconds=round(seconds, 3),
        finish=",".join(dict.fromkeys(reasons)),
        cause=found.cause.value if found is not None else None,
        **({"recomputed": found.recomputed} if found is not None and found.recomputed else {}),
        **({"dropped": summary.dropped} if summary.dropped else {}),
    )


UNFINISHED = {"abort": ("aborted", "info"), "error": ("failed", "error"), "shutdown": ("ended", "warning")}
"""How a request ends that does not finish: the event of its line, and its level."""


def unfinished(caller: Caller, how: str, figures: Figures, error: BaseException | None = None) -> None:
    """The line of a request that its caller aborted, that failed, or that the server ended as it stopped."""
    event, level = UNFINISHED[how]
    fields = {**caller.fields(), **figures.fields(), "finish": how}
    getattr(structlog.get_logger("headstart.request"), level)(event, **fields, **_what(error))


def refused(caller: Caller, status: int, error: BaseException) -> None:
    """The line of a call that was answered with an error before anything was computed for it."""
    structlog.get_logger("headstart.request").info("refused", **caller.fields(), status=status, **_what(error))


def _what(error: BaseException | None) -> dict[str, Any]:
    """What may be said of an error: its code and field, and its message if that quotes nothing (`errors.for_log`)."""
    if error is None:
        return {}
    if not isinstance(error, RequestError):
        return {"error": for_log(error)}
    found = {"code": error.code or error.type}
    if error.param is not None and (field := _FIELD.match(error.param)) is not None:
        found["param"] = field[0]  # what follows may be a key of the caller's own
    return found if error.quotes else {**found, "error": error.with_flags}
