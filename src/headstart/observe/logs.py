"""Logs: structlog, on the console or as JSON lines; the standard library's loggers end in the same place.

A finished request is one line: what its prompt cost, what was reused, how fast the reply was, and why not more was reused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, Literal, TextIO

import structlog

from headstart.observe.report import Summary

LogFormat = Literal["console", "json"]


def configure(log_format: LogFormat = "console", level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Sets up logging for this process, to `stream` (stderr)."""
    out = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso" if log_format == "json" else "%H:%M:%S", utc=log_format == "json"),
    ]
    if log_format == "json":
        last: list[Any] = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        last = [structlog.dev.ConsoleRenderer(colors=out.isatty(), sort_keys=False)]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(max(level, logging.WARNING))


def finished(request_id: str, summary: Summary, reasons: Sequence[str], seconds: float) -> None:
    """The line of a finished request."""
    found = summary.explanation
    structlog.get_logger("headstart.request").info(
        "finished",
        id=request_id,
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
        **({"missed": found.tokens} if found is not None and found.tokens else {}),
        **({"dropped": summary.dropped} if summary.dropped else {}),
    )


def unfinished(request_id: str, how: str, message: str = "") -> None:
    """The line of a request that its caller aborted, or that failed."""
    log = structlog.get_logger("headstart.request")
    (log.info if how == "abort" else log.error)(how, id=request_id, **({"message": message} if message else {}))


def refused(request_id: str, status: int, message: str) -> None:
    """The line of a call answered with an error."""
    structlog.get_logger("headstart.request").info("refused", id=request_id, status=status, message=message)
