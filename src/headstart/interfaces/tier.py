"""What a tier of storage can do. A store maps ids to bytes within a hard byte budget; it knows nothing of either."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

EntryKind = Literal["rows", "state"]
"""What bytes are: rows, or state, which is to say a checkpoint. The one never stands for the other."""


class Store(ABC):
    """The contract of every tier. How rows come in and out is each tier's own: some lend views, some fill buffers."""

    name: str

    @property
    @abstractmethod
    def budget(self) -> int:
        """Bytes it may ever occupy."""

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes it occupies now, transient buffers included."""

    @property
    def reserved(self) -> int:
        """Bytes of the budget that are neither used nor free."""
        return 0

    @abstractmethod
    def delete(self, key: bytes) -> None:
        """Forgets `key`. Deleting what is not there is fine."""

    @abstractmethod
    def __contains__(self, key: bytes) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...
