"""Registry: which engine loads a model. An engine is a class with a `load(settings, *, progress, anew)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from headstart.config import Settings
from headstart.interfaces.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine that can be chosen.

    Attributes:
        name: of the engine.
        module, loader: the class whose `load` makes one; the module is imported when it is chosen, as it loads native code.
        takes: whether it loads the model that settings name.
    """

    name: str
    module: str
    loader: str
    takes: Callable[[Settings], bool]


ENGINES = (EngineRow("llama", "headstart.engines.llama", "LlamaEngine", lambda settings: True),)
"""The first row that takes a model loads it. llama.cpp comes last: it says what is wrong with any path."""


def load(settings: Settings, progress: Callable[[float], None] | None = None, *, anew: bool = False) -> Engine:
    """The engine of a model, loaded.

    Args:
        progress: called with the loaded share, from 0 to 1.
        anew: prove all of it, also what an earlier load has proved.

    Raises:
        ConfigError: a setting that cannot work.
        ModelError: the file is missing, broken or unsupported.
    """
    row = next(row for row in ENGINES if row.takes(settings))
    engine: Engine = getattr(import_module(row.module), row.loader).load(settings, progress=progress, anew=anew)
    return engine
