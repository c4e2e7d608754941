"""Work buffer: makes the memory that ggml computes in on the processor (`ggml_cplan.work_data`) begin at a page.

ggml allocates it with C++'s `new`, which aligns to 16 bytes. The tiles of attention lie in it. Where they do not begin
at a line of the processor's cache (64 bytes), each load of AVX-512 reads two lines; on an EPYC a cold prompt takes 5 to 9 %
longer then (docs/benchmarks.md). Which of the four cases a process gets is chance. Values do not depend on it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_BACKEND = "libggml-cpu"
"""Beginning of the file's name of ggml's backend for processors. On x86 it calls `new[]` for work buffers alone."""
_NEW, _FROM_A_PAGE = "_Znam", "valloc"
"""C++'s `operator new[]`, and a function of glibc that takes a size too and whose result is freed alike. Where there is no
memory, `new[]` ends the process with a message, and `valloc` gives none, which ggml's builds do not notice."""
_MAPS = Path("/proc/self/maps")
_CXX, _C = "libstdc++.so.6", "libc.so.6"
_READ, _WRITE = 1, 2
"""PROT_… of mprotect."""
_WORD = 8


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A part of a file in this process's memory. `rights`: as the kernel writes them, `r--p`."""

    start: int
    end: int
    rights: str

    def find(self, word: int) -> list[int]:
        """The addresses at which it has this word."""
        words = np.ctypeslib.as_array((ctypes.c_uint64 * ((self.end - self.start) // _WORD)).from_address(self.start))
        return [self.start + _WORD * int(place) for place in np.flatnonzero(words == word)]

    def write(self, address: int, word: int) -> bool:
        """Whether it could. The system protects the table of a library that was linked so."""
        protect = ctypes.CDLL(None).mprotect
        page, size = ctypes.c_void_p(address & -mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE)
        sealed = "w" not in self.rights
        if sealed and protect(page, size, _READ | _WRITE) != 0:
            return False
        ctypes.c_uint64.from_address(address).value = word
        if sealed:
            protect(page, size, _READ)
        return True


def align() -> bool:
    """Lets ggml's backend allocate its work buffer with `valloc` instead of `new[]` from now on.

    The backend calls `new[]` through a slot of its global offset table (ELF), which has the function's address. Only this slot
    is changed. None is where the system is not Linux with glibc, where another allocator stands in for glibc's or for `new[]`,
    or where the backend is a part of another file.

    Returns:
        Whether the work buffer begins at a page.
    """
    functions = _functions() if sys.platform == "linux" else None
    if functions is None:
        return False
    before, after = functions
    try:
        mappings = [*_mappings(_BACKEND)]
    except OSError:
        return False
    changed = [mapping.write(slot, after) for mapping in mappings for slot in mapping.find(before)]
    return all(changed) and any(mapping.find(after) for mapping in mappings)


def _functions() -> tuple[int, int] | None:
    """The addresses of libstdc++'s `new[]` and of glibc's `valloc`; None if memory could be freed by another allocator."""
    try:
        cxx, c, used = ctypes.CDLL(_CXX, mode=os.RTLD_NOLOAD), ctypes.CDLL(_C, mode=os.RTLD_NOLOAD), ctypes.CDLL(None)
        c["gnu_get_libc_version"]
        if any(_address(c[name]) != _address(used[name]) for name in ("malloc", "free", _FROM_A_PAGE)):
            return None
        return _address(cxx[_NEW]), _address(c[_FROM_A_PAGE])
    except (OSError, AttributeError):
        return None


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address
    return address


def _mappings(name: str) -> Iterator[_Mapping]:
    """The parts with data, not code, of files whose name begins so. Raises OSError without /proc."""
    for line in _MAPS.read_text("utf-8", "replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith(name) and fields[1].startswith("r") and "x" not in fields[1]:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            yield _Mapping(start, end, fields[1])
