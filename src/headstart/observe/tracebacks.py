"""Tracebacks for logs: where something failed and of which type it was, never the values at hand.

Local variables hold prompts, headers and replies. So do messages of exceptions that other code has made: a validator quotes
what it refuses, a `KeyError` what was not found. Only headstart's own words are shown, where they cannot quote (`for_log`).
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
"""Most frames that are shown of one exception: its last."""
DEPTH = 8
"""Most exceptions of one chain."""

_ROOTS = sorted((f"{Path(root).resolve()}/" for root in sys.path if root), key=len, reverse=True)


def told(error: BaseException) -> str:
    """A traceback without values, the last exception last, as Python prints them."""
    return "\n".join(_lines(error, DEPTH))


def processor(_: Any, __: str, event: EventDict) -> EventDict:
    """Of structlog: `exc_info` becomes `exception`, a text."""
    given = event.pop("exc_info", None)
    if given is True:
        given = sys.exc_info()
    error = given[1] if isinstance(given, tuple) else given
    if isinstance(error, BaseException):
        event["exception"] = told(error)
    return event


def install() -> None:
    """Has everything that nothing else catches told in the log of this process: in this form, not in Python's."""
    log = structlog.get_logger("headstart")

    def uncaught(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            log.error("a fault that nothing caught", exc_info=error)

    def in_thread(given: threading.ExceptHookArgs) -> None:
        if given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
            name = given.thread.name if given.thread is not None else None
            log.error("a fault that nothing caught", thread=name, exc_info=given.exc_value)

    def unraisable(given: Any) -> None:
        log.error("a fault that could not be raised", exc_info=given.exc_value)

    def warned(message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        log.warning("a warning of Python's", category=category.__name__, where=f"{_short(filename)}:{lineno}")

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
        for one in error.exceptions[:DEPTH]:
            yield from (f"  | {line}" for line in _lines(one, depth - 1))


def _short(path: str) -> str:
    """A file's path below the folder that it is imported from."""
    return next((path[len(root) :] for root in _ROOTS if path.startswith(root)), path)
