"""Landmarks: the positions of a prompt that requests come back to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Landmarks:
    """Positions in a prompt, in tokens; 0 where there is none.

    Attributes:
        anchor: the end of system and tools, where the first message of a user begins.
        turn: the end of the last user message and of what the system says right behind it; templates strip a tool loop's
            reasoning back to it.
        header: the end of the last message, where the generation header begins.
        breakpoints: what the client marked.
    """

    anchor: int = 0
    turn: int = 0
    header: int = 0
    breakpoints: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[int]:
        yield from (self.anchor, self.turn, self.header, *self.breakpoints)
