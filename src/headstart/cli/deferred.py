"""Deferred: a group of commands that costs nothing until it is used."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import typer.main
from typer.core import TyperGroup


class DeferredGroup(TyperGroup):
    """A group whose module is imported when one of its commands is run, or when they are listed.

    Attributes:
        module: has the group as its `app`.
    """

    module: ClassVar[str]

    @cached_property
    def _group(self) -> Any:
        return typer.main.get_command(import_module(self.module).app)

    @property  # type: ignore[override]  # Typer has an attribute here
    def commands(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._group.commands
        return found

    @commands.setter
    def commands(self, _: Mapping[str, Any]) -> None:
        """Typer sets it to what it knows of the group, which is nothing."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """A context of the group itself, so that it does everything from here on."""
        return self._group.make_context(*args, **options)
