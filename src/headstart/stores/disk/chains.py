"""Chains: what is on disk as people think of it, by conversations rather than by blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headstart.errors import NotFound
from headstart.stores.disk.catalog import Row


@dataclass(frozen=True)
class Chain:
    """The blocks from the first to one that nothing hangs on (or that was asked for).

    Attributes:
        rows: in order; the first may hang on a block that is not there any more.
        shared: how many of the leading blocks other chains have too.
    """

    rows: tuple[Row, ...]
    shared: int

    @property
    def key(self) -> bytes:
        return self.rows[-1].label.key

    @property
    def complete(self) -> bool:
        """Whether it begins at its beginning: otherwise nothing of it can be used."""
        return self.rows[0].label.start == 0

    @property
    def tokens(self) -> int:
        return self.rows[-1].label.start + len(self.rows[-1].label.tokens)

    @property
    def allocated(self) -> int:
        """Bytes of all its blocks."""
        return sum(row.allocated for row in self.rows)

    @property
    def own(self) -> tuple[Row, ...]:
        """The blocks that no other chain has."""
        return self.rows[self.shared :]


class Chains:
    """All chains of a catalogue's rows."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {row.label.key: row for row in rows}
        self._children: dict[bytes, int] = {}
        for row in self._rows.values():
            self._children[row.label.parent] = self._children.get(row.label.parent, 0) + 1

    def all(self) -> list[Chain]:
        """One chain for each block that nothing hangs on, the latest used first."""
        ends = [key for key in self._rows if key not in self._children]
        return sorted((self.of(key) for key in ends), key=lambda chain: -chain.rows[-1].used)

    def of(self, key: bytes) -> Chain:
        """The chain that ends with this block."""
        rows: list[Row] = []
        shared = 0
        row = self._rows.get(key)
        branched = False
        while row is not None:
            branched = branched or self._children.get(row.label.key, 0) > bool(rows)
            shared += branched
            rows.append(row)
            above = self._rows.get(row.label.parent)
            # Ever nearer to the beginning: a damaged catalogue must not lead in circles.
            row = above if above is not None and above.label.start < row.label.start else None
        return Chain(tuple(reversed(rows)), shared)

    def find(self, prefix: str) -> bytes:
        """The key that begins with these hexadecimal digits.

        Raises:
            NotFound: none does, or several do.
        """
        found = [key for key in self._rows if key.hex().startswith(prefix.lower())]
        if len(found) != 1:
            raise NotFound(f"{'No' if not found else len(found)} blocks begin with '{prefix}'; `headstart cache ls` shows ids.")
        return found[0]
