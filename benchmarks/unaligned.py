"""Puts ggml's work buffer where chance may put it without `headstart.engines.llama.work_buffer`: to measure what that costs."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from headstart.engines.llama import work_buffer
from headstart.engines.llama.padding import TILE

BEHIND = 16
"""Bytes behind a line of the cache, which has 64."""
GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
_kept: list[Any] = []


def unalign() -> None:
    """Lets ggml allocate a work buffer that begins 16 bytes behind a line. Before llama.cpp is loaded, and with glibc."""
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
    malloc, free, functions = kind(("malloc", ctypes.CDLL(None))), ctypes.CDLL(None).free, work_buffer._functions

    def take(size: int) -> int:
        refused: list[int] = []
        while (found := malloc(size)) % TILE != BEHIND:
            refused += [found, malloc(16 * len(refused))]  # the next one begins elsewhere
        for one in refused:
            free(ctypes.c_void_p(one))
        return int(found)

    _kept.append(kind(take))
    address = work_buffer._address(_kept[-1])

    def instead() -> tuple[int, int] | None:
        found = functions()
        return None if found is None else (found[0], address)

    work_buffer._functions = instead
