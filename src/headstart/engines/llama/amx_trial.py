"""AMX trial: a process that multiplies weights with AMX, as llama.cpp does (`amx`). It may crash.

    python -m headstart.engines.llama.amx_trial LIBRARY

Its exit code is `amx.RIGHT` or `amx.WRONG`.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.engines.llama.amx import RIGHT, WRONG, layout, procedure
from headstart.engines.llama.binding import LoadedLibrary, ready

INNER, OUT = 256, 256
"""Sizes of the weights: enough for each thread."""
TOKENS = (1, 17, 192)
"""A decoding step, a call that fills none of the processor's registers, and one that fills many."""
TYPES = {"F16": (1, 0.02), "Q4_0": (2, 0.2), "Q4_1": (3, 0.2), "Q8_0": (8, 0.02), "Q4_K": (12, 0.2), "Q6_K": (14, 0.05)}
"""ggml's number of each type, and the greatest error, as a part of the greatest result: the weights are rounded."""
THREADS = 4
"""Each has to configure AMX for itself."""
_CPU, _F32 = 0, 0  # ggml's numbers
_MEMORY = 1 << 20

Array = npt.NDArray[Any]


class _InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Trial:
    """Products of weights that are laid out for AMX with float32 tokens, by ggml."""

    def __init__(self, library: LoadedLibrary) -> None:
        self._library = library

    def product(self, kind: int, weights: Array, tokens: Array) -> Array | None:
        """`tokens @ weights.T`; None if ggml does not offer AMX here.

        Args:
            kind: ggml's number of the type in which the weights are laid out.
            weights: float32 (OUT, INNER).
            tokens: float32 (tokens, INNER).
        """
        if (place := layout(self._library)) is None:
            return None
        device = self._call("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int(_CPU))
        backend = ctypes.c_void_p(self._call("ggml_backend_dev_init", ctypes.c_void_p, device, None))
        if address := procedure(self._library, device, "ggml_backend_set_n_threads"):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)(backend, THREADS)
        left, right = self._context(), self._context()
        weight = self._tensor(left, kind, INNER, OUT)
        self._call("ggml_backend_alloc_ctx_tensors_from_buft", ctypes.c_void_p, left, place)
        token = self._tensor(right, _F32, INNER, len(tokens))
        result = ctypes.c_void_p(self._call("ggml_mul_mat", ctypes.c_void_p, right, weight, token))
        graph = ctypes.c_void_p(self._call("ggml_new_graph", ctypes.c_void_p, right))
        self._call("ggml_build_forward_expand", None, graph, result)
        self._call("ggml_backend_alloc_ctx_tensors", ctypes.c_void_p, right, backend)
        for tensor, data in ((weight, self._laid_out(kind, weights)), (token, tokens)):
            self._call("ggml_backend_tensor_set", None, tensor, *_bytes(data))
        if self._call("ggml_backend_graph_compute", ctypes.c_int, backend, graph):
            return None
        out = np.empty((len(tokens), OUT), np.float32)
        self._call("ggml_backend_tensor_get", None, result, *_bytes(out))
        return out

    def _laid_out(self, kind: int, weights: Array) -> Array:
        """The weights as a file has them."""
        rows, row = len(weights), self._call("ggml_row_size", ctypes.c_size_t, ctypes.c_int(kind), ctypes.c_int64(INNER))
        out = np.empty(rows * row, np.uint8)
        sizes = (ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(INNER))
        self._call("ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int(kind), _bytes(weights)[0], _bytes(out)[0], *sizes, None)
        return out

    def _context(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._call("ggml_init", ctypes.c_void_p, _InitParams(_MEMORY, None, True)))

    def _tensor(self, context: ctypes.c_void_p, kind: int, *shape: int) -> ctypes.c_void_p:
        sizes = map(ctypes.c_int64, shape)
        return ctypes.c_void_p(self._call("ggml_new_tensor_2d", ctypes.c_void_p, context, ctypes.c_int(kind), *sizes))

    def _call(self, name: str, returns: Any, *arguments: Any) -> Any:
        kinds = (ctypes.c_void_p if one is None or isinstance(one, int) else type(one) for one in arguments)
        return self._library.function(name, returns, *kinds)(*arguments)


def _bytes(data: Array) -> tuple[ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]:
    """Address, offset and size of an array."""
    return data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(0), ctypes.c_size_t(data.nbytes)


def right(trial: Trial) -> bool:
    """Whether all products are what they should be."""
    dice = np.random.default_rng(0)
    weights = dice.standard_normal((OUT, INNER), np.float32)
    for kind, most in TYPES.values():
        for count in TOKENS:
            tokens = dice.standard_normal((count, INNER), np.float32)
            found, expected = trial.product(kind, weights, tokens), tokens @ weights.T
            if found is None or not np.abs(found - expected).max() < most * np.abs(expected).max():
                return False
    return True


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer here
    sys.exit(RIGHT if right(Trial(ready(Path(sys.argv[1])))) else WRONG)


if __name__ == "__main__":
    main()
