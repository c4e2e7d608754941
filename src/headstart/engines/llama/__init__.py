"""llama.cpp through llama-cpp-python's low-level C API. In reading order: `file`, `memo`, `digest`, `load`, `fit`, `vocab`,
`batch`, `padding`, `sampler`, `blob`, `part`, `rows`, `proof`, `proven`, `identity`, `engine`."""

import os

# libgomp reads it once, when llama.cpp is loaded. Its workers would turn 300,000 times behind each call, on the cores on which
# the answer is sent and the next request is read; with 2,000 turns decoding is as fast (docs/benchmarks.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from headstart.engines.llama.engine import LlamaEngine

__all__ = ["LlamaEngine"]
