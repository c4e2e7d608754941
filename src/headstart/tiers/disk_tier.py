"""Disk tier: the contract of the tier below memory. `WriteBehind` fulfils it; without a disk, `NoDisk` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from typing import Protocol

from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.tiers.disk import Label, Note
from headstart.tiers.notices import Notice


class DiskTier(Protocol):
    """The tier below memory. All methods are for the engine thread, and none waits for a write.

    Attributes:
        name: the name of the tier in reports and in the index.
        counters: objects that it saved, evicted and refused, and faults, by reason.
    """

    name: str
    counters: Counter[str]

    @property
    def on(self) -> bool:
        """Whether there is a disk."""

    @property
    def deletions(self) -> tuple[float, int] | None:
        """The deletions by users of which all notices are in the queue, as `Ages.wiped` counts them; None if unknown."""

    @property
    def used(self) -> int:
        """Bytes on disk."""

    @property
    def budget(self) -> int:
        """Bytes that it may use."""

    @property
    def reserved(self) -> int:
        """Bytes of the budget that are neither used nor free."""

    def __len__(self) -> int:
        """Number of objects on disk."""

    def offer(self, label: Label, payload: Bytes, *, last: bool = False) -> bool:
        """Queues an object to be stored. `payload` must not change until the notice `ObjectStored` or `ObjectRefused` comes.

        False if the queue is full or the disk fails; then no notice comes. `last`: the server stops, so the queue has no limit.
        """

    def discard(self, keys: Collection[bytes]) -> None:
        """Deletes objects soon, also those that were offered and are not yet written.

        Pinned objects stay, and so do parents of other objects. A notice `ObjectRefused` or `ObjectGone` follows for each one
        that was deleted. An object that is offered again afterwards is stored.
        """

    def pin(self, keys: Collection[bytes]) -> Future[bool]:
        """Protects objects from eviction until `unpin`, after what was offered until now is stored or refused.

        The result is False if they do not fit into the share for pins, or are not all there; then none is pinned. A notice
        `PinsFound` comes first. The future raises if the disk fails.
        """

    def unpin(self, keys: Collection[bytes], *, own: bool = False) -> Future[None]:
        """Removes the protection of objects. A notice `PinsFound` comes first.

        Args:
            own: leave what was pinned already when this process pinned it last.
        """

    def erase(self, keys: Collection[bytes], owner: bytes) -> Future[int]:
        """Deletes objects on request of their owner, with every trace of them. The result is how many bytes that were.

        A notice `ObjectErased` follows for each one. Other servers drop what only their memory has of the owner. The future
        ends when those that were offered and discarded before have been answered too: then memory can drop them. It raises
        Conflict if one is pinned, and Unavailable if the disk fails.
        """

    def read(self, wanted: Sequence[tuple[Label, Bytes]]) -> list[int | Exception]:
        """Reads objects into buffers, several at a time. Returns for each the bytes that were read, or the error.

        KV must fill its buffer; a checkpoint may be smaller. A bad object goes into quarantine. If the disk hangs, the read is
        given up: see `Hung`.
        """

    @property
    def listed(self) -> bool:
        """Whether all objects were reported, or the disk cannot be used. After the start of a large disk this takes a while."""

    @property
    def hides(self) -> bool:
        """Whether objects may be there of which the engine does not know: they could not be read, and nobody has looked why."""

    def find(self, keys: Sequence[bytes]) -> list[Label]:
        """Looks for objects that may not have been reported yet. It stops where many in turn are missing."""

    def report(self, keys: Collection[bytes]) -> Future[None]:
        """Looks again which of these objects are there, after what was offered and discarded until now.

        A notice `ObjectFound` comes for each one that is, before the future ends. If the disk is closed, it ends without: all
        objects are reported when it is opened.
        """

    def keep(self, keys: Collection[bytes]) -> None:
        """Protects objects from eviction for a while, because a request waits for them. Replaces the keys of earlier calls."""

    def use(self, keys: Collection[bytes]) -> None:
        """Counts a use of each object now."""

    def replied(self, keys: Collection[bytes], request_traits: RequestTraits) -> None:
        """Records the traits of the request that used these objects last."""

    def note(self, note: Note) -> None:
        """Stores a note with a block."""

    def foreign(self) -> Mapping[bytes, Set[bytes]]:
        """Keys of the first blocks of chains with other fingerprints, by fingerprint, as found when the disk was opened."""

    def notices(self) -> list[Notice]:
        """New notices since the last call. If there are very many, the rest comes with the next calls."""

    def obey(self, tombstone: int) -> None:
        """What is offered from now on is none of what must go because of the `OwnersErased` with this number."""

    def close(self, seconds: float) -> bool:
        """Writes the queued objects for at most `seconds`, and ends. False if it is still running and may read payloads."""
