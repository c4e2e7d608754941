"""Random histories in exact mode with a model of MLX, in a process of its own: with its BLAS, or with OpenBLAS in its place.

MLX's own BLAS for Linux is exact with calls of any size. With OpenBLAS it behaves as fast libraries do.

`python mlx_process.py FOLDER HISTORIES FIRST LONG [BLOCK_SIZE]` runs histories from seed FIRST on, every LONG-th of them with
long prompts, and prints what happened as JSON. With a block size nothing is proved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

PLACES = ("/usr/lib/*/openblas-*/libopenblas.so.0", "/usr/lib*/libopenblas.so.0")
LONG = 1_500
"""Tokens of a long prompt."""
_WORDS, _LONG_WORDS = 80, 430  # of a system prompt; each letter is a token


def openblas() -> Path | None:
    """OpenBLAS with the usual names of functions, which numpy's own build has not; None if there is none."""
    if given := os.environ.get("OPENBLAS_LIBRARY"):
        return Path(given)
    return next((path for place in PLACES for path in Path("/").glob(place[1:])), None)


def run(
    folder: Path,
    histories: int,
    block_size: int | None = None,
    *,
    first: int = 0,
    long: int = 1,
    blas: Path | None = None,
) -> dict[str, Any]:
    """What happened: the fields of `Tally` and of `Traits`, the number of long prompts, evictions, and seconds.

    Args:
        folder: of the model. What is proved of it is remembered beside it.
        long: every so many histories one has long prompts.
        blas: the library that takes the place of MLX's own.
    """
    variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if blas is not None:
        variables["LD_PRELOAD"] = str(blas)
    command = [sys.executable, __file__, *map(str, (folder, histories, first, long, block_size or ""))]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["preloaded"] == (blas is not None), "OpenBLAS was not loaded"
    return found


def main(folder: str, histories: str, first: str, long: str, block_size: str) -> None:
    from headstart.config import Settings
    from headstart.engines.mlx import MlxEngine
    from headstart.engines.options import EngineOptions
    from headstart.serving.runtime import Runtime
    from histories import Lab, Tally

    begun = time.monotonic()
    blas = os.environ.get("LD_PRELOAD")
    preloaded = bool(blas) and str(Path(str(blas)).resolve()) in Path("/proc/self/maps").read_text("utf-8")

    def load(slots: int) -> MlxEngine:
        options = EngineOptions(folder, ctx=4096, slots=slots, state_dir=Path(folder).with_suffix(".proofs"))
        return MlxEngine.load(options, block_size=int(block_size) if block_size else None)

    cold = load(1)
    shape, traits = cold.shape, cold.traits
    budget = 48 * traits.block_size * shape.kv_bytes_per_token + 24 * shape.state_bytes
    # mlx's streams belong to threads: the engine under test is loaded on the thread that uses it.
    with Runtime(partial(load, 2), Settings(reuse="exact", memory_budget=budget)) as runtime:
        tally = Tally()
        short, longer = (Lab(runtime, cold, words=words, tally=tally) for words in (_WORDS, _LONG_WORDS))
        for seed in range(int(first), int(first) + int(histories)):
            (longer if seed % int(long) == int(long) - 1 else short).run(seed)
        evicted = runtime.cache.store.counters["evicted"]
    cold.close()
    found = {
        **vars(tally),
        **asdict(traits),
        "long": sum(length > LONG for length in tally.prompts),
        "prompted": sum(tally.prompts),
        "exact": traits.exact,
        "evicted": evicted,
        "preloaded": preloaded,
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_seconds": round(time.process_time(), 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
