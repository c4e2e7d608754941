"""ggml: single operations of llama.cpp's own library for tensors, on the processor: to try a build, and to measure it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.engines.llama.binding import LoadedLibrary

F32, F16 = 0, 1
"""GGML_TYPE_… of tensors."""
CPU = 0
"""GGML_BACKEND_DEVICE_TYPE_CPU."""
_MEMORY = 1 << 20
_pointer = ctypes.c_void_p

Array = npt.NDArray[Any]
Tensor = ctypes.c_void_p


class Ggml:
    """What graphs need. All of it lives as long as its `with`.

    Attributes:
        device: the processor.
    """

    def __init__(self, library: LoadedLibrary, threads: int = 1) -> None:
        self.library = library
        self.device = self.call("ggml_backend_dev_by_type", _pointer, ctypes.c_int(CPU))
        self._threads = threads
        self._freed = ExitStack()

    def __enter__(self) -> Ggml:
        return self

    def __exit__(self, *_: object) -> None:
        self._freed.close()

    def call(self, name: str, returns: Any, *arguments: Any) -> Any:
        """Any function of ggml. An int or None is passed as a pointer."""
        kinds = (_pointer if one is None or isinstance(one, int) else type(one) for one in arguments)
        return self.library.function(name, returns, *kinds)(*arguments)

    def context(self) -> Tensor:
        """Holds tensors without their data."""
        made = Tensor(self.call("ggml_init", _pointer, _InitParams(_MEMORY, None, True)))
        self._freed.callback(self.call, "ggml_free", None, made)
        return made

    def tensor(self, context: Tensor, kind: int, *shape: int) -> Tensor:
        """`shape` in ggml's order: the first dimension is the innermost."""
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        name, count = "ggml_new_tensor", ctypes.c_int(len(shape))
        return Tensor(self.call(name, _pointer, context, ctypes.c_int(kind), count, ctypes.cast(sizes, _pointer)))

    def place(self, context: Tensor, buffers: int) -> None:
        """Takes memory for a context's tensors, in this kind of buffers (an address)."""
        self._keep(self.call("ggml_backend_alloc_ctx_tensors_from_buft", _pointer, context, buffers))

    def fill(self, tensor: Tensor, data: Array) -> None:
        self.call("ggml_backend_tensor_set", None, tensor, *span(data))

    def product(self, context: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
        """`tokens @ weights.T`: not yet computed, as all results here."""
        return Tensor(self.call("ggml_mul_mat", _pointer, context, weights, tokens))

    def attention(self, context: Tensor, parts: Sequence[Tensor], mask: Tensor, scale: float) -> Tensor:
        """`parts`: queries (F32), keys and values, each of [elements, rows, heads]. A mask of None hides nothing."""
        numbers = (ctypes.c_float(scale), ctypes.c_float(0), ctypes.c_float(0))
        return Tensor(self.call("ggml_flash_attn_ext", _pointer, context, *parts, mask, *numbers))

    def quantized(self, kind: int, rows: Array) -> Array:
        """Rows of float32 as bytes of a type, as a file has them: without a layout for a processor."""
        count, width = rows.shape
        size = self.call("ggml_row_size", ctypes.c_size_t, ctypes.c_int(kind), ctypes.c_int64(width))
        out = np.empty(count * size, np.uint8)
        sizes = (ctypes.c_int64(0), ctypes.c_int64(count), ctypes.c_int64(width))
        name = "ggml_quantize_chunk"
        self.call(name, ctypes.c_size_t, ctypes.c_int(kind), span(rows)[0], span(out)[0], *sizes, None)
        return out

    @contextmanager
    def prepared(self, context: Tensor, result: Tensor, inputs: Sequence[tuple[Tensor, Array]]) -> Iterator[Callable[[], bool]]:
        """A function that computes the result from these inputs, and says whether it could. Once for a context."""
        graph = Tensor(self.call("ggml_new_graph", _pointer, context))
        self.call("ggml_build_forward_expand", None, graph, result)
        with self._backend() as backend:
            buffer = self.call("ggml_backend_alloc_ctx_tensors", _pointer, context, backend)
            self._keep(buffer)
            for tensor, data in inputs if buffer is not None else ():
                self.fill(tensor, data)

            def run() -> bool:
                return buffer is not None and not self.call("ggml_backend_graph_compute", ctypes.c_int, backend, graph)

            yield run

    def compute(
        self, context: Tensor, result: Tensor, inputs: Sequence[tuple[Tensor, Array]], shape: tuple[int, ...]
    ) -> Array | None:
        """The result, float32 of this shape (numpy's order); None if ggml refuses. Once for a context."""
        with self.prepared(context, result, inputs) as run:
            if not run():
                return None
        out = np.empty(shape, np.float32)
        self.call("ggml_backend_tensor_get", None, result, *span(out))
        return out

    def procedure(self, name: str) -> int | None:
        """The address of a function that the processor's backend has beside its interface."""
        registry = self.call("ggml_backend_dev_backend_reg", _pointer, self.device)
        found = self.call("ggml_backend_reg_get_proc_address", _pointer, registry, ctypes.c_char_p(name.encode()))
        return None if found is None else int(found)

    @contextmanager
    def _backend(self) -> Iterator[Tensor]:
        backend = Tensor(self.call("ggml_backend_dev_init", _pointer, self.device, None))
        if address := self.procedure("ggml_backend_set_n_threads"):
            ctypes.CFUNCTYPE(None, _pointer, ctypes.c_int)(address)(backend, self._threads)
        try:
            yield backend
        finally:
            self.call("ggml_backend_free", None, backend)

    def _keep(self, buffer: int | None) -> None:
        """Until the end."""
        if buffer is not None:
            self._freed.callback(self.call, "ggml_backend_buffer_free", None, buffer)


class _InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def span(data: Array) -> tuple[ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]:
    """Address, offset and size of an array."""
    return data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(0), ctypes.c_size_t(data.nbytes)
