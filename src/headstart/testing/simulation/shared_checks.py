"""Checks of the shared store: what it holds is what its names and seals say, and nothing that was deleted or is too old."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import root_id
from headstart.prefix_cache.quota import owner_of
from headstart.testing.simulation.erasures import Deletion
from headstart.testing.simulation.shared_store import FLEET, StoreSite
from headstart.testing.simulation.violation import Violation, require
from headstart.tiers.disk import FormatError, Label
from headstart.tiers.disk.format import unpack_head
from headstart.tiers.shared.data_keys import DATA_KEY
from headstart.tiers.shared.envelope import SealError, _open, open_bytes
from headstart.tiers.shared.keys import SealKey, TagKeys, seal_key
from headstart.tiers.shared.names import KIND_OF, ObjectNames, parse


@dataclass(frozen=True, slots=True)
class SharedEntry:
    """An entry in the shared store that a server would take for good."""

    label: Label
    payload: bytes


class SharedChecks:
    """Looks into the store from outside.

    Args:
        models: fingerprints of all models.

    Attributes:
        expires: whether the store deletes by itself what has outlived its life.
        told: whether all servers were asked when an owner deleted. Another server of one folder hears of it later, and may
            write it again until then.
    """

    def __init__(self, site: StoreSite, models: Collection[bytes], salts: Collection[str], *, encrypt: bool) -> None:
        self._site = site
        self.expires = site.scheme == "valkey"
        self._encrypt = encrypt
        self.told = True
        self._names = ObjectNames(FLEET.name_key, encrypted=encrypt)
        owners = {owner_of(root_id(model, salt)) for model in models for salt in salts}
        self._owners = {self._names.prefix(owner).split("/")[1]: owner for owner in sorted(owners)}

    def lacks(self, deletion: Deletion, again: Callable[[BlockId], bool]) -> None:
        """Nothing of a deletion is there, but for entries that were computed `again` since."""
        there = self._site.objects()
        for key in deletion.blocks:
            if not again(key):
                names = (self._names.of(owner, kind, key) for owner in self._owners.values() for kind in KIND_OF.values())
                require(not any(name in there for name in names), "a deleted entry is in the shared store")

    def returned(self, key: BlockId, deletion: Deletion) -> bool:
        """Whether a server that had not heard of a deletion has written an entry again. Another one may have fetched it."""
        names = (self._names.of(owner, kind, key) for owner in self._owners.values() for kind in KIND_OF.values())
        return not self.told and any(self._site.rewritten(name, deletion.began, deletion.by) for name in names)

    def entries(self) -> Iterator[SharedEntry]:
        """All entries that can be opened. What no fault has changed can be opened."""
        for name, kept in sorted(self._site.objects().items()):
            parsed = parse(name)
            require(parsed is not None, "a strange name in the shared store")
            assert parsed is not None
            owner = self._owners.get(parsed.owner)
            if owner is None or parsed.kind not in KIND_OF.values():
                continue
            try:
                payload, header, _ = _open(name, memoryview(kept.data), self._keys(owner))
            except SealError as error:
                require(kept.spoiled or (self._encrypt and error.reason == "unknown_key"), f"the shared store: {error.reason}")
                continue
            try:
                _, label = unpack_head(header, align=1)
            except FormatError:
                raise Violation("the shared store: what was opened is no object") from None
            require(
                self._names.of(owner, KIND_OF[label.kind], label.key) == name, "an object has another name in the shared store"
            )
            require(label.owner == owner, "an object of another owner in the shared store")
            require(label.canonical, "derived KV has left the machine")
            yield SharedEntry(label, bytes(payload))

    def _keys(self, owner: bytes) -> Sequence[SealKey]:
        if not self._encrypt:
            return TagKeys(FLEET).of(owner)
        name = self._names.of(owner, "key", DATA_KEY)
        kept = self._site.objects().get(name)
        if kept is None or kept.spoiled:
            return ()
        secret = open_bytes(name, memoryview(kept.data), FLEET.derived("wrap", owner, "aes-256-gcm"))
        return (seal_key(secret, "aes-256-gcm"),)
