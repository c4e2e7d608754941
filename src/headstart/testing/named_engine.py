"""Named engine: an engine by name, as `pytest --engine` takes it.

my_package.engine:MyEngine   a class or a function without arguments that makes the engine
my_package.engine            the only subclass of `Engine` that the module defines
my_engine.py:MyEngine        the same in a file
model.gguf, FOLDER           a model, which headstart's own engines load
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from headstart.engines import registry
from headstart.engines.options import EngineOptions
from headstart.errors import ConfigError
from headstart.interfaces.engine import Engine
from headstart.paths import default_state_dir, expanded

CTX, SLOTS = 2048, 2
"""Of a model: enough for the proof of exactness behind a long prefix."""


def engine_maker(name: str) -> Callable[[], Engine]:
    """A function that makes the engine of this name.

    Raises:
        ConfigError: there is no such engine; the message says what was looked for.
    """
    place, _, attribute = name.partition(":")
    if not attribute and not place.endswith(".py") and expanded(place).exists():
        options = EngineOptions(place, ctx=CTX, slots=SLOTS, state_dir=default_state_dir())
        return lambda: registry.load(options)
    module = _module(place)
    if not attribute:
        found = [value for value in vars(module).values() if _is_engine(value, module.__name__)]
        if len(found) != 1:
            raise ConfigError(f"'{place}' defines {len(found)} engines, not one: name it, as in '{place}:MyEngine'.")
        make: Callable[[], Engine] = found[0]
        return make
    make = getattr(module, attribute, None)  # type: ignore[assignment]
    if not callable(make):
        raise ConfigError(f"'{place}' has no class or function '{attribute}'.")
    return make


def _is_engine(value: object, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, Engine) and value.__module__ == module


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigError(f"There is no engine '{place}': neither a module nor a model has this name ({error}).") from None
    path = expanded(place).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"There is no file '{place}'.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module
