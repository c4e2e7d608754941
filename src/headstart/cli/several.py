"""Several: the options of `serve` for more than one model, and which models they name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.options import reader
from headstart.config import Settings
from headstart.errors import ConfigError, ModelError
from headstart.model_names import model_names
from headstart.paths import expanded, is_folder
from headstart.units import parse_time

if TYPE_CHECKING:
    from headstart.hub.local_model import LocalModel
    from headstart.models.naming import NamedModel
    from headstart.models.serve import SeveralModels

GROUP = "Several models"

MoreModels = Annotated[
    list[str] | None,
    typer.Argument(
        envvar="HEADSTART_MODELS",
        metavar="[NAME=MODEL]...",
        help="Further models, with names (docs/several-models.md). In the environment: separated by blanks.",
        show_default=False,
    ),
]
ModelsDir = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_MODELS_DIR",
        metavar="FOLDER",
        rich_help_panel=GROUP,
        help="Serve every model in this folder by its name: `.gguf` files, and folders for MLX. Each is loaded when it is "
        "first asked for.",
    ),
]
KeepLoaded = Annotated[
    int | None,
    typer.Option(
        min=1,
        envvar="HEADSTART_KEEP_LOADED",
        metavar="N",
        rich_help_panel=GROUP,
        help="Most models that are loaded at the same time. For another one, the least valuable idle model is unloaded.",
        show_default="what fits into --memory, at most 3",
    ),
]
IdleUnload = Annotated[
    float | None,
    typer.Option(
        parser=reader(parse_time),
        envvar="HEADSTART_IDLE_UNLOAD",
        metavar="TIME",
        rich_help_panel=GROUP,
        help="Unload a model after this time without a request, like 10min or 2h.",
        show_default="when another one needs its memory",
    ),
]
DefaultModel = Annotated[
    str | None,
    typer.Option(
        envvar="HEADSTART_DEFAULT_MODEL",
        metavar="NAME",
        rich_help_panel=GROUP,
        help="Model of requests that name none.",
        show_default="the first one",
    ),
]


@dataclass(frozen=True, slots=True)
class SeveralOptions:
    """Which models there are, and how many are kept. `models`: the arguments behind the first one."""

    models: MoreModels = None
    models_dir: ModelsDir = None
    keep_loaded: KeepLoaded = None
    idle_unload: IdleUnload = None
    default_model: DefaultModel = None

    @property
    def given(self) -> bool:
        """Whether one of them needs several models."""
        return any((self.models, self.models_dir, self.keep_loaded, self.idle_unload, self.default_model))


def several_models(
    settings: Settings,
    options: SeveralOptions,
    alias: Sequence[str],
    fetched: Callable[[str], LocalModel | None],
    *,
    allow_pull: bool = False,
) -> SeveralModels | None:
    """The models that a command names; None if it is one without a name, which is served as ever.

    With a folder of models, and where everybody may fetch, the models that headstart has fetched are served too.

    Args:
        fetched: the model of a name, fetched if it is not here; None for a path that is here.
        allow_pull: whether everybody may fetch models.

    Raises:
        ConfigError: a model is not there, or the options do not fit together.
    """
    name, _ = _split(settings.model)
    if not (options.given or name or (allow_pull and os.name == "posix")):
        return None
    if os.name != "posix":
        raise ConfigError("Several models need Linux or macOS: give one model.")
    from headstart.engines import machine
    from headstart.hub.names import find
    from headstart.models.naming import aliased, joined
    from headstart.models.serve import SeveralModels

    arguments = [_split(text) for text in _arguments(settings, options)]
    models = [_named(name, fetched(text) or find(text)) for name, text in arguments]
    if len(models) == 1:  # as in a server of one model
        plain = [text for text in alias if "=" not in text]
        models, alias = [_renamed(models[0], plain, first=not name)], [text for text in alias if "=" in text]
    serves_pulled = allow_pull or options.models_dir is not None
    pulled = _pulled() if serves_pulled else []
    if options.models_dir is not None:
        models += _of_folder(options.models_dir, models, empty=bool(pulled))
    files = {Path(model.file).resolve() for model in models}
    known = aliased([*models, *(model for model in pulled if Path(model.file).resolve() not in files)], alias)
    return SeveralModels(
        joined(known[: len(models)], known[len(models) :]),
        settings,
        memory=settings.memory or machine.memory(),
        keep=options.keep_loaded,
        idle_unload=options.idle_unload,
        default=options.default_model,
        serves_pulled=serves_pulled,
    )


def _split(text: str) -> tuple[str, str]:
    """A model argument as (name, file). The path of something that exists has no name before it: `lr=1e-4/model.gguf`."""
    from headstart.models.naming import split_name

    return ("", text) if os.path.exists(expanded(text)) else split_name(text)


def _arguments(settings: Settings, options: SeveralOptions) -> list[str]:
    """The models on the command line. Where others are named, the default of a server of one model is not meant."""
    others = options.models or options.models_dir is not None
    return [*([] if others and settings.model == Settings().model else [settings.model]), *(options.models or ())]


def _named(name: str, model: LocalModel) -> NamedModel:
    """A model of the command line. Without a name it has that of its file, or the one it was fetched by."""
    from headstart.models.naming import NamedModel

    file = str(model.path)
    names = dict.fromkeys((*([name] if name else ()), *model.names, *model_names(file)))
    return NamedModel(next(iter(names)), file, model.size, tuple(names)[1:])


def _renamed(model: NamedModel, names: Sequence[str], *, first: bool) -> NamedModel:
    """A model with further names. `first`: whether answers use the first one of them."""
    name, *aliases = dict.fromkeys((*names, *model.names) if first else (*model.names, *names))
    return replace(model, name=name, aliases=tuple(aliases))


def _pulled() -> list[NamedModel]:
    """The models that headstart has fetched, by a command or over HTTP."""
    from headstart.hub.finders import pulled
    from headstart.hub.folders import Folders
    from headstart.models.naming import claimed

    return [claimed(_named("", model)) for model in pulled(Folders.of())]


def _of_folder(folder: Path, before: Sequence[NamedModel], *, empty: bool) -> list[NamedModel]:
    """The models in a folder. The first model with a name keeps it; another one's name begins with its folder.

    Args:
        before: the models that the command line names.
        empty: whether there may be none.
    """
    from headstart.hub.finders import in_folder
    from headstart.models.naming import NamedModel

    folder = expanded(folder)
    if not is_folder(folder):
        raise ConfigError(f"--models-dir {folder} is not a folder.")
    files = {Path(model.file).resolve() for model in before}
    taken = {name.casefold() for model in before for name in model.names}
    found: list[NamedModel] = []
    for model in in_folder(folder):
        if model.path.resolve() in files:
            continue
        within = model.path.relative_to(folder).parent / model.name
        names = (model.name, str(within), str(folder.absolute().name / within))
        name = next((one for one in names if one.casefold() not in taken), model.name)
        aliases = tuple(one for one in model_names(str(model.path)) if one != name and one.casefold() not in taken)
        found.append(NamedModel(name, str(model.path), model.size, aliases))
        taken |= {one.casefold() for one in found[-1].names}
    if not (found or before or empty):
        raise ModelError(f"--models-dir {folder} has no .gguf file, and no folder with config.json and model*.safetensors.")
    return found
