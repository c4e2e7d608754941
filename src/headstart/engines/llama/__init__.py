"""llama.cpp through llama-cpp-python's low-level C API. In reading order: `digest`, `library`, `features`,
`abi`, `work_buffer`, `binding`, `devices`, `load`, `vocab`, `batch`, `padding`, `sampler`, `blob`, `part`, `kv_transfer`,
`identity`, `device_plan`, `placement`, `first_load`, `engine`."""

import os

# libgomp reads this once, when llama.cpp is loaded. By default its workers spin 300,000 times after each call, on the cores
# that send the answer and read the next request. With 2,000 times decoding is as fast (docs/benchmarks.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from headstart.engines.llama.engine import LlamaEngine

__all__ = ["LlamaEngine"]
