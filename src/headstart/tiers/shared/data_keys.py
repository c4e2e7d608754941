"""Data keys: with `--shared-encrypt` each owner has a random key of its own, in the store and wrapped by the fleet key.

Destroying a data key ends the owner's data wherever copies of the objects live on: in backups, in replicas, in a log. Servers
remember data keys, and ask again from time to time (`refresh`): a key that is gone is forgotten, and never written again. A
store that evicts a data key destroys it too. That costs a miss, never an answer.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from headstart.lru import Lru
from headstart.tiers.shared.envelope import WRITER, SealError, open_bytes, seal_bytes, sealed_with
from headstart.tiers.shared.keys import KEY, FleetKeys, SealKey, seal_key
from headstart.tiers.shared.names import ObjectNames
from headstart.tiers.shared.store import Blob, SharedStore, StoreError

DATA_KEY = b"data key"
"""The id of an owner's data key in its name."""
_OWNERS = 4096  # owners whose keys are remembered


class UnusableKey(StoreError):
    """An owner's data key is there and cannot be opened. The store itself works."""


class DataKeys:
    """The data keys of all owners. Thread-safe. A method waits for the store when it asks for an owner for the first time."""

    def __init__(self, store: SharedStore, fleet: FleetKeys) -> None:
        self.names = ObjectNames(fleet.name_key, encrypted=True)
        self._store = store
        self._fleet = fleet
        self._known: Lru[bytes, tuple[SealKey, ...]] = Lru(_OWNERS)
        self._making = threading.Lock()

    def of(self, owner: bytes) -> Sequence[SealKey]:
        """The owner's data key, if it has one. Raises StoreError."""
        found = self._known.get(owner)
        if found is None:
            found = self._read([owner])[0]
            if found:
                self._known.put(owner, found)
        return found

    def newest(self, owner: bytes) -> SealKey:
        """The owner's data key, made now if it has none. Raises StoreError; UnusableKey if it cannot be opened."""
        if found := self.of(owner):
            return found[0]
        with self._making:
            if found := self.of(owner):
                return found[0]
            name = self._name(owner)
            self._store.put_new(name, self._wrapped(owner, secrets.token_bytes(KEY)))
            if found := self.of(owner):  # another server may have been faster: then it is that one's key
                return found[0]
        # Deleting it here would be wrong: perhaps this server's key file is older than the fleet's.
        raise UnusableKey("other", "a data key was wrapped by another fleet key; all servers need the same key file")

    def refresh(self, *, writes: bool = True) -> None:
        """Reads all remembered keys again: destroyed ones are forgotten.

        With `writes`, those of an old fleet key are wrapped by the newest, and all are touched. Raises StoreError.
        """
        stale: list[bytes] = []
        owners = self._known.keys()
        for owner, found in zip(owners, self._read(owners, stale), strict=True):
            if found:
                self._known.put(owner, found)
            else:
                self._known.drop(owner)
        if not writes:
            return
        for owner in stale:
            for key in self._known.get(owner) or ():
                self._store.put(self._name(owner), self._wrapped(owner, key.secret))
        self._store.touch([self._name(owner) for owner in owners])

    def destroy(self, owner: bytes) -> None:
        """Ends everything that was encrypted for an owner. Other servers notice at their next `refresh`. Raises StoreError."""
        self._known.drop(owner)
        self._store.delete([self._name(owner)])

    def _name(self, owner: bytes) -> str:
        return self.names.of(owner, "key", DATA_KEY)

    def _wrapping(self, owner: bytes) -> tuple[SealKey, ...]:
        return self._fleet.derived("wrap", owner, "aes-256-gcm")

    def _wrapped(self, owner: bytes, secret: bytes) -> Blob:
        return seal_bytes(self._name(owner), secret, self._wrapping(owner)[0], bytes(WRITER))

    def _read(self, owners: Sequence[bytes], stale: list[bytes] | None = None) -> list[tuple[SealKey, ...]]:
        """The data keys in the store, in order; none where there is none that can be opened.

        Owners whose key was not wrapped by the newest fleet key are added to `stale`.
        """
        found: list[tuple[SealKey, ...]] = []
        names = [self._name(owner) for owner in owners]
        for owner, name, blob in zip(owners, names, self._store.get(names), strict=True):
            try:
                secret = b"" if blob is None else open_bytes(name, blob, self._wrapping(owner))
            except SealError:
                secret = b""
            if stale is not None and secret and blob is not None and sealed_with(blob) != self._wrapping(owner)[0].id:
                stale.append(owner)
            found.append((seal_key(secret, "aes-256-gcm"),) if len(secret) == KEY else ())
        return found
