"""Handover: what one process knows of its responses, as bytes for a later process of the same model.

A process packs its responses when its model is unloaded. The next one restores them, unless a user has deleted something in
between: nobody can say then which responses belong to it, so none of them comes back. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from headstart.api.openai_responses.store import ResponseLine, Responses, StoredResponse

Deletions = tuple[float, int]
"""The deletions by users that are known: the time up to which everything was deleted, and how many there were."""


@dataclass(frozen=True, slots=True)
class PackedConversation:
    """The responses of one conversation, and of those that branch off it.

    Attributes:
        ends: when they must be deleted, in seconds since 1970; infinite for never.
        data: JSON in UTF-8.
    """

    ends: float
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Handover:
    """All responses of a process.

    Attributes:
        deletions: those that the process had obeyed; None if it could not know.
    """

    deletions: Deletions | None = None
    conversations: tuple[PackedConversation, ...] = ()

    def without(self, now: float) -> Handover:
        """What may still be kept at a time, in seconds since 1970."""
        return Handover(self.deletions, tuple(one for one in self.conversations if one.ends > now))

    @property
    def ends(self) -> float:
        """When the first of them must be deleted; infinite for never."""
        return min((one.ends for one in self.conversations), default=float("inf"))


def pack(responses: Responses, deletions: Deletions | None, ends: Callable[[str, float], float]) -> Handover:
    """The handover of all responses; of none if the deletions are unknown.

    Args:
        ends: when a text under a salt, written at a time, must be deleted; infinite for never.
    """
    if deletions is None:
        return Handover()
    trees: dict[int, list[tuple[int, str, StoredResponse]]] = {}
    for place, (salt, stored) in enumerate(responses.all()):
        *_, first = stored.line.parts()
        trees.setdefault(id(first), []).append((place, salt, stored))
    return Handover(deletions, tuple(_packed(tree, ends) for tree in trees.values()))


def _packed(tree: list[tuple[int, str, StoredResponse]], ends: Callable[[str, float], float]) -> PackedConversation:
    numbers: dict[int, int] = {}
    parts: list[tuple[int | None, tuple[Any, ...]]] = []
    stored = []
    _, salt, one = tree[0]
    for place, _, response in tree:
        for part in reversed([*response.line.parts()]):
            if id(part) not in numbers:
                numbers[id(part)] = len(parts)
                parts.append((None if part.before is None else numbers[id(part.before)], part.items))
        # The items of a response are those of its part of the line: first the body's, then the output.
        whole = {**response.response, "output": None}
        stored.append((place, numbers[id(response.line)], len(response.input), whole))
    value = {"salt": salt, "written": one.written, "parts": parts, "stored": stored}
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return PackedConversation(ends(salt, one.written), data)


def restore(responses: Responses, handed: Handover, deletions: Deletions | None, due: Callable[[str, float], bool]) -> int:
    """Puts the responses of an earlier process into a store, the least recently used first.

    Args:
        deletions: those that this process knows.
        due: whether a text under a salt, written at a time, must be deleted.

    Returns: how many came back; 0 if a user has deleted something since the earlier process ended.
    """
    if deletions is None or deletions != handed.deletions:
        return 0
    found = [one for packed in handed.conversations for one in _restored(json.loads(packed.data), due)]
    for _, salt, stored in sorted(found, key=lambda one: one[0]):
        responses.put(salt, stored)
    return len(found)


def _restored(value: dict[str, Any], due: Callable[[str, float], bool]) -> Iterable[tuple[int, str, StoredResponse]]:
    salt, written = value["salt"], value["written"]
    if due(salt, written):
        return
    lines: list[ResponseLine] = []
    for before, items in value["parts"]:
        lines.append(ResponseLine.of(tuple(items), None if before is None else lines[before]))
    for place, part, count, response in value["stored"]:
        line = lines[part]
        whole = {**response, "output": list(line.items[count:])}
        yield place, salt, StoredResponse(whole, len(str(whole)), line.items[:count], line, written)
