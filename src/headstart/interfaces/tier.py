"""The contract of a tier: a store that maps ids to bytes, within a hard byte budget. It does not know what they mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, Literal

EntryKind = Literal["rows", "state"]
"""The kind of an entry's bytes: KV, or the state of a checkpoint. These words are stored on disk, so they stay as they are."""

KV: Final = "rows"
STATE: Final = "state"


class Store(ABC):
    """The part of the contract that all tiers share. Each tier has its own way to read and write: views, or buffers."""

    name: str

    @property
    @abstractmethod
    def budget(self) -> int:
        """Most bytes that it may occupy."""

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes that it occupies now, with transient buffers."""

    @property
    def reserved(self) -> int:
        """Bytes of the budget that are neither used nor free."""
        return 0

    @abstractmethod
    def __contains__(self, key: bytes) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...
