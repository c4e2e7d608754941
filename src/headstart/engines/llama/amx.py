"""AMX: whether llama.cpp multiplies weights with Intel's Advanced Matrix Extensions.

A llama.cpp that was built for such a processor lays weights out for AMX when it loads them, and then computes prompts up to
2.5 times as fast (docs/benchmarks.md). Two faults of llama.cpp (as of 0.5.0) stand in the way:

* Most builds crash: compilers drop stores to AMX's configuration, because GCC's own header says that only its first bytes
  are read (llama.cpp's issue 20824). `FLAGS` keep the stores.
* Products with a third dimension are wrong, and are written beyond their memory. Models with state have such products, and
  some others. So AMX is used with `PLAIN` models only, and with libraries whose sources were looked at.

Nothing in a library tells good builds from others. So a process of its own (`amx_trial`) multiplies, and the result is
remembered.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from headstart.engines.llama.binding import lib, ready
from headstart.engines.llama.ggml import Ggml
from headstart.engines.llama.library import child_environment
from headstart.engines.memo import recall, remember

FLAGS = "-fno-tree-dse -fno-dse"
"""Flags of GCC with which a build does not crash."""
PLAIN = frozenset(
    "llama mistral3 qwen2 qwen2moe qwen3 qwen3moe gemma gemma2 gemma3 gpt-oss phi3 granite smollm3 cohere2 starcoder2 internlm2"
    " glm4 exaone4 ernie4_5 seed_oss nemotron".split()
)
"""Architectures whose weights are multiplied with matrices only, as the sources of the tested versions show."""
TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "F16")
"""Types of weights that llama.cpp multiplies with this layout."""
SLOWER = frozenset({18})
"""LLAMA_FTYPE_MOSTLY_Q6_K: prompts take 1.2 × as long with AMX (docs/benchmarks.md). Other types that were measured gain."""
MEMO = "amx.json"
_PATIENCE = 60.0
"""Seconds after which a trial is given up. It takes less than one."""
_CRASHES = frozenset(
    -getattr(signal, name) for name in ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT") if hasattr(signal, name)
)
_MOST = 64
_found: dict[str, bool] = {}
"""What this process has found out, by build."""


def built() -> bool:
    """Whether this build would lay weights out for AMX."""
    return b"AMX_INT8 = 1" in lib.llama_print_system_info()


def extra_buffers(model: Path, state_dir: Path | None = None, *, anew: bool = False) -> bool:
    """Whether llama.cpp may lay the weights of a model out for the processor's instructions. Only its way for AMX has faults.

    Args:
        model: the file.
        state_dir, anew: see `works`.
    """
    return not built() or (ready().library.tested and _suits(header(model)) and works(state_dir, anew=anew))


def _suits(model: GgufHeader) -> bool:
    return model.architecture in PLAIN and model.file_type not in SLOWER


def used(extra: bool) -> bool:
    """Whether weights that were laid out so (`extra`) are multiplied with AMX in this process. The kernel may refuse it."""
    return extra and built() and layout(Ggml(ready())) is not None


def works(state_dir: Path | None = None, *, anew: bool = False) -> bool:
    """Whether the trial of this build has computed with AMX what it should.

    Args:
        state_dir: folder that remembers the results of trials; None remembers them for this process.
        anew: try again what an earlier process has found out.
    """
    if not built():
        return False
    library = ready().library
    # The kernel decides who may use AMX.
    key = blake3("\0".join((library.build, platform.release(), platform.version())).encode()).hexdigest()
    if key not in _found:
        known = recall(state_dir, MEMO)
        found = None if anew else known.get(key)
        if not isinstance(found, bool) and (found := tried(command(library.file))) is not None:
            remember(state_dir, MEMO, dict(list({**known, key: found}.items())[-_MOST:]))
        _found[key] = bool(found)
    return _found[key]


def command(library: Path) -> list[str]:
    """The trial of a library."""
    return [sys.executable, "-m", "headstart.engines.llama.amx_trial", str(library)]


def tried(trial: list[str]) -> bool | None:
    """Whether a trial ends well. False if it computes wrongly or crashes; None if anything else ends it, which says nothing."""
    if not sys.executable or getattr(sys, "frozen", False):  # Python is part of another program
        return None
    try:
        ended = subprocess.run(
            trial,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if ended.returncode == RIGHT:
        return True
    return False if ended.returncode == WRONG or ended.returncode in _CRASHES else None


RIGHT, WRONG = 0, 3
"""Exit codes of a trial. Python itself ends with 1 or 2 if something else is the matter."""


def layout(ggml: Ggml) -> int | None:
    """The address of ggml's kind of buffer in which weights are laid out for AMX; None if it has none here."""
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    if not (address := ggml.procedure("ggml_backend_dev_get_extra_bufts")):
        return None
    kinds = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(address)(ggml.device)
    number = 0
    while kind := kinds[number]:
        if ggml.call("ggml_backend_buft_name", text, kind) == b"AMX":
            return int(kind)
        number += 1
    return None


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says, as far as AMX depends on it; None where it does not say it.

    Attributes:
        architecture: llama.cpp's name of it.
        file_type: LLAMA_FTYPE_… of most weights.
    """

    architecture: str | None = None
    file_type: int | None = None


def header(model: Path) -> GgufHeader:
    """Of a file, without its weights and vocabulary. Empty if it cannot be read: loading it says what is wrong."""
    library, pointer = ready(), ctypes.c_void_p
    opened = library.function("gguf_init_from_file", pointer, ctypes.c_char_p, _GgufParams)
    file = opened(os.fsencode(model), _GgufParams(True, None))
    if not file:
        return GgufHeader()

    def value(name: bytes, kind: int, get: str, result: Any) -> Any:
        key = library.function("gguf_find_key", ctypes.c_int64, pointer, ctypes.c_char_p)(file, name)
        if key < 0 or library.function("gguf_get_kv_type", ctypes.c_int, pointer, ctypes.c_int64)(file, key) != kind:
            return None
        return library.function(get, result, pointer, ctypes.c_int64)(file, key)

    try:
        name = value(b"general.architecture", _STRING, "gguf_get_val_str", ctypes.c_char_p)
        file_type = value(b"general.file_type", _UINT32, "gguf_get_val_u32", ctypes.c_uint32)
        return GgufHeader(None if name is None else name.decode("utf-8", "replace"), file_type)
    finally:
        library.function("gguf_free", None, pointer)(file)


class _GgufParams(ctypes.Structure):
    """`gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


_UINT32, _STRING = 4, 8  # GGUF_TYPE_…
