"""Families: placeholder until the table is merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.core.template import Message, Template


@dataclass(frozen=True, slots=True)
class Family:
    name: str = "plain"
    visible: tuple[str, ...] = ()
    mark: str | None = None
    closing: str = "\n</think>\n\n"

    def thinks(self, prompt: str) -> bool:
        return prompt.rstrip().endswith("<think>")


def family_of(template: Template) -> Family:
    return Family()


def adapt(
    family: Family, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
    return messages, tools
