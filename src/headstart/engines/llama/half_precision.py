"""Half precision: whether this build of llama.cpp computes with F16 values in F16, as attention does token by token.

A build for a processor with AVX512-FP16 does. It takes 128 elements in a step, and those that do not fill one alone: so a
reply of a model with heads of 64 takes twice as long deep in a conversation (docs/benchmarks.md).
"""

from __future__ import annotations

import numpy as np

from headstart.engines.llama.binding import LoadedLibrary
from headstart.engines.llama.ggml import F16, F32, Array, Ggml, Tensor

FLAG = "-mno-avx512fp16"
"""Flag of GCC and Clang for a build that does not."""
STEP = 128
"""Elements that AVX512-FP16 takes in a step."""
_HALF, _CELLS, _SCALE = STEP // 2, 32, 0.1


def computes_in_f16(library: LoadedLibrary) -> bool:
    """Whether F16 values are multiplied and added in F16, `STEP` elements in a step. Depends on the build alone; takes some ms.

    Versions that were not tested are not tried, because their functions may have other arguments. What is built for AMX is
    built for AVX512-FP16 too, if no flag says otherwise: so that is assumed of them.
    """
    system = library.module.llama_print_system_info()
    if not library.library.tested:
        return b"AMX_INT8 = 1" in system
    return b"AVX512 = 1" in system and _halves_differ(library)


def _halves_differ(library: LoadedLibrary) -> bool:
    """Whether elements that fill no step get other bits than the same elements in one that is full."""
    dice = np.random.default_rng(0)
    query, keys, values = (dice.standard_normal((rows, _HALF), np.float32) for rows in (1, _CELLS, _CELLS))
    with Ggml(library) as ggml:
        half = _attention(ggml, query, keys, values)
        # With AVX-512, zeros change no bit of a score.
        whole = _attention(ggml, _doubled(query), _doubled(keys), _doubled(values))
    return half is not None and whole is not None and not np.array_equal(half, whole[:_HALF])


def _doubled(rows: Array) -> Array:
    """With zeros behind each row."""
    return np.concatenate((rows, np.zeros_like(rows)), axis=1)


def _attention(ggml: Ggml, query: Array, keys: Array, values: Array) -> Array | None:
    """One head's result, float32 (elements), for arrays of (rows, elements)."""
    parts = ((F32, query), (F16, keys.astype(np.float16)), (F16, values.astype(np.float16)))
    context = ggml.context()
    tensors = [ggml.tensor(context, kind, part.shape[1], part.shape[0], 1) for kind, part in parts]
    result = ggml.attention(context, tensors, Tensor(None), _SCALE)
    inputs = [(tensor, part) for tensor, (_, part) in zip(tensors, parts, strict=True)]
    return ggml.compute(context, result, inputs, (values.shape[1],))
