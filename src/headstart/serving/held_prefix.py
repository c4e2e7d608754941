"""Held prefix: entries of memory that must stay there until one prompt has loaded them."""

from __future__ import annotations

from dataclasses import dataclass, field

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.entry import Entry
from headstart.serving.landing import Landings


@dataclass(slots=True, eq=False)
class HeldPrefix:
    """What a prompt has in memory while the rest of it is fetched.

    Attributes:
        here: what was there before. Without it, what is fetched would be of no use.
        brought: what has arrived from the shared tier.
        landings: what has arrived and is not in its cell yet.
    """

    here: dict[BlockId, Entry] = field(default_factory=dict)
    brought: dict[BlockId, Entry] = field(default_factory=dict)
    landings: Landings = field(default_factory=Landings)

    def __len__(self) -> int:
        return len(self.here) + len(self.brought)
