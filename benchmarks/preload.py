"""Preload: what a process of an MLX model has because it was made ready for llama.cpp too: `python -m benchmarks.preload`.

On Linux a server of several models forks its processes from one that has imported the engine's code, and each loads llama.cpp's
library while it waits for its model. Here such a process loads a tiny MLX model, beside one that did neither. In MiB, medians
and extremes of the rounds; private is what the process alone has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.fixtures import of_tests

KINDS = ("Rss", "Pss", "Private")
_CODE = """
import json, os, sys
from headstart.engines import registry
from headstart.engines.options import EngineOptions
from headstart.models import fork_server
ready = sys.argv[2] == "ready"
if not ready:
    registry.import_forkable = lambda: None
fork_server.prepare()
if os.fork():
    os.wait()
else:
    if ready:
        registry.preload()
    engine = registry.load(EngineOptions(sys.argv[1], ctx=2048, slots=1))
    rows = [line.split() for line in open("/proc/self/smaps_rollup")][1:]
    sizes = {row[0].rstrip(":"): int(row[1]) / 1024 for row in rows}
    print(json.dumps(sizes), flush=True)
    os._exit(0)
"""


def measured(model: Path, state: str) -> dict[str, float]:
    """MiB of a forked process that has loaded a model, by kind."""
    done = subprocess.run([sys.executable, "-c", _CODE, str(model), state], capture_output=True, text=True, check=True)
    sizes: dict[str, float] = json.loads(done.stdout)
    sizes["Private"] = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {kind: sizes[kind] for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preload", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "llama")
        of_tests("tiny_hf").write(model, "llama")
        found: dict[str, list[dict[str, float]]] = {"ready": [], "bare": []}
        for _ in range(rounds):
            for state, rows in found.items():
                rows.append(measured(model, state))
    for kind in KINDS:
        gaps = [ready[kind] - bare[kind] for ready, bare in zip(found["ready"], found["bare"], strict=True)]
        middle = {state: statistics.median(row[kind] for row in rows) for state, rows in found.items()}
        print(
            f"{kind}: ready {middle['ready']:.1f}, bare {middle['bare']:.1f}, "
            f"difference {statistics.median(gaps):.1f} ({min(gaps):.1f} – {max(gaps):.1f})"
        )


if __name__ == "__main__":
    main()
