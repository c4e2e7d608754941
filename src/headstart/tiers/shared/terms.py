"""Terms: how long the objects of each owner may stay in the shared store. Times are in seconds."""

from __future__ import annotations

from headstart.prefix_cache.expiry import LOOKS, Terms
from headstart.tiers.shared.names import ObjectNames


class SharedTerms:
    """The server's own terms (`--expire`, keys with a term), and never more than `most` (`--shared-expire`)."""

    def __init__(self, terms: Terms, most: float, names: ObjectNames) -> None:
        self._terms = terms
        self._most = most
        self._names = names

    @property
    def look(self) -> float:
        """Seconds between two searches for expired objects."""
        return min(self._most, self._terms.shortest) / LOOKS

    def of(self, owner: bytes) -> float:
        """The longest time for an owner's objects."""
        return min(self._most, self._terms.of(owner))

    def by_name(self) -> dict[str, float]:
        """The terms of owners that have their own, by the owner's part of names."""
        return {self._names.prefix(owner).split("/")[1]: self.of(owner) for owner in self._terms.owners}

    @property
    def everybody(self) -> float:
        """The term of owners that have none of their own."""
        return min(self._most, self._terms.most)
