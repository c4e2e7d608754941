"""Stored chains: lists, pins and deletes what memory and disk hold of the served model, beside running requests.

A *chain* is a prompt from its beginning, as in `headstart cache`; its id is that of its last block or open tail.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nsmallest
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headstart.errors import Conflict, NotFound, Unavailable
from headstart.interfaces.tokens import BlockId
from headstart.names import option
from headstart.prefix_cache.blocks import checkpoint_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.quota import PIN_SHARE
from headstart.prefix_cache.siblings import WIDTH
from headstart.serving.cache import Cache
from headstart.serving.deletion_turns import DeletionTurn, DeletionTurns
from headstart.serving.portions import LongWork, paced
from headstart.serving.scheduler import Scheduler
from headstart.tiers.disk import Label

T = TypeVar("T")

PATIENCE = 60.0
"""Most seconds to wait for the engine thread or the disk."""
CHAINS = 10_000
"""Most chains of a list."""
ROUNDS = 8
"""Most times that the earlier turns of a chain are looked for, while requests store some."""
FEW = 16
"""Notices of the disk that are handled in one piece."""
NOTICES = 512
"""Most pieces of notices. More wait only if the disk has just failed, and everything on it is gone."""


@dataclass(frozen=True, slots=True)
class CachedChain:
    """What is stored of one chain.

    Attributes:
        owner: whose it is (`prefix_cache/quota`).
        entries: its blocks and open tail, in order.
        checkpoints: at the ends of these.
        tiers: tokens in each tier.
        pinned: whether its last entry is pinned.
        used: seconds since its last entry was used in memory; None if it is not there.
        uses: how often that was.
        saves: seconds of prefill that a prompt saves which continues it; None as long as nothing was measured.
    """

    id: BlockId
    owner: bytes
    entries: tuple[Entry, ...]
    checkpoints: tuple[Entry, ...]
    tiers: Mapping[str, int]
    pinned: bool
    used: float | None
    uses: int | None
    saves: float | None

    @property
    def tokens(self) -> int:
        return self.entries[-1].stop


@dataclass(frozen=True, slots=True)
class DeletedStretch:
    """What an entry was, for servers that have others of the same text.

    Attributes:
        id: of the entry.
        parent: the entry before it.
        packed: its tokens (`entry.Entry`). No log shows them.
        owner: whose it was.
    """

    id: BlockId
    parent: BlockId
    packed: bytes = field(repr=False)
    owner: bytes


@dataclass(frozen=True, slots=True)
class Deleted:
    """What was deleted: entries, their tokens, and bytes on disk.

    Attributes:
        stretches: the same entries, the last one first.
    """

    entries: int
    tokens: int
    disk_bytes: int
    stretches: tuple[DeletedStretch, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """What is stored.

    Attributes:
        entries, tokens: of each owner, without checkpoints.
    """

    chains: Sequence[CachedChain]
    entries: Counter[bytes]
    tokens: Counter[bytes]


class CachedChains:
    """Thread-safe. Not for the engine thread, for which all methods wait.

    An `owner` of None means anybody: for the operator. All methods raise Unavailable if the server stops or the engine is busy
    for very long. Those with a `key` raise NotFound if no such entry is stored for the owner.
    """

    def __init__(self, scheduler: Scheduler, cache: Cache) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._index, self._pins = cache.index, cache.store.pins
        self._turns = DeletionTurns(scheduler)

    def all(self, owner: bytes | None = None, limit: int = CHAINS) -> list[CachedChain]:
        """One chain for each entry that no other continues, the latest used first. It takes time on the caller's thread."""
        return [*self.survey(owner, limit).chains]

    def survey(self, owner: bytes | None = None, limit: int = CHAINS) -> Survey:
        """The same chains, and what is stored of whom. It takes time on the caller's thread."""
        used, tokens, entries = self._cache.store.retention.last_use, Counter[bytes](), Counter[bytes]()

        def ends() -> Iterator[tuple[bool, float, BlockId]]:
            for entry in paced(unpacked(self._in_portions(copied(self._index)))):
                if not entry.state:
                    entries[entry.owner] += 1
                    tokens[entry.owner] += entry.length
                    if owner in (None, entry.owner) and not entry.followed:
                        last = used(entry.id)
                        yield last is None, -(last or 0.0), entry.id

        latest = nsmallest(limit, ends())
        chains = (self._chain(last) for _, _, key in paced(latest) if (last := self._index.get(key)) is not None)
        return Survey(list(chains), entries, tokens)

    def entries(self) -> list[Entry]:
        """All stored entries. Others may change them meanwhile."""
        return [*paced(unpacked(self._in_portions(copied(self._index))))]

    def get(self, key: BlockId, owner: bytes | None) -> CachedChain:
        """The chain that ends with this entry."""

        def look() -> LongWork[CachedChain]:
            yield from self._take_notices()  # of what the disk has done for this caller
            return self._chain(self._up(key, owner)[-1])

        return self._in_portions(look())

    def pin(self, key: BlockId, owner: bytes | None) -> CachedChain:
        """Protects a chain, with its present checkpoints, from eviction. With a disk, all of its full blocks are there then.

        Raises:
            Conflict: it does not fit into the share for pins, or its beginning is gone.
            Unavailable: also if the disk fails. Then nothing is pinned.
        """

        expiry = self._scheduler.expiry

        def pin() -> tuple[set[BlockId], Future[bool], int]:
            entries = self._with_checkpoints(self._up(key, owner))
            if entries[0].start:
                raise Conflict("The beginning of this chain is gone, so nothing of it can be used.", code="incomplete")
            if (new := self._pins.pin(entries)) is None:
                raise _full("memory", "memory_budget", "tenant_memory")
            whole = [entry for entry in entries if entry.length == self._index.block_size]
            self._cache.store.offload.secure(whole)
            return new, self._cache.disk.pin([entry.id for entry in whole]), expiry.deletion_count

        new, on_disk, deletion_count = self._on_engine(pin)
        try:
            fits = self._wait(on_disk)
        except BaseException:
            self._on_engine(lambda: self._forget(new, deletion_count))
            raise
        if not fits:
            self._on_engine(lambda: self._forget(new, deletion_count))
            raise _full("disk", "disk_budget", "tenant_disk")
        return self.get(key, owner)

    def unpin(self, key: BlockId, owner: bytes | None) -> CachedChain:
        """Removes the protection of a chain, except for entries that other pinned chains need.

        Raises:
            Unavailable: also as long as not all chains on disk are known.
        """

        def unpin() -> LongWork[Future[None]]:
            yield from self._learn_all(self._owner(key, owner))
            gone, last = set[BlockId](), self._up(key, owner)[-1].id
            for block in self._up_over_gaps(last):
                if any(child.id in self._pins and child.id not in gone for child in self._index.children(block)):
                    break
                gone |= {block, checkpoint_id(block)}
            self._pins.unpin(gone)
            return self._cache.disk.unpin(gone)

        self._wait(self._in_portions(unpin()))
        return self.get(key, owner)

    def delete(self, key: BlockId, owner: bytes | None, elsewhere: Sequence[DeletedStretch] = ()) -> Deleted:
        """Deletes what only this chain has, with every trace of it here, on disk and in the shared store: see docs/privacy.md.

        Args:
            elsewhere: what another server has deleted of it. A conversation that moves leaves its earlier turns at each server.
                They end in the middle of the chain, often in an open tail. They are deleted too, unless others continue them.

        Raises:
            Conflict: other chains continue this entry, or it is pinned. If another process has pinned it just now, only the
                memory of this process forgets it.
            NotFound: nothing of it is left: it waits for earlier deletions of the same owner.
            Unavailable: also if the shared store fails. Then it is deleted here and on disk. And as long as not all chains on
                disk are known: others may need its blocks.
        """
        parts = list[Deleted]()
        try:
            parts.append(self._delete(lambda: self._own(key, owner), lambda: self._owner(key, owner)))
        except NotFound:
            if not elsewhere:
                raise
        for number in range(ROUNDS if elsewhere else 0):  # a request may have just stored some of it
            ends = self._on_engine(lambda: self._ends(elsewhere))
            if number and not ends:
                break
            for end in ends:
                try:
                    parts.append(self._delete(partial(self._own, end, owner), partial(self._owner, end, owner)))
                except NotFound:  # it has just gone, or belongs to another
                    continue
                except Conflict as error:
                    if error.code != "continued":
                        raise
            self._delete(list, lambda: elsewhere[0].owner, elsewhere)
        if not parts:
            raise _no_chain()
        entries, tokens = sum(one.entries for one in parts), sum(one.tokens for one in parts)
        stretches = tuple(stretch for one in parts for stretch in one.stretches)
        return Deleted(entries, tokens, sum(one.disk_bytes for one in parts), stretches)

    def _delete(
        self, find: Callable[[], list[Entry]], owner: Callable[[], bytes | None], absent: Sequence[DeletedStretch] = ()
    ) -> Deleted:
        """Deletes the entries that are found, the last one first, and what is known of others that are `absent` here.

        `owner`: whose they are, as far as it is known.
        """
        barred, expiry, turn = self._cache.store.barred, self._scheduler.expiry, DeletionTurn()

        def delete() -> LongWork[tuple[Deleted, set[BlockId], Future[int], Future[None]]]:
            keys = set[BlockId]()
            try:
                yield from self._learn_all(owner())
                own = find()
                going = self._with_checkpoints(own)
                if any(entry.id in self._pins for entry in going):
                    raise Conflict("This chain is pinned: unpin it first.", code="pinned")
                gone = self._absent(absent)  # a request may compute it, and ghosts are left
                blocks, labels = {entry.id for entry in own} | {one.id for one in gone}, list[Label]()
                stretches = tuple(DeletedStretch(entry.id, entry.parent, entry.packed, entry.owner) for entry in own)
                deleted = Deleted(len(own), sum(entry.length for entry in own), 0, stretches)
                keys |= blocks | {entry.id for entry in going}
                keys |= set(map(checkpoint_id, blocks))  # one that was evicted has left a ghost
                barred.add(keys)  # between two pieces nothing brings them back
                # Its first piece is this one, so no slot saves text that follows what was found here.
                yield from expiry.delete(keys, self._tails([*own, *gone]))
                if not (own or gone):
                    return deleted, keys, _nothing(0), _nothing(None)
                for entry in own if self._cache.shared.on else ():
                    labels += self._cache.shared_labels(entry)
                    yield
                # Both are asked together. After a crash between them nobody could name to one what the other has deleted.
                whose = own[0].owner if own else gone[0].owner
                return deleted, keys, self._cache.disk.erase(keys, whose), self._cache.shared.erase(labels)
            except BaseException:
                barred.lift(keys)
                self._turns.over(turn)
                raise

        def end(keys: set[BlockId]) -> LongWork[None]:
            try:
                yield from self._take_notices()  # of what the disk was writing, and has deleted
                self._cache.store.shared_offer.take_answers()  # of what the shared store was being sent
                yield from expiry.delete_read()
                expiry.deletion_ended()
            finally:
                barred.lift(keys)
                self._turns.over(turn)

        begun = self._turns.begin(turn, owner, delete())

        def end_later(_: object) -> None:
            if begun.exception() is None:
                _, keys, on_disk, shared = begun.result()
                then = partial(self._scheduler.carry_out, end(keys))
                on_disk.add_done_callback(lambda _: shared.add_done_callback(lambda _: then()))

        try:
            deleted, keys, on_disk, shared = self._wait(begun)
            errors = self._error(on_disk), self._error(shared)  # as long as the store has it, a request would fetch it again
        except Unavailable:  # it goes on, though nobody waits for it
            begun.add_done_callback(end_later)
            raise
        self._in_portions(end(keys))
        if errors[0] is not None:
            raise errors[0]
        if errors[1] is not None:
            there = "The chain is deleted here, but not there. `headstart fleet rm` deletes there all that its owner has."
            raise Unavailable(f"{errors[1]} {there}")
        return replace(deleted, disk_bytes=on_disk.result())

    def _error(self, done: Future[T]) -> BaseException | None:
        """The error that has ended a part of a deletion, if one has. Raises Unavailable if it has not ended."""
        try:
            return done.exception(PATIENCE)
        except TimeoutError:
            raise Unavailable("The disk or the shared store is busy; try again later.") from None

    # ── on the engine thread ─────────────────────────────────────────────────────────────────────────────────────────

    def _forget(self, new: set[BlockId], deletion_count: int) -> None:
        """A pin has failed. The disk may carry it out later. `deletion_count`: of `Expiry`, when it began.

        What another process has pinned stays, and what was pinned before this one has heard of it.
        """
        self._pins.unpin(new)
        self._cache.disk.unpin(new, own=True)
        expiry = self._scheduler.expiry
        if expiry.deletion_count != deletion_count:  # the pin has spared them; another process may have deleted them
            expiry.drop_unsaved(new)

    def _take_notices(self) -> LongWork[None]:
        """Handles the notices of the disk that wait."""
        for _ in range(NOTICES):
            if not self._cache.store.offload.take_notices(FEW):
                return
            yield

    def _learn_all(self, owner: bytes | None) -> LongWork[None]:
        """Lets the index have all chains of an owner on disk. Raises Unavailable if there may be others: see `DiskTier`."""
        disk, offload = self._cache.disk, self._cache.store.offload
        doubts, reading = offload.doubts, Unavailable("The disk is still being read; try again soon.")
        if not disk.listed or disk.hides or offload.unsure(owner):
            raise reading
        yield from self._take_notices()
        if offload.doubts != doubts:  # between two pieces
            raise reading

    def _owner(self, key: BlockId, owner: bytes | None) -> bytes | None:
        """Whose an entry is; the caller, if it is not there."""
        entry = self._index.get(key)
        return owner if entry is None or owner is not None else entry.owner

    def _own(self, key: BlockId, owner: bytes | None) -> list[Entry]:
        """What only this chain has, the last entry first. Raises NotFound and Conflict."""
        own, barred = list[Entry](), self._cache.store.barred
        for entry in reversed(self._up(key, owner)):
            after = (child.id for child in self._index.children(entry.id) if child.id not in barred)
            if any(child != (own[-1].id if own else b"") for child in after):
                break
            own.append(entry)
        if not own:
            raise Conflict("Other chains continue this one: delete them first.", code="continued")
        return own

    def _tails(self, going: Iterable[Entry | DeletedStretch]) -> list[tuple[BlockId, bytes]]:
        """The open tails among these, for `ErasedText`. The text of one that a longer entry begins with stays."""
        whole = self._index.block_size * WIDTH
        tails = ((one.parent, one.packed) for one in going if len(one.packed) < whole)
        return [(parent, packed) for parent, packed in tails if not self._index.children(parent).extends(packed)]

    def _ends(self, stretches: Sequence[DeletedStretch]) -> list[BlockId]:
        """The entries that begin these texts, and that nothing continues."""
        last, found = len(self._free(stretches)), list[BlockId]()
        for number, one in enumerate(stretches):
            begun = self._index.children(one.parent).prefixes(one.packed, canonical_only=False)
            found += (entry.id for entry in begun if not entry.followed and (number < last or entry.id != one.id))
        return found

    def _absent(self, stretches: Sequence[DeletedStretch]) -> list[DeletedStretch]:
        """Those of which there is no entry, and that no other chain needs."""
        return [one for one in self._free(stretches) if self._index.get(one.id) is None]

    def _free(self, stretches: Sequence[DeletedStretch]) -> Sequence[DeletedStretch]:
        """The last ones, up to the first that another chain continues, be it here or not: its block may have been lost."""
        following = defaultdict[BlockId, list[bytes]](list)
        for one in stretches:
            following[one.parent].append(one.packed)
        for number, one in enumerate(stretches):
            for child in self._index.children(one.id):
                if not any(packed.startswith(child.packed) for packed in following.get(one.id, ())):
                    return stretches[:number]
        return stretches

    def _up(self, key: BlockId, owner: bytes | None) -> list[Entry]:
        """The entries of a chain, in order. Raises NotFound."""
        found: list[Entry] = []
        entry = self._index.get(key)
        if entry is None or entry.state or owner not in (None, entry.owner) or key in self._cache.store.barred:
            raise _no_chain()
        while entry is not None:
            found.append(entry)
            entry = self._index.get(entry.parent)
        return found[::-1]

    def _up_over_gaps(self, last: BlockId) -> Iterator[BlockId]:
        """The blocks of a chain, the last one first, also those that a fault has taken from the disk and that were pinned."""
        at: BlockId | None = last
        while at is not None and ((entry := self._index.get(at)) is not None or self._pins.parent_of_lost(at) is not None):
            yield at
            at = self._pins.parent_of_lost(at) if entry is None else entry.parent

    def _with_checkpoints(self, entries: Iterable[Entry]) -> list[Entry]:
        pairs = ((entry, self._index.get(checkpoint_id(entry.id))) for entry in entries)
        return [one for pair in pairs for one in pair if one is not None]

    # ── on any thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def _chain(self, last: Entry) -> CachedChain:
        entries: list[Entry] = []
        entry: Entry | None = last
        while entry is not None:
            entries.append(entry)
            entry = self._index.get(entry.parent)
        entries.reverse()
        tiers: Counter[str] = Counter()
        for one in entries:
            tiers.update(dict.fromkeys(tuple(one.copies), len(one.tokens)))
        states = (self._index.get(checkpoint_id(one.id)) for one in entries)
        checkpoints = tuple(state for state in states if state is not None)
        used = self._cache.store.retention.last_use(last.id)
        age = None if used is None else max(0.0, self._cache.store.clock() - used)
        uses, pace = self._cache.store.retention.uses(last.id), self._scheduler.pace
        saves = None if pace is None else last.stop * pace
        return CachedChain(last.id, last.owner, tuple(entries), checkpoints, tiers, last.id in self._pins, age, uses, saves)

    def _on_engine(self, function: Callable[[], T]) -> T:
        return self._wait(self._scheduler.call(function))

    def _in_portions(self, work: LongWork[T]) -> T:
        return self._wait(self._scheduler.carry_out(work))

    def _wait(self, done: Future[T]) -> T:
        try:
            return done.result(PATIENCE)
        except TimeoutError:
            raise Unavailable("The engine or the disk is busy; try again later.") from None


def _nothing(value: T) -> Future[T]:
    done: Future[T] = Future()
    done.set_result(value)
    return done


def _no_chain() -> NotFound:
    return NotFound("No chain of yours with this id is stored.", param="id", code="chain_not_found")


def _full(tier: str, budget: str, quota: str) -> Conflict:
    limits = f"{option(budget)} and of a tenant's {option(quota)}"
    return Conflict(f"Pins may fill {PIN_SHARE:.0%} of {limits} ({tier}): unpin another chain first.", code="pins_full")


EntryArray = npt.NDArray[np.object_]
"""Entries. Python's collector of cycles does not look into an array: a pass over a list of a million takes 0.1 s."""


def copied(index: Index) -> LongWork[list[EntryArray]]:
    """All entries of an index, for another thread, in pieces: one long array would be moved as it grows."""
    found: list[EntryArray] = []
    for piece in index.pieces():
        found.append(np.fromiter(piece, object, len(piece)))
        yield
    return found


def unpacked(pieces: list[EntryArray]) -> Iterator[Entry]:
    """The entries of all pieces. Each piece is dropped when it was passed: a million entries at once would take 14 ms."""
    while pieces:
        yield from pieces.pop()
