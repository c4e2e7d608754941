"""llama.cpp through llama-cpp-python's low-level C API. In reading order: `digest`, `load`, `vocab`, `batch`,
`padding`, `sampler`, `blob`, `part`, `kv_transfer`, `identity`, `engine`."""

import os

# libgomp reads this once, when llama.cpp is loaded. By default its workers spin 300,000 times after each call, on the cores
# that send the answer and read the next request. With 2,000 times decoding is as fast (docs/benchmarks.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from headstart.errors import ConfigError

try:
    import llama_cpp as _  # noqa: F401
except (ImportError, OSError, RuntimeError, AttributeError) as error:
    raise ConfigError(
        f"llama.cpp cannot be loaded ({error}): install llama-cpp-python==0.3.36 again, or name the folder of its libraries in "
        "LLAMA_CPP_LIB_PATH."
    ) from error

from headstart.engines.llama.engine import LlamaEngine

__all__ = ["LlamaEngine"]
