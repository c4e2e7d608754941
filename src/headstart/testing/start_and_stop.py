"""Start and stop: a process that computes a prompt with an engine and ends. Conformance checks look at its exit code.

`python -m headstart.testing.start_and_stop ENGINE closed` closes the engine. With `open` the end of the process must do that.
"""

from __future__ import annotations

import sys

from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.serving.warm_check import compute
from headstart.testing.named_engine import engine_maker

WAYS = ("closed", "open")


def main(engine: str, way: str) -> None:
    runtime = Runtime(engine_maker(engine), Settings(memory_budget=1 << 24))
    compute(runtime, runtime.text_prompt("Start, and stop."), reply=3)
    if way == "closed":
        runtime.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
