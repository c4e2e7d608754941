"""Options that the commands share: how they are declared, and those of settings, from the table in `config`.

A group of options is a frozen dataclass: each field is an option, annotated for Typer. `takes` gives a command such a group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from headstart.cli import completion
from headstart.config import SETTINGS, Settings, default_cache_dir
from headstart.names import as_flag, as_variable, option

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
NETWORK, CACHE, OPERATION = "Network", "Reuse", "Operation"
SERVED = tuple(name for name in SETTINGS if name != "state_dir")
"""Settings that have an option. The folder for state has only a variable, because it belongs to the machine, not a command."""


def reader(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser for Typer, which raises BadParameter where `parse` raises ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(f"{error}.") from None

    return read


def setting(name: str, *, group: str | None = None, help: str = "") -> Any:
    """The option (or argument) of a setting, for Typer.

    Args:
        group: heading in the command's help.
        help: help text in place of the table's.
    """
    row, kind, text = SETTINGS[name], SETTINGS[name].kind, help or as_flag(SETTINGS[name].help)
    if name == "model":
        return typer.Argument(envvar=as_variable(name), help=text, autocompletion=completion.models)
    return typer.Option(
        as_flag(option(name)),
        parser=None if kind.parse is None or kind.is_path else reader(kind.parse),
        min=kind.least if kind.parse is None else None,
        max=kind.most,
        envvar=as_variable(name),
        metavar=kind.metavar or None,
        rich_help_panel=group,
        help=text,
        show_default=row.unset or True,
        autocompletion=completion.words(kind.words) if kind.words else None,
    )


def written_default(name: str) -> Any:
    """The default of a setting as people write it, because Typer also parses defaults."""
    default = next(field.default for field in fields(Settings) if field.name == name)
    return default if default is None or SETTINGS[name].kind.parse is None else SETTINGS[name].unset


def again(annotation: Any, group: str, help: str, **changed: Any) -> Any:
    """What Typer must know of an option of `serve` in a command that asks a server: only what is given here differs."""
    info = copy(get_args(annotation)[1])
    for name, value in {"rich_help_panel": group, "help": help, **changed}.items():
        setattr(info, name, value)
    return info


def replaced(name: str, options: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], Any]) -> Decorator:
    """A decorator: the command gets these options in place of its parameter `name`, which receives what `make` makes of them.

    Args:
        make: takes the values of the options by name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            chosen = {option.name: given.pop(option.name) for option in options}
            command(**{name: make(chosen)}, **given)

        signature = inspect.signature(command, eval_str=True)
        parameters = [
            new
            for parameter in signature.parameters.values()
            for new in ([one.replace(kind=parameter.kind) for one in options] if parameter.name == name else [parameter])
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def cli_option(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """An option for `replaced`."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def typed(context: typer.Context) -> set[str]:
    """The names of the parameters that stand on the command line."""
    return {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}


def takes(name: str, group: type) -> Decorator:
    """A decorator: the command gets the fields of a dataclass as options, in place of its parameter `name`, which receives one
    value of that class.
    """
    hints = get_type_hints(group, include_extras=True)
    options = [cli_option(one.name, hints[one.name], one.default) for one in fields(group)]
    return replaced(name, options, lambda found: group(**found))


def takes_settings(*names: str) -> Decorator:
    """A decorator: the command gets the options of these settings in place of its parameter `settings`, which receives their
    values as `Settings`. By default the disk tier is in this platform's cache folder.
    """

    def make(chosen: dict[str, Any]) -> Settings:
        if "cache_dir" in chosen:
            chosen["cache_dir"] = default_cache_dir() if chosen["cache_dir"] is None else chosen["cache_dir"]
        return Settings(**chosen)

    def of(name: str) -> inspect.Parameter:
        row = SETTINGS[name]
        return cli_option(name, Annotated[row.kind.read_as | None, setting(name, group=row.group)], written_default(name))

    return replaced("settings", [of(name) for name in names], make)


ModelOption = Annotated[str, setting("model")]
