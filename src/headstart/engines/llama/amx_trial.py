"""AMX trial: a process that multiplies weights with tiles, as llama.cpp does (`amx`). It may crash.

    python -m headstart.engines.llama.amx_trial LIBRARY

It writes a word for each kind of product that is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.engines.llama.amx import BATCHES, MATRICES
from headstart.engines.llama.binding import LoadedLibrary, ready

INNER, OUT, TOKENS = 256, 256, 192
"""Sizes of the matrices: several tiles for each thread."""
THREADS = 4
"""Each has to configure the tiles for itself."""
BLOCK = 32
"""Values with one scale, in the type Q8_0."""
_CPU, _F32, _Q8_0 = 0, 0, 8  # ggml's numbers
_MEMORY = 1 << 20

Array = npt.NDArray[Any]


class _InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Trial:
    """A product of Q8_0 weights in tiles with float32 tokens, by ggml."""

    def __init__(self, library: LoadedLibrary) -> None:
        self._library = library

    def product(self, weights: Array, tokens: Array) -> Array | None:
        """`tokens @ weights.T`; None if ggml has no tiles here.

        Args:
            weights: Q8_0 blocks as bytes, of (OUT, INNER) values.
            tokens: float32 (batches, tokens, INNER).
        """
        device = self._call("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int(_CPU))
        if (tiles := self._tiles(device)) is None:
            return None
        backend = self._call("ggml_backend_dev_init", ctypes.c_void_p, device, None)
        self._call("ggml_backend_cpu_set_n_threads", None, ctypes.c_void_p(backend), ctypes.c_int(THREADS))
        left, right = self._context(), self._context()
        weight = self._tensor(left, _Q8_0, INNER, OUT, 1)
        self._call("ggml_backend_alloc_ctx_tensors_from_buft", ctypes.c_void_p, left, tiles)
        token = self._tensor(right, _F32, *tokens.shape[::-1])
        result = ctypes.c_void_p(self._call("ggml_mul_mat", ctypes.c_void_p, right, weight, token))
        graph = ctypes.c_void_p(self._call("ggml_new_graph", ctypes.c_void_p, right))
        self._call("ggml_build_forward_expand", None, graph, result)
        self._call("ggml_backend_alloc_ctx_tensors", ctypes.c_void_p, right, ctypes.c_void_p(backend))
        for tensor, data in ((weight, weights), (token, tokens)):
            pointer = data.ctypes.data_as(ctypes.c_void_p)
            self._call("ggml_backend_tensor_set", None, tensor, pointer, ctypes.c_size_t(0), ctypes.c_size_t(data.nbytes))
        if self._call("ggml_backend_graph_compute", ctypes.c_int, ctypes.c_void_p(backend), graph):
            return None
        out = np.empty((*tokens.shape[:2], OUT), np.float32)
        pointer = out.ctypes.data_as(ctypes.c_void_p)
        self._call("ggml_backend_tensor_get", None, result, pointer, ctypes.c_size_t(0), ctypes.c_size_t(out.nbytes))
        return out

    def _tiles(self, device: int) -> ctypes.c_void_p | None:
        """The kind of buffer in which weights are laid out for tiles."""
        registry = self._call("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p(device))
        name = ctypes.c_char_p(b"ggml_backend_dev_get_extra_bufts")
        address = self._call("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p(registry), name)
        if not address:
            return None
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        number = 0
        while kind := kinds[number]:
            if self._call("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p(kind)) == b"AMX":
                return ctypes.c_void_p(kind)
            number += 1
        return None

    def _context(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._call("ggml_init", ctypes.c_void_p, _InitParams(_MEMORY, None, True)))

    def _tensor(self, context: ctypes.c_void_p, kind: int, *shape: int) -> ctypes.c_void_p:
        sizes = map(ctypes.c_int64, shape)
        return ctypes.c_void_p(self._call("ggml_new_tensor_3d", ctypes.c_void_p, context, ctypes.c_int(kind), *sizes))

    def _call(self, name: str, returns: Any, *arguments: Any) -> Any:
        kinds = (ctypes.c_void_p if one is None or isinstance(one, int) else type(one) for one in arguments)
        return self._library.function(name, returns, *kinds)(*arguments)


def quantized(values: Array) -> tuple[Array, Array]:
    """Values of float32 as Q8_0 blocks, and what these blocks mean."""
    blocks = values.reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    small = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    meant = small.astype(np.float32) * scales.astype(np.float32)
    return np.concatenate([scales.view(np.uint8), small.view(np.uint8)], axis=1), meant.reshape(values.shape)


def right(library: LoadedLibrary, batches: int) -> bool:
    """Whether a product is what it should be. ggml rounds the tokens to eight bits."""
    dice = np.random.default_rng(0)
    blocks, weights = quantized(dice.standard_normal((OUT, INNER), np.float32))
    tokens = dice.standard_normal((batches, TOKENS // batches, INNER), np.float32)
    found = Trial(library).product(blocks, tokens)
    expected = tokens @ weights.T
    return found is not None and float(np.abs(found - expected).max()) < 0.02 * float(np.abs(expected).max())


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer here
    library = ready(Path(sys.argv[1]))
    for kind, batches in ((MATRICES, 1), (BATCHES, 3)):
        if right(library, batches):
            print(kind, flush=True)


if __name__ == "__main__":
    main()
