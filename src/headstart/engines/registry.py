"""Registry: which engine loads a model. An engine is a class with a `load(options, *, progress, anew)`.

It may also have a class method `load_tokenizer(options)`, for programs that make prompts and compute nothing. A row of the
table may have a function in place of that method, so that no native code of the engine is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any

from headstart.engines import model_file, model_folder
from headstart.engines.options import EngineOptions
from headstart.errors import ConfigError, HeadstartError
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokenizer import LoadedTokenizer
from headstart.names import option
from headstart.paths import expanded


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine that can be chosen.

    Attributes:
        name: of the engine.
        module, loader: the engine's class, and the module that defines it. The module is imported only if its engine is chosen,
            because it loads native code.
        takes: whether it can load the model that a path names.
        check: raises ModelError if the model's files are missing or of another form. It loads no native code.
        models: the models that it takes, in a sentence about an option.
        extra: the extra of headstart's package that brings what it needs; "" if headstart itself does.
        options: the fields of `EngineOptions` that only some engines have, and this one has.
        instead: what to do in place of an option that this engine lacks.
        tokenizer: loads a model's tokenizer and chat template; None if the class does, or nobody.
        forkable: whether a process may import the module and then fork: it starts nothing and loads no library of the engine.
        preload: does what every load does first, before it is known which model will be loaded.
    """

    name: str
    module: str
    loader: str
    takes: Callable[[str], bool]
    check: Callable[[str], object]
    models: str
    extra: str = ""
    options: frozenset[str] = frozenset()
    instead: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Callable[[EngineOptions], LoadedTokenizer] | None = None
    forkable: bool = False
    preload: Callable[[], None] = lambda: None


def _preload_llama() -> None:
    from headstart.engines.llama.binding import ready_if_tested

    ready_if_tested()


def _hf_tokenizer(options: EngineOptions) -> LoadedTokenizer:
    from headstart.engines.hf_tokenizer import HFTokenizer

    return HFTokenizer(expanded(options.model))


ENGINES = (
    EngineRow(
        "mlx",
        "headstart.engines.mlx",
        "MlxEngine",
        model_folder.is_model_folder,
        model_folder.check,
        "folders in Hugging Face's form",
        extra="mlx",
        instead={
            "kv_type": "keys and values are kept in the type of the model.",
            "lora": "fuse the adapter with mlx_lm.fuse, and serve the result.",
            "gpu_layers": "MLX computes the whole model on one device.",
            "threads": "MLX chooses its threads itself.",
        },
        tokenizer=_hf_tokenizer,
    ),
    EngineRow(
        "llama",
        "headstart.engines.llama",
        "LlamaEngine",
        lambda model: True,
        model_file.locate,
        "GGUF files",
        options=frozenset({"threads", "gpu_layers", "kv_type", "lora", "llama_lib"}),
        forkable=True,
        preload=_preload_llama,
    ),
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
    row = _row(options)
    _refuse(row, options)
    engine: Engine = _loader(row).load(options, progress=progress, anew=anew)
    return engine


def import_forkable() -> None:
    """Imports engines in a process that forks others, as far as they may be imported there."""
    for row in ENGINES:
        if row.forkable:
            import_module(row.module)


def preload() -> None:
    """Does what every load does first. For a process that waits for its model. Errors are left to the load."""
    for row in ENGINES:
        with suppress(HeadstartError, ImportError, OSError):
            row.preload()


def check(options: EngineOptions) -> None:
    """Finds wrong files before anything is loaded.

    Raises:
        ConfigError: an option of another engine.
        ModelError: the file is missing, or of another form.
    """
    row = _row(options)
    _refuse(row, options)
    row.check(options.model)


def without_foreign(options: EngineOptions) -> EngineOptions:
    """The options without those of other engines. For options that are given once for several models."""
    return replace(options, **{name: _DEFAULTS[name] for name in _foreign(_row(options), options)})


def load_tokenizer(options: EngineOptions) -> LoadedTokenizer:
    """Loads the tokenizer and the chat template of a model, without its weights. Close it.

    Raises:
        ConfigError: the engine that takes the model cannot load them alone.
        ModelError: the file is missing, broken or unsupported.
    """
    row = _row(options)
    load = row.tokenizer or getattr(_loader(row), "load_tokenizer", None)
    if load is None:
        raise ConfigError(
            f"The engine '{row.name}' cannot load a tokenizer without its model; choose a model of another engine."
        )
    with _installed(row):
        tokenizer: LoadedTokenizer = load(options)
    return tokenizer


_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(EngineOptions) if one.name != "model"}


def _foreign(row: EngineRow, options: EngineOptions) -> list[str]:
    """The given options that other engines have, and this one has not."""
    others = frozenset[str]().union(*(other.options for other in ENGINES)) - row.options
    return [name for name, default in _DEFAULTS.items() if name in others and getattr(options, name) != default]


def _refuse(row: EngineRow, options: EngineOptions) -> None:
    """Raises ConfigError for an option of another engine."""
    for name in _foreign(row, options):
        owner = next(other for other in ENGINES if name in other.options)
        raise ConfigError(
            f"{option(name)} is for {owner.models}, and '{options.model}' is computed by the engine '{row.name}': "
            + row.instead.get(name, "leave it out.")
        )


def _row(options: EngineOptions) -> EngineRow:
    return next(row for row in ENGINES if row.takes(options.model))


def _loader(row: EngineRow) -> Any:
    with _installed(row):
        return getattr(import_module(row.module), row.loader)


@contextmanager
def _installed(row: EngineRow) -> Iterator[None]:
    """Raises ConfigError if what the engine needs is not installed."""
    try:
        yield
    except ImportError as error:
        if not row.extra:
            raise
        raise ConfigError(
            f"This model needs the engine '{row.name}', which is not installed ({error}): pip install 'headstart[{row.extra}]'."
        ) from None
