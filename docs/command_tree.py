"""The command line as a tree, for the pages that are made of it: docs/cli.md and the man page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from headstart.cli.main import app


def command_line() -> Any:
    """The group of all commands, as Typer makes it."""
    return typer.main.get_command(app)


def commands(group: Any) -> Iterator[tuple[str, Any]]:
    """All commands that do something, with their names; those of a group behind its name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in commands(command))
        else:
            yield name, command


def parameters(command: Any) -> list[Any]:
    """What a command's help shows, without `--help`: arguments first."""
    shown = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    return sorted(shown, key=lambda one: not is_argument(one))


def is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def placeholder(parameter: Any) -> str:
    """The placeholder of an argument, or of an option's value; "" for a flag."""
    if is_argument(parameter):
        return str(parameter.metavar or parameter.name.upper())
    return "" if is_flag(parameter) else str(parameter.metavar)


def default(parameter: Any) -> str:
    """The default as people read it; "" if there is none to show."""
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    return "" if shown is None or is_flag(parameter) else str(shown)


def plain(text: str) -> str:
    """A help text without the indentation of the source."""
    return "\n".join(line.strip() for line in text.strip().splitlines())
