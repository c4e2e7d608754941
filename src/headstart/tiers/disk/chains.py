"""Chains: the objects on disk grouped by conversation, as people think of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart.errors import ConfigError
from headstart.interfaces.tier import KV, STATE
from headstart.tiers.disk.catalog import Row


@dataclass(frozen=True)
class StoredChain:
    """The blocks from the first to one without children (or to a given one), with the checkpoints at their ends.

    Attributes:
        rows: the rows of the blocks, in order. The parent of the first one may be missing.
        shared: number of leading blocks that other chains have too.
        checkpoints: by the block at whose end they are.
    """

    rows: tuple[Row, ...]
    shared: int
    checkpoints: Mapping[bytes, Row] = field(default_factory=dict)

    @property
    def key(self) -> bytes:
        return self.rows[-1].label.key

    @property
    def complete(self) -> bool:
        """Whether its first block is there. Otherwise nothing of it can be used."""
        return self.rows[0].label.start == 0

    @property
    def tokens(self) -> int:
        return self.rows[-1].label.start + len(self.rows[-1].label.tokens)

    @property
    def allocated(self) -> int:
        """Bytes of all its objects."""
        return sum(row.allocated for row in self.objects)

    @property
    def objects(self) -> tuple[Row, ...]:
        """Its blocks and checkpoints, parents first."""
        return self._with_checkpoints(self.rows)

    @property
    def own(self) -> tuple[Row, ...]:
        """The blocks that no other chain has, and the checkpoints at their ends."""
        return self._with_checkpoints(self.rows[self.shared :])

    def _with_checkpoints(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        pairs = ((row, self.checkpoints.get(row.label.key)) for row in rows)
        return tuple(one for pair in pairs for one in pair if one is not None)

    def data(self) -> dict[str, Any]:
        """The chain in figures, ready for JSON: sizes in bytes, `seconds` of prefill it saves, times since 1970."""
        last = self.rows[-1]
        return {
            "id": self.key.hex(),
            "tokens": self.tokens,
            "checkpoints": len(self.checkpoints),
            "bytes": self.allocated,
            "own_bytes": sum(row.allocated for row in self.own),
            "seconds": sum(row.label.seconds for row in self.rows),
            "used": last.used,
            "fingerprint": last.label.fingerprint.hex(),
            "pinned": last.pinned,
            "complete": self.complete,
        }

    def blocks(self) -> list[dict[str, Any]]:
        """Its blocks in figures, ready for JSON. Each has the checkpoint at its end, or None."""
        found = []
        for row in self.rows:
            state = self.checkpoints.get(row.label.key)
            span = {"start": row.label.start, "tokens": row.label.tokens}
            found.append(_figures(row) | span | {"checkpoint": None if state is None else _figures(state)})
        return found


def _figures(row: Row) -> dict[str, Any]:
    return {
        "id": row.label.key.hex(),
        "canonical": row.label.canonical,
        "bytes": row.allocated,
        "seconds": row.label.seconds,
        "used": row.used,
        "pinned": row.pinned,
    }


def totals(rows: Collection[Row]) -> dict[str, Any]:
    """Objects in figures, as `StoredChain.data` has them; `used` is the latest time, None if there are none."""
    blocks, states = ([row for row in rows if row.label.kind == kind] for kind in (KV, STATE))
    return {
        "blocks": len(blocks),
        "checkpoints": len(states),
        "bytes": sum(row.allocated for row in rows),
        "checkpoint_bytes": sum(row.allocated for row in states),
        "seconds": sum(row.label.seconds for row in blocks),
        "pinned": sum(row.pinned for row in rows),
        "used": max((row.used for row in rows), default=None),
    }


class StoredChains:
    """All chains of a catalogue's rows."""

    def __init__(self, rows: Iterable[Row]) -> None:
        everything = list(rows)
        self._rows = {row.label.key: row for row in everything if row.label.kind == KV}
        self._states = {row.label.parent: row for row in everything if row.label.kind == STATE}
        self._children = Counter(row.label.parent for row in self._rows.values())

    def all(self) -> list[StoredChain]:
        """One chain for each block without children. The latest used comes first."""
        ends = [key for key in self._rows if key not in self._children]
        return sorted((self.of(key) for key in ends), key=lambda chain: -chain.rows[-1].used)

    def of(self, key: bytes) -> StoredChain:
        """The chain that ends with this block."""
        rows: list[Row] = []
        shared = 0
        branched = False
        for row in self._up(key):
            branched = branched or self._children[row.label.key] > bool(rows)
            shared += branched
            rows.append(row)
        rows.reverse()
        keys = (row.label.key for row in rows)
        return StoredChain(tuple(rows), shared, {key: self._states[key] for key in keys if key in self._states})

    def lost(self) -> list[Row]:
        """Objects that can no longer be used, because an ancestor is missing."""
        broken = {row.label.key: row for chain in self.all() if not chain.complete for row in chain.objects}
        return [*broken.values(), *(state for block, state in self._states.items() if block not in self._rows)]

    def _up(self, key: bytes) -> Iterator[Row]:
        """A block, its parent, and so on up to the first one that is there."""
        row = self._rows.get(key)
        while row is not None:
            yield row
            above = self._rows.get(row.label.parent)
            # The start must decrease: a damaged catalogue must not lead in circles.
            row = above if above is not None and above.label.start < row.label.start else None

    def needed(self, without: Collection[bytes] = ()) -> set[bytes]:
        """Keys of pinned objects except `without`, of all their ancestors, and of the checkpoints at the ends of these."""
        pinned = [row.label for row in (*self._rows.values(), *self._states.values()) if row.pinned]
        pinned = [label for label in pinned if label.key not in without]
        found: set[bytes] = set()
        for label in pinned:
            for above in self._up(label.key if label.kind == KV else label.parent):
                if above.label.key in found:
                    break
                found.add(above.label.key)
        found |= {state.label.key for block, state in self._states.items() if block in found}
        return found | {label.key for label in pinned}  # also a checkpoint whose block is damaged: that is computed again

    def alone(self, prefix: str = "") -> list[Row]:
        """The checkpoints whose block is missing. `prefix`: where its id, or their own, begins with these digits."""
        digits = prefix.lower()
        pairs = [(block, state) for block, state in self._states.items() if block not in self._rows]
        return [one for block, one in pairs if any(key.hex().startswith(digits) for key in (block, one.label.key))]

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
