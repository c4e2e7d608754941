"""Parsing: placeholder until the parser is merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.core.families import Family
from headstart.core.template import Message


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Calling:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    index: int
    text: str


Piece = Said | Thought | Calling | Arguments


class Parser:
    def __init__(self, family: Family, *, tools: Sequence[Mapping[str, Any]], thinking: bool) -> None:
        pass

    def feed(self, text: str) -> list[Piece]:
        return [Said(text)] if text else []

    def end(self) -> list[Piece]:
        return []


def message_of(pieces: Sequence[Piece], ids: Sequence[str]) -> Message:
    return {"role": "assistant", "content": "".join(piece.text for piece in pieces if isinstance(piece, Said))}


def meaning(family: Family, text: str, tools: Sequence[Mapping[str, Any]] | None, thinking: bool) -> Any:
    """What a reply says, thinks and calls, whatever the blanks around it and the spelling of arguments: to be compared."""
    parser = Parser(family, tools=tools or (), thinking=thinking)
    return message_of([*parser.feed(text), *parser.end()], [])["content"].strip()
