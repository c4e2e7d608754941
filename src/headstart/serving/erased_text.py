"""Erased text: finds what a user has deleted in the texts of slots, records and turns.

The ids of a text are those of its full blocks. An open tail has no id there, so it is found by its tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from typing import Protocol

from headstart.interfaces.tokens import BlockId, Tokens, as_tokens


class IdentifiedText(Protocol):
    """A text, the root of its chain, and the ids of its full blocks."""

    @property
    def root(self) -> BlockId: ...

    @property
    def ids(self) -> Sequence[BlockId]: ...

    @property
    def tokens(self) -> Tokens: ...


class ErasedText:
    """What a user has deleted; false if that is nothing.

    Args:
        ids: of the entries.
        tails: the open tails among them, each with the id before it and its tokens as bytes (`Entry.packed`).
    """

    def __init__(self, block_size: int, ids: Set[BlockId] = frozenset(), tails: Iterable[tuple[BlockId, bytes]] = ()) -> None:
        self._block_size, self._ids = block_size, ids
        self._tails = defaultdict[BlockId, list[bytes]](list)
        for parent, packed in tails:
            self._tails[parent].append(packed)

    def __bool__(self) -> bool:
        return bool(self._ids)

    def within(self, text: IdentifiedText) -> bool:
        """Whether a text has one of these entries, or goes on after it."""
        if not self:
            return False
        ids = text.ids
        if not self._ids.isdisjoint(ids):
            return True
        for number, parent in enumerate((text.root, *ids)) if self._tails else ():
            for packed in self._tails.get(parent, ()):
                rest = text.tokens[number * self._block_size :][: self._block_size]
                if as_tokens(rest).tobytes().startswith(packed):
                    return True
        return False
