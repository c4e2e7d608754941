"""AMX trial: a process that multiplies weights with AMX, as llama.cpp does (`amx`). It may crash.

    python -m headstart.engines.llama.amx_trial LIBRARY

Its exit code is `amx.RIGHT` or `amx.WRONG`.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np

from headstart.engines.llama.amx import RIGHT, WRONG, layout
from headstart.engines.llama.binding import LoadedLibrary, ready
from headstart.engines.llama.ggml import F32, Array, Ggml

INNER, OUT = 256, 256
"""Sizes of the weights: enough for each thread."""
TOKENS = (1, 17, 192)
"""A decoding step, a call that fills none of the processor's registers, and one that fills many."""
TYPES = {"F16": (1, 0.02), "Q4_0": (2, 0.2), "Q4_1": (3, 0.2), "Q8_0": (8, 0.02), "Q4_K": (12, 0.2), "Q6_K": (14, 0.05)}
"""ggml's number of each type, and the greatest error, as a part of the greatest result: the weights are rounded."""
THREADS = 4
"""Each has to configure AMX for itself."""


def product(library: LoadedLibrary, kind: int, weights: Array, tokens: Array) -> Array | None:
    """`tokens @ weights.T`, float32, with weights that are laid out for AMX; None if ggml does not offer AMX here.

    Args:
        kind: ggml's number of the type in which the weights are laid out.
        weights: float32 (OUT, INNER).
        tokens: float32 (tokens, INNER).
    """
    with Ggml(library, THREADS) as ggml:
        if (place := layout(ggml)) is None:
            return None
        left, right = ggml.context(), ggml.context()
        weight = ggml.tensor(left, kind, INNER, OUT)
        ggml.place(left, place)
        token = ggml.tensor(right, F32, INNER, len(tokens))
        inputs = ((weight, ggml.quantized(kind, weights)), (token, tokens))
        return ggml.compute(right, ggml.product(right, weight, token), inputs, (len(tokens), OUT))


def right(library: LoadedLibrary) -> bool:
    """Whether all products are what they should be."""
    dice = np.random.default_rng(0)
    weights = dice.standard_normal((OUT, INNER), np.float32)
    for kind, most in TYPES.values():
        for count in TOKENS:
            tokens = dice.standard_normal((count, INNER), np.float32)
            found, expected = product(library, kind, weights, tokens), tokens @ weights.T
            if found is None or not np.abs(found - expected).max() < most * np.abs(expected).max():
                return False
    return True


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer here
    sys.exit(RIGHT if right(ready(Path(sys.argv[1]))) else WRONG)


if __name__ == "__main__":
    main()
