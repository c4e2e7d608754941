"""Shared tier: the contract of the tier that many servers share. `shared/tier.StoreTier` fulfils it; without `--shared`,
`NoShared` does.

The engine thread never waits for it. It asks for the rest of a chain (`fetch`) and takes what has arrived, as it arrives. It
offers entries, and learns later that their bytes are free again. Only canonical blocks and checkpoints go to it: they are the
same bytes wherever they were computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from headstart.interfaces.tier import KV, STATE, EntryKind
from headstart.interfaces.tokens import BlockId, Bytes
from headstart.prefix_cache.blocks import Chain, checkpoint_id
from headstart.tiers.disk import Label, Note


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What a prompt could use of the shared tier: blocks of its chain, in order, and checkpoints at their ends.

    Attributes:
        chain: the prompt's chain.
        blocks: the numbers of the blocks that may be fetched: from the first one that is lacking to the last whole one.
        here: ids of blocks and checkpoints that this server has anyway.
        fingerprint, owner: of the chain.
        stateful: whether KV is of use only up to a checkpoint.
        kv_bytes: bytes of the KV of one block.
        state_bytes: bytes of the largest checkpoint.
        prefill, restore: seconds per token, measured. `prefill` is 0 if it is not known yet.
    """

    chain: Chain
    blocks: range
    here: Set[BlockId]
    fingerprint: bytes
    owner: bytes
    stateful: bool
    kv_bytes: int
    state_bytes: int
    prefill: float
    restore: float

    def label(self, block: int, kind: EntryKind = KV) -> Label:
        """The label that the object of a block, or of the checkpoint at its end, must have."""
        chain, key = self.chain, self.chain.ids[block]
        tokens, start = tuple(chain.block(block).tolist()), block * chain.block_size
        if kind == STATE:
            return Label(checkpoint_id(key), key, self.fingerprint, start, tokens, True, kind=STATE, owner=self.owner)
        return Label(key, chain.parent_of(block), self.fingerprint, start, tokens, True, kind=KV, owner=self.owner)


def _keep() -> None:
    """Leaves the memory to Python."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An object that was fetched and checked.

    Attributes:
        label: its own label, with the time at which its tokens were first stored.
        payload: its bytes.
        writer: the server that stored it, as hexadecimal digits.
        free: to be called when nobody needs the payload any more, so that its memory is used again.
    """

    label: Label
    payload: Bytes
    writer: str
    free: Callable[[], None] = _keep


Unfetched = Literal["failed", "slow"]
"""Why the rest of a prompt was not fetched: the store failed, or gave no answer in time; fetching would have taken longer than
computing."""


class Fetch(Protocol):
    """Objects on their way to one request. For the engine thread.

    Attributes:
        progress: when something arrived last from the store, by the tier's clock.
        there: tokens of the prompt up to which the store has it, as far as it has answered.
        unfetched: why not all of these will arrive, or why the store was not asked; None if they all do, or are missing or bad.
    """

    @property
    def progress(self) -> float: ...

    @property
    def there(self) -> int: ...

    @property
    def unfetched(self) -> Unfetched | None: ...

    @property
    def arrived(self) -> bool:
        """Whether something waits to be taken."""

    @property
    def over(self) -> bool:
        """Whether nothing more will arrive."""

    def take(self) -> list[Arrival]:
        """What has arrived since the last call, parents before children. Call it often: fetching pauses when much waits."""

    def stop(self, *, stalled: bool = False) -> None:
        """Nobody waits any more. `stalled`: because there was no progress, so the store may be in trouble."""


class SharedListener(Protocol):
    """Hears what is in the store, as far as this server knows. It may be called on any thread, and must return at once."""

    def in_store(self, label: Label) -> None:
        """This server has stored the object, or fetched it."""

    def not_in_store(self, key: BlockId) -> None:
        """The object was missing or bad, or could not be stored. Perhaps it was not known to be there at all."""


class NoSharedListener:
    """Nobody listens."""

    def in_store(self, label: Label) -> None:
        pass

    def not_in_store(self, key: BlockId) -> None:
        pass


class SharedTier(Protocol):
    """The tier that many servers share. All methods but `find_note` are for the engine thread, and do not wait.

    Attributes:
        name: the name of the tier in reports.
        counters: objects that it fetched, saved and refused, and faults, by reason.
    """

    name: str
    counters: Counter[str]

    @property
    def on(self) -> bool:
        """Whether there is a shared store."""

    @property
    def saves(self) -> Set[str]:
        """When entries are to be offered: `computed`, `reused` and `leaving`."""

    def fetch(self, wanted: FetchRequest, wake: Callable[[], None]) -> Fetch | None:
        """Begins to fetch what a prompt could use. None if that is of no use now.

        Args:
            wake: called, on another thread, whenever something has arrived.
        """

    def lacks(self, key: BlockId) -> bool:
        """Whether the store may lack an entry: nobody has found it there, or put it there, for a while."""

    def due(self, key: BlockId) -> bool:
        """Whether an entry is in the store and was not touched for a while."""

    def offer(self, label: Label, payload: Bytes, *, last: bool = False) -> bool:
        """Queues a canonical entry. `payload` must not change until `answered` returns its key.

        False if it is not wanted: it is stored already, the queue is full, or the store fails. `last`: the server stops.
        """

    def takes(self, size: int) -> bool:
        """Whether the queue takes so many bytes. It does when it is empty."""

    def fetching(self, size: int) -> float | None:
        """Expected seconds to fetch `size` bytes; None if nothing can be fetched now."""

    def computed(self, size: int) -> None:
        """So many bytes of canonical entries were computed. Some kinds of store get only a share of that."""

    def touch(self, labels: Sequence[Label]) -> None:
        """A request uses these entries, so the store should keep them."""

    def note(self, owner: bytes, note: Note) -> None:
        """Stores a note; deletes it, if its value is empty."""

    def find_note(self, owner: bytes, key: bytes) -> Note | None:
        """A note in the store. Thread-safe. It waits for the store, but not for long, and not while the store fails."""

    def answered(self) -> list[BlockId]:
        """Keys of offered entries whose bytes are free again."""

    def distrust(self, labels: Sequence[Label], writer: str) -> None:
        """The payload of a fetched object was found wrong, the first of these: nothing is fetched from its writer any more.

        All of them are deleted, even if the store fails at first: the others may have been computed behind it.
        """

    def erase(self, labels: Sequence[Label]) -> Future[None]:
        """Deletes entries on request of their owner, also those that wait to be written, if this server writes at all.

        The future raises Unavailable if the store fails.
        """

    def close(self, seconds: float) -> bool:
        """Stores what is queued for at most `seconds`, and ends. False if it is still running and may read payloads."""


class NoShared:
    """No shared tier."""

    name = "shared"
    on = False
    saves: Set[str] = frozenset()

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def fetch(self, wanted: FetchRequest, wake: Callable[[], None]) -> Fetch | None:
        return None

    def lacks(self, key: BlockId) -> bool:
        return False

    def due(self, key: BlockId) -> bool:
        return False

    def offer(self, label: Label, payload: Bytes, *, last: bool = False) -> bool:
        return False

    def takes(self, size: int) -> bool:
        return True

    def fetching(self, size: int) -> float | None:
        return None

    def computed(self, size: int) -> None:
        pass

    def touch(self, labels: Sequence[Label]) -> None:
        pass

    def note(self, owner: bytes, note: Note) -> None:
        pass

    def find_note(self, owner: bytes, key: bytes) -> Note | None:
        return None

    def answered(self) -> list[BlockId]:
        return []

    def distrust(self, labels: Sequence[Label], writer: str) -> None:
        pass

    def erase(self, labels: Sequence[Label]) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self, seconds: float) -> bool:
        return True
