"""Chains: what is on disk as people think of it, by conversations rather than by blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headstart.errors import ConfigError
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

    def data(self) -> dict[str, Any]:
        """The chain in figures, ready for JSON: sizes in bytes, `seconds` of prefill it saves, times since 1970."""
        last = self.rows[-1]
        return {
            "id": self.key.hex(),
            "tokens": self.tokens,
            "bytes": self.allocated,
            "own_bytes": sum(row.allocated for row in self.own),
            "seconds": sum(row.label.seconds for row in self.rows),
            "used": last.used,
            "fingerprint": last.label.fingerprint.hex(),
            "pinned": last.pinned,
            "complete": self.complete,
        }


def block(row: Row) -> dict[str, Any]:
    """One block in figures, as `Chain.data` has them."""
    return {
        "id": row.label.key.hex(),
        "start": row.label.start,
        "tokens": row.label.tokens,
        "canonical": row.label.canonical,
        "bytes": row.allocated,
        "seconds": row.label.seconds,
        "used": row.used,
        "pinned": row.pinned,
    }


def totals(rows: Collection[Row]) -> dict[str, Any]:
    """Blocks in figures, as `Chain.data` has them; `used` is the latest time, None if there are no blocks."""
    return {
        "blocks": len(rows),
        "bytes": sum(row.allocated for row in rows),
        "seconds": sum(row.label.seconds for row in rows),
        "pinned": sum(row.pinned for row in rows),
        "used": max((row.used for row in rows), default=None),
    }


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
        branched = False
        for row in self._up(key):
            branched = branched or self._children.get(row.label.key, 0) > bool(rows)
            shared += branched
            rows.append(row)
        return Chain(tuple(reversed(rows)), shared)

    def _up(self, key: bytes) -> Iterator[Row]:
        """The block, what it hangs on, and so on."""
        row = self._rows.get(key)
        while row is not None:
            yield row
            above = self._rows.get(row.label.parent)
            # Ever nearer to the beginning: a damaged catalogue must not lead in circles.
            row = above if above is not None and above.label.start < row.label.start else None

    def needed(self, without: Collection[bytes] = ()) -> set[bytes]:
        """Keys of the pinned blocks, but for those in `without`, and of all that they hang on."""
        found: set[bytes] = set()
        for row in self._rows.values():
            if row.pinned and row.label.key not in without:
                for above in self._up(row.label.key):
                    if above.label.key in found:
                        break
                    found.add(above.label.key)
        return found

    def find(self, prefix: str) -> bytes:
        """The key that begins with these hexadecimal digits.

        Raises:
            ConfigError: none does, or several do.
        """
        found = [key for key in self._rows if key.hex().startswith(prefix.lower())]
        if not found:
            raise ConfigError(f"No block begins with '{prefix}'; `headstart cache ls` shows ids.")
        if len(found) > 1:
            raise ConfigError(f"{len(found):,} blocks begin with '{prefix}'; give more digits.")
        return found[0]
