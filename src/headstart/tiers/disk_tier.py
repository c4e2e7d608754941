"""Disk tier: what the tier below memory can do. `WriteBehind` is one; without a disk there is `NoDisk`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Protocol

from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.tiers.disk import Label, Note
from headstart.tiers.notices import Notice


class DiskTier(Protocol):
    """The tier below memory. All methods are for the engine thread, and none waits for a write.

    Attributes:
        name: of the tier, as reports and the index have it.
        counters: what it has done and refused, by reason.
    """

    name: str
    counters: Counter[str]

    @property
    def on(self) -> bool:
        """Whether offering makes sense at all."""

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
        """How many objects it holds."""

    def offer(self, label: Label, payload: Bytes, *, last: bool = False) -> bool:
        """Takes an object to be stored; `payload` must stay as it is until a notice says `ObjectStored` or `ObjectRefused`.

        False if it cannot take more just now; then no notice comes. `last`: before the end, however much waits already.
        """

    def discard(self, keys: Collection[bytes]) -> None:
        """Deletes objects soon, also those that were offered and are not yet written.

        Pinned objects stay, and so do parents of other objects. A notice `ObjectRefused` or `ObjectGone` follows for each one
        that was deleted. An object that is offered again afterwards is stored.
        """

    def read(self, wanted: Sequence[tuple[Label, Bytes]]) -> list[int | Exception]:
        """Fills the buffers, several at a time; for each how much of it, in bytes, or what went wrong.

        Rows must fill theirs; a checkpoint may be smaller. A bad object is put aside, a disk that hangs given up: see `Hung`.
        """

    def keep(self, keys: Collection[bytes]) -> None:
        """For a while nothing of this is evicted, in place of what this was told before: a request waits for it."""

    def use(self, keys: Collection[bytes]) -> None:
        """Counts a use of each object now."""

    def replied(self, keys: Collection[bytes], request_traits: RequestTraits) -> None:
        """Tells of the request that has used these objects last."""

    def note(self, note: Note) -> None:
        """Keeps something small beside a block."""

    def foreign(self) -> Mapping[bytes, Set[bytes]]:
        """First blocks of other fingerprints' chains, by fingerprint, as far as they were there when it was opened."""

    def notices(self) -> list[Notice]:
        """What has happened since the last call; if that is very much, some of it."""

    def close(self, seconds: float) -> bool:
        """Writes what was offered, for at most so long, and ends. False if it has not ended and may still read payloads."""
