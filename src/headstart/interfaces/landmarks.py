"""Landmarks: positions in a prompt that later prompts are likely to share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Landmarks:
    """Positions in a prompt, in tokens; 0 for a missing one.

    Attributes:
        anchor: the end of the system prompt and the tools, where the first user message begins.
        turn: the end of the last user message, and of system messages directly after it. Templates strip the reasoning of a
            tool loop back to it.
        header: the end of the last message, where the generation header begins.
        breakpoints: positions that the client marked.
    """

    anchor: int = 0
    turn: int = 0
    header: int = 0
    breakpoints: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[int]:
        yield from (self.anchor, self.turn, self.header, *self.breakpoints)
