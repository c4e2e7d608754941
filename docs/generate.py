"""Writes docs/cli.md from the command line itself, so that they cannot drift apart: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from headstart.cli import app

TARGET = Path(__file__).with_name("cli.md")


def generate() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    lines = ["# Command line", "", "Made by `make docs`; `headstart COMMAND --help` says the same.", "", _clean(group.help), ""]
    for name, command in _commands(group):
        lines += [f"## headstart {name}", "", _clean(command.help), ""]
        shown = [
            parameter for parameter in command.params if not getattr(parameter, "hidden", False) and parameter.name != "help"
        ]
        if shown:
            lines += ["| option | default | environment | what it does |", "|---|---|---|---|"]
            lines += [f"| {' | '.join(_row(parameter))} |" for parameter in shown]
            lines.append("")
        if command.epilog:
            lines += [_clean(command.epilog), ""]
    return "\n".join(lines)


def _commands(group: Any) -> Iterator[tuple[str, Any]]:
    """All commands that do something, those of groups behind their group's name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in _commands(command))
        else:
            yield name, command


def _row(parameter: Any) -> Iterator[str]:
    argument = parameter.param_type_name == "argument"
    flag = getattr(parameter, "is_flag", False)
    value = "" if argument or flag else f" {parameter.metavar}"
    yield f"`{parameter.metavar or parameter.name.upper() if argument else ', '.join(parameter.opts)}{value}`".replace(
        "|", "\\|"
    )
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    yield "" if default is None or flag else str(default)
    yield f"`{parameter.envvar}`" if parameter.envvar else ""
    yield _clean(parameter.help or "")


def _clean(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


if __name__ == "__main__":
    TARGET.write_text(generate(), "utf-8")
