"""Registry: which engine loads a model. An engine is a class with a `load(options, *, progress, anew)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from headstart.engines.options import EngineOptions
from headstart.interfaces.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine that can be chosen.

    Attributes:
        name: of the engine.
        module, loader: the engine's class, and the module that defines it. The module is imported only if its engine is chosen,
            because it loads native code.
        takes: whether it can load the model that the options name.
    """

    name: str
    module: str
    loader: str
    takes: Callable[[EngineOptions], bool]


ENGINES = (EngineRow("llama", "headstart.engines.llama", "LlamaEngine", lambda options: True),)
"""The first engine that takes a model loads it. llama.cpp is last, because it says what is wrong with any path."""


def load(options: EngineOptions, progress: Callable[[float], None] | None = None, *, anew: bool = False) -> Engine:
    """Loads a model with the engine that takes it.

    Args:
        progress: called with the loaded share, from 0 to 1.
        anew: prove everything again, also what an earlier load has proved.

    Raises:
        ConfigError: an option that cannot work.
        ModelError: the file is missing, broken or unsupported.
    """
    row = next(row for row in ENGINES if row.takes(options))
    engine: Engine = getattr(import_module(row.module), row.loader).load(options, progress=progress, anew=anew)
    return engine
