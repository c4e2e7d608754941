"""Devices: what llama.cpp can compute on, as ggml lists it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from headstart.engines.llama.binding import ready

CPU, GPU, INTEGRATED = 0, 1, 2
"""GGML_BACKEND_DEVICE_TYPE_CPU, _GPU (with memory of its own) and _IGPU (which uses the host's)."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device.

    Attributes:
        kind: as ggml numbers them: `CPU`, `GPU`, `INTEGRATED`, or an accelerator of the CPU.
        name: what it is.
        free, total: bytes of its memory; 0 if this build does not say.
    """

    kind: int
    name: str
    free: int = 0
    total: int = 0

    @property
    def is_gpu(self) -> bool:
        return self.kind in (GPU, INTEGRATED)


def devices() -> list[Device]:
    """All devices of the loaded library. Raises ConfigError if there is no usable library."""
    library, pointer = ready(), ctypes.c_void_p
    count = library.function("ggml_backend_dev_count", ctypes.c_size_t)
    get = library.function("ggml_backend_dev_get", pointer, ctypes.c_size_t)
    kind = library.function("ggml_backend_dev_type", ctypes.c_int, pointer)
    description = library.function("ggml_backend_dev_description", ctypes.c_char_p, pointer)
    found = []
    for device in map(get, range(count())):
        sizes = ctypes.c_size_t(), ctypes.c_size_t()
        if library.has("ggml_backend_dev_memory"):
            argument = ctypes.POINTER(ctypes.c_size_t)
            memory = library.function("ggml_backend_dev_memory", None, pointer, argument, argument)
            memory(device, ctypes.byref(sizes[0]), ctypes.byref(sizes[1]))
        found.append(Device(int(kind(device)), description(device).decode("utf-8", "replace"), sizes[0].value, sizes[1].value))
    return found
