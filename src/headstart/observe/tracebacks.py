"""Tracebacks for logs: the place and type of an error, without values.

Local variables contain prompts, headers and replies. So do the messages of other libraries' exceptions: a validator quotes its
input, a `KeyError` the key. Only headstart's own messages are shown, if they cannot quote (`for_log`).
"""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog
from structlog.typing import EventDict

from headstart.errors import for_log

FRAMES = 25
"""Most frames of one exception that are shown: its last ones."""
DEPTH = 8
"""Most exceptions of one chain that are shown."""

_ROOTS = sorted((f"{Path(root).resolve()}/" for root in sys.path if root), key=len, reverse=True)


def formatted(error: BaseException) -> str:
    """A traceback without values. The last exception comes last, as in Python."""
    return "\n".join(_lines(error, DEPTH))


def processor(_: Any, __: str, event: EventDict) -> EventDict:
    """A structlog processor: replaces `exc_info` by `exception`, a text."""
    given = event.pop("exc_info", None)
    if given is True:
        given = sys.exc_info()
    error = given[1] if isinstance(given, tuple) else given
    if isinstance(error, BaseException):
        event["exception"] = formatted(error)
    return event


def install() -> None:
    """Logs uncaught exceptions and warnings of this process in this form. Python would print them to stderr with values."""
    log = structlog.get_logger("headstart")

    def uncaught(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            log.error("uncaught exception", exc_info=error)

    def in_thread(given: threading.ExceptHookArgs) -> None:
        if given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
            name = given.thread.name if given.thread is not None else None
            log.error("uncaught exception", thread=name, exc_info=given.exc_value)

    def unraisable(given: Any) -> None:
        log.error("exception that could not be raised", exc_info=given.exc_value)

    def warned(message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        log.warning("Python warning", category=category.__name__, where=f"{_short(filename)}:{lineno}")

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, in_thread, unraisable
    warnings.showwarning = warned


def _lines(error: BaseException, depth: int) -> Iterator[str]:
    before, why = error.__cause__, "caused:"
    if before is None and not error.__suppress_context__:
        before, why = error.__context__, "while that was handled:"
    if before is not None and depth > 1:
        yield from _lines(before, depth - 1)
        yield why
    found = traceback.extract_tb(error.__traceback__, limit=-FRAMES)
    if found:
        yield "Traceback (most recent call last):"
        yield from (f"  {_short(frame.filename)}:{frame.lineno} in {frame.name}" for frame in found)
    yield for_log(error)
    if isinstance(error, BaseExceptionGroup) and depth > 1:
        for inner in error.exceptions[:DEPTH]:
            yield from (f"  | {line}" for line in _lines(inner, depth - 1))


def _short(path: str) -> str:
    """A file's path, relative to the import folder that contains it."""
    return next((path[len(root) :] for root in _ROOTS if path.startswith(root)), path)
