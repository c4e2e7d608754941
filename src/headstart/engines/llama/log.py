"""llama.cpp's log. It goes to Python's `logging` at DEBUG, and its last errors are kept for error messages."""

from __future__ import annotations

import ctypes
import logging
import re
from collections import deque
from typing import Any

from headstart.engines.llama.binding import lib

_logger = logging.getLogger("headstart.llama")
_ERROR, _CONTINUED = 4, 5  # ggml_log_level
_WHERE = re.compile(r"^(\w+: )+(error loading model: )?")
# These only repeat that something failed; the cause is in a line of its own.
_EMPTY = ("failed to load model", "error loading model", "failed to initialize the context")

_errors: deque[str] = deque(maxlen=16)
_level = 0
_callback: Any = None  # llama.cpp keeps its address


def _receive(level: int, text: bytes, _: object) -> None:
    global _level
    _level = _level if level == _CONTINUED else level
    line = text.decode("utf-8", "replace").strip()
    if not line or line == ".":
        return
    if _level == _ERROR and level != _CONTINUED:
        _errors.append(line)
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("%s", line)


def capture() -> None:
    """Takes over llama.cpp's log (it has one for the whole process) and forgets earlier errors."""
    global _callback
    if _callback is None:
        _callback = lib.llama_log_callback(_receive)
    lib.llama_log_set(_callback, ctypes.c_void_p(0))
    _errors.clear()


def cause(default: str = "no reason given") -> str:
    """llama.cpp's first useful error since the last call, as one line; `default` if there is none."""
    lines = [_WHERE.sub("", line) for line in _errors]
    _errors.clear()
    useful = [line for line in lines if line and not line.startswith(_EMPTY)]
    return (useful or lines or [default])[0].rstrip(".")
