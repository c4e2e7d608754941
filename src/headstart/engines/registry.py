"""Registry: which engine loads a model. An engine is a class with a `load(options, *, progress, anew)`.

It may also have a class method `load_tokenizer(options)`, for programs that make prompts and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from headstart.engines import model_file, model_folder
from headstart.engines.options import EngineOptions
from headstart.errors import ConfigError
from headstart.interfaces.engine import Engine, LoadedTokenizer


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine that can be chosen.

    Attributes:
        name: of the engine.
        module, loader: the engine's class, and the module that defines it. The module is imported only if its engine is chosen,
            because it loads native code.
        takes: whether it can load the model that a path names.
        check: raises ModelError if the model's files are missing or of another form. It loads no native code.
        extra: the extra of headstart's package that brings what it needs; "" if headstart itself does.
    """

    name: str
    module: str
    loader: str
    takes: Callable[[str], bool]
    check: Callable[[str], object]
    extra: str = ""


ENGINES = (
    EngineRow("mlx", "headstart.engines.mlx", "MlxEngine", model_folder.is_model_folder, model_folder.check, "mlx"),
    EngineRow("llama", "headstart.engines.llama", "LlamaEngine", lambda model: True, model_file.locate),
)
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
    engine: Engine = _loader(_row(options)).load(options, progress=progress, anew=anew)
    return engine


def check(options: EngineOptions) -> None:
    """Finds wrong files before anything is loaded.

    Raises:
        ModelError: the file is missing, or of another form.
    """
    _row(options).check(options.model)


def load_tokenizer(options: EngineOptions) -> LoadedTokenizer:
    """Loads the tokenizer and the chat template of a model, without its weights. Close it.

    Raises:
        ConfigError: the engine that takes the model cannot load them alone.
        ModelError: the file is missing, broken or unsupported.
    """
    row = _row(options)
    load = getattr(_loader(row), "load_tokenizer", None)
    if load is None:
        raise ConfigError(
            f"The engine '{row.name}' cannot load a tokenizer without its model; choose a model of another engine."
        )
    tokenizer: LoadedTokenizer = load(options)
    return tokenizer


def _row(options: EngineOptions) -> EngineRow:
    return next(row for row in ENGINES if row.takes(options.model))


def _loader(row: EngineRow) -> Any:
    """Raises ConfigError if what the engine needs is not installed."""
    try:
        return getattr(import_module(row.module), row.loader)
    except ImportError as error:
        if not row.extra:
            raise
        raise ConfigError(
            f"This model needs the engine '{row.name}', which is not installed ({error}): pip install 'headstart[{row.extra}]'."
        ) from None
