"""AMX: whether llama.cpp multiplies weights with this processor's tiles (Intel's Advanced Matrix Extensions).

A llama.cpp that was built for such a processor lays weights out for tiles when it loads them, and then computes prompts up to
2.5 times as fast (docs/benchmarks.md). Two faults of llama.cpp (as of 0.5.0) stand in the way:

* Most builds crash: compilers drop stores to the tile configuration, because GCC's own header says that only its first bytes
  are read (llama.cpp's issue 20824). `FLAGS` keep the stores.
* A product with a third dimension is wrong, and is written beyond its memory. Models with state have such products.

Nothing in a library tells good builds from others. So a process of its own (`amx_trial`) tries both, and the result is
remembered.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

from blake3 import blake3

from headstart.engines.llama.binding import lib, ready
from headstart.engines.llama.library import child_environment
from headstart.engines.memo import recall, remember

MATRICES, BATCHES = "matrices", "batches"
"""Kinds of products: of a matrix of weights with one matrix, and with several that lie behind each other."""
FLAGS = "-fno-tree-dse -fno-dse"
"""Flags of GCC with which a build does not crash."""
PLAIN = frozenset(
    "llama mistral3 qwen2 qwen2moe qwen3 qwen3moe gemma gemma2 gemma3 gpt-oss phi3 granite smollm3 cohere2 starcoder2 internlm2"
    " glm4 exaone4 ernie4_5 seed_oss nemotron".split()
)
"""Architectures whose weights are multiplied with matrices only, as llama.cpp's sources show."""
MEMO = "amx.json"
_TRIAL = "headstart.engines.llama.amx_trial"
_PATIENCE = 60.0
"""Seconds after which a trial is given up. It takes less than one."""
_MOST = 64
_found: dict[str, frozenset[str]] = {}
"""What this process has found out, by build."""


def built() -> bool:
    """Whether this build would lay weights out for tiles."""
    return b"AMX_INT8 = 1" in lib.llama_print_system_info()


def extra_buffers(model: Path, state_dir: Path | None = None) -> bool:
    """Whether llama.cpp may lay the weights of a model out for the processor's instructions. Only its way for tiles has faults.

    Args:
        model: the file.
        state_dir: see `works`.
    """
    if not built():
        return True
    right = works(state_dir)
    return BATCHES in right or (MATRICES in right and _architecture(model) in PLAIN)


def works(state_dir: Path | None = None) -> frozenset[str]:
    """The kinds of products that were right in the trial of this build; empty if it is not for tiles.

    Args:
        state_dir: folder that remembers the results of trials; None remembers them for this process.
    """
    if not built():
        return frozenset()
    library = ready().library
    # The kernel decides who may use tiles.
    key = blake3("\0".join((library.build, platform.release(), platform.version())).encode()).hexdigest()
    if key not in _found:
        known = recall(state_dir, MEMO)
        text = known.get(key)
        if not isinstance(text, str) and (text := _tried(library.file)) is not None:
            remember(state_dir, MEMO, dict(list({**known, key: text}.items())[-_MOST:]))
        _found[key] = frozenset((text or "").split())
    return _found[key]


def _tried(library: Path) -> str | None:
    """What the trial wrote before it ended; None if it could not be done, which says nothing about the build."""
    if not sys.executable:  # Python is part of another program
        return None
    command = [sys.executable, "-m", _TRIAL, str(library)]
    try:
        ended = subprocess.run(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.decode("utf-8", "replace")


def _architecture(model: Path) -> str | None:
    """What the file says, without its weights and vocabulary; None if it cannot be read. Loading it says what is wrong."""
    library, pointer = ready(), ctypes.c_void_p
    file = library.function("gguf_init_from_file", pointer, ctypes.c_char_p, _GgufParams)(
        os.fsencode(model), _GgufParams(True, None)
    )
    if not file:
        return None
    try:
        key = library.function("gguf_find_key", ctypes.c_int64, pointer, ctypes.c_char_p)(file, b"general.architecture")
        if key < 0 or library.function("gguf_get_kv_type", ctypes.c_int, pointer, ctypes.c_int64)(file, key) != _STRING:
            return None
        text = library.function("gguf_get_val_str", ctypes.c_char_p, pointer, ctypes.c_int64)(file, key)
        return str(text.decode("utf-8", "replace"))
    finally:
        library.function("gguf_free", None, pointer)(file)


class _GgufParams(ctypes.Structure):
    """`gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


_STRING = 8  # GGUF_TYPE_STRING
