"""llama.cpp through llama-cpp-python's low-level C API. In reading order: `file`, `load`, `fit`, `vocab`, `batch`, `sampler`,
`blob`, `part`, `rows`, `proof`, `identity`, `engine`."""

from headstart.engines.llama.engine import LlamaEngine

__all__ = ["LlamaEngine"]
