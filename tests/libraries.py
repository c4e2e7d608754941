"""Libraries of llama.cpp that differ from the real one: parts of it replaced in C, functions hidden, other files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.engines.llama.library import choose

ENDING = ".dylib" if sys.platform == "darwin" else ".so"
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def package() -> Path:
    """The folder of llama-cpp-python's own libraries."""
    return choose().folder


def copied(folder: Path) -> Path:
    """A copy of all libraries, as the user's own; returns libllama."""
    shutil.copytree(package(), folder, symlinks=False)
    return folder / f"libllama{ENDING}"


def without(folder: Path, function: str) -> Path:
    """A copy in which one function has another name, so that it cannot be found."""
    library = copied(folder)
    hidden = function[:-1] + "\x7f"
    for file in folder.glob("libllama*"):
        data = file.read_bytes()
        assert data.count(f"\0{function}\0".encode()) >= 1
        file.write_bytes(data.replace(f"\0{function}\0".encode(), f"\0{hidden}\0".encode()))
    return library


def shim(folder: Path, code: str) -> Path:
    """A library with these functions in place of the real ones; it needs the real library for all others."""
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "shim.c", folder / f"libllama{ENDING}"
    source.write_text("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n" + code)
    real = next(iter(sorted(package().glob(f"libllama{ENDING}"))))
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(source)]
    command += ["-Wl,--no-as-needed", str(real), f"-Wl,-rpath,{package()}"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


CRASH_AT_DECODE = """
int llama_decode(void * context, ...) { fprintf(stderr, "ggml.c:7: GGML_ASSERT(shim) failed\\n"); abort(); }
"""
CRASH_WHEN_LOADED = "__attribute__((constructor)) static void crash(void) { *(volatile int *) 0 = 1; }\n"
HANG_AT_DECODE = "int llama_decode(void * context, ...) { for (;;) pause(); }\n"
LARGER_CONTEXT_PARAMS = """
struct params { unsigned char bytes[192]; };
struct params llama_context_default_params(void) { struct params p; memset(&p, 0, sizeof(p)); return p; }
"""
OTHER_DEFAULTS = """
struct params { unsigned char bytes[%d]; };
struct params llama_context_default_params(void) { struct params p; memset(&p, 0x3c, sizeof(p)); return p; }
"""
