"""MLX with OpenBLAS in place of its reference BLAS, in a process of its own: it then behaves as fast libraries do.

`python openblas.py FOLDER HISTORIES FIRST [BLOCK_SIZE]` runs random histories of long prompts in exact mode, from seed FIRST
on, and prints what happened as JSON. With a block size nothing is proved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

PLACES = ("/usr/lib/*/openblas-*/libopenblas.so.0", "/usr/lib*/libopenblas.so.0")
LONG = 1_500
"""Tokens of a long prompt."""


def library() -> Path | None:
    """OpenBLAS with the usual names of functions, which numpy's own build has not; None if there is none."""
    if given := os.environ.get("OPENBLAS_LIBRARY"):
        return Path(given)
    return next((path for place in PLACES for path in Path("/").glob(place[1:])), None)


def run(folder: Path, histories: int, block_size: int | None = None, *, first: int = 0) -> dict[str, Any]:
    """What happened: the fields of `Tally`, of `Traits`, and the number of long prompts."""
    variables = {**os.environ, "LD_PRELOAD": str(library()), "OPENBLAS_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, str(folder), str(histories), str(first), *([str(block_size)] if block_size else [])]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(folder: str, histories: str, first: str, block_size: str = "") -> None:
    from headstart.config import Settings
    from headstart.engines.mlx import MlxEngine
    from headstart.engines.options import EngineOptions
    from headstart.serving.runtime import Runtime
    from histories import Lab

    assert "libopenblas" in Path("/proc/self/maps").read_text("utf-8"), "OpenBLAS was not loaded"

    def load(slots: int) -> MlxEngine:
        return MlxEngine.load(EngineOptions(folder, ctx=4096, slots=slots), block_size=int(block_size) if block_size else None)

    cold = load(1)
    shape, traits = cold.shape, cold.traits
    budget = 48 * traits.block_size * shape.kv_bytes_per_token + 24 * shape.state_bytes
    with Runtime(partial(load, 2), Settings(reuse="exact", memory_budget=budget)) as runtime:
        made = Lab(runtime, cold, words=430)
        for seed in range(int(first), int(first) + int(histories)):
            made.run(seed)
        tally = made.tally
    cold.close()
    long = sum(length > LONG for length in tally.prompts)
    found = {**vars(tally), **asdict(traits), "long": long, "prompted": sum(tally.prompts), "exact": traits.exact}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
