"""Offload: offers entries of memory to the disk, and handles the notices that the disk returns.

Used from the engine thread only. An offered entry is held until the disk has answered, because the writer reads its cell.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice

from headstart.explain.fingerprint import ConversationFingerprint, ConversationFingerprints
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.lru import Lru
from headstart.prefix_cache.blocks import Chain, checkpoint_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prompt.reply_tokens import ReplyTokensMemo, ReplyTokensRecord
from headstart.serving.barred import Barred, Owners
from headstart.tiers.disk import Label
from headstart.tiers.disk_tier import DiskTier
from headstart.tiers.memory import Memory
from headstart.tiers.notices import (
    EverythingErased,
    NoteFound,
    Notice,
    ObjectErased,
    ObjectFound,
    ObjectGone,
    ObjectRefused,
    ObjectStored,
    OwnersErased,
    PinsFound,
)

STEP = 128
"""Notices that are handled at once. That takes one or two milliseconds, and replies must not wait for longer."""
ALL = 1 << 13
"""More notices than wait, unless the disk has just failed and everything on it is gone."""
LATER = 10.0
"""Seconds after which a derived checkpoint is offered. It is large, and mostly dropped by then."""
UNNEEDED = 1 << 16
"""Most entries of which is remembered that the disk need not have them."""


class Offload:
    """Moves full blocks, and the checkpoints at their ends, from memory to disk.

    Args:
        label: makes the description of an entry on disk; its second argument says whether the entry is canonical.
        stored: called for each entry that this process has stored on disk.
        pinned: called with all entries that are pinned on disk, when they change.
        lost_by_fault: called with an entry that a fault takes from the disk, or an eviction.
        lost: called with an entry that the disk has lost and no other tier has.
        usable: whether an object of the disk may be used: not if it must be deleted.
        barred: what is being deleted.

    Attributes:
        writing: entries that were offered and not answered yet.
        erased: entries that were deleted from the disk, by any process, and that memory still has to drop.
        owners_erased: whose entries other processes have deleted; None if nobody's.
        before: a user deleted everything that was written up to this time.
        doubts: how often the index has dropped, or not heard of, something that the disk may have.
    """

    def __init__(
        self,
        index: Index,
        memory: Memory,
        disk: DiskTier,
        reply_tokens: ReplyTokensMemo,
        conversation_fingerprints: ConversationFingerprints,
        label: Callable[[Entry, bool], Label],
        stored: Callable[[BlockId], None],
        pinned: Callable[[Collection[BlockId]], None],
        lost_by_fault: Callable[[Entry], None],
        lost: Callable[[Entry], None],
        usable: Callable[[Label], bool],
        barred: Barred,
        clock: Callable[[], float],
    ) -> None:
        self.writing: dict[BlockId, Entry] = {}
        self.erased: set[BlockId] = set()
        self.owners_erased: Owners | None = None
        self.before = -math.inf
        self._erased_meanwhile: set[BlockId] = set()  # deleted from the disk while another copy was on its way there
        self.doubts = 0
        self._unsure: dict[BlockId, bytes] = {}  # the disk is asked whether it has them, when they are not barred; with owners
        self._asked: list[tuple[Future[None], frozenset[bytes]]] = []  # the answers that were due at the last question; owners
        self._leaving: set[BlockId] = set()  # to be dropped from memory as soon as the disk has answered
        self._queued: dict[BlockId, Entry] = {}  # to be offered again: the disk was busy
        self._index = index
        self._memory = memory
        self._disk = disk
        self._reply_tokens = reply_tokens
        self._conversation_fingerprints = conversation_fingerprints
        self._label = label
        self._stored = stored
        self._pinned = pinned
        self._lost_by_fault = lost_by_fault
        self._lost = lost
        self._usable = usable
        self._barred = barred
        self._clock = clock
        self._later: deque[tuple[float, Entry]] = deque()
        self._notices: deque[Notice] = deque()
        # Derived entries that the disk need not have: no request is expected to use them. Some never come into memory.
        self._unneeded = Lru[BlockId, None](UNNEEDED)

    def offer(self, entry: Entry) -> None:
        """Offers an entry to the disk if the disk lacks it; later, if the disk is busy."""
        if not self.lacking(entry):
            return
        if entry.state and not entry.canonical:
            self._later.append((self._clock() + LATER, entry))
        elif entry.parent in self._queued or not self._hand_over(entry):
            self._queued[entry.id] = entry

    def secure(self, entries: Collection[Entry]) -> None:
        """Offers entries that their owner wants to keep, if the disk lacks them: at once, and derived ones too.

        `entries`: parents first.
        """
        self.revive([entry.id for entry in entries])
        for entry in entries:
            if self.lacking(entry) and self._hand_over(entry, last=True):
                self._queued.pop(entry.id, None)

    def lacking(self, entry: Entry) -> bool:
        """Whether the disk lacks an entry that it should have."""
        canonical = entry.copies.get(self._memory.name)
        if (
            canonical is None
            or self._memory.closed
            or not self._disk.on
            or entry.length != self._index.block_size
            or entry.id in self.writing
        ):
            return False
        if entry.id in self._leaving or (entry.id in self._unneeded and not entry.canonical):
            return False
        if entry.state and not self._has_kv(entry):
            return False
        return self._index.wants(entry.id, self._disk.name, canonical=canonical)

    def _has_kv(self, state: Entry) -> bool:
        """Whether the disk has, or will get first, the block before a checkpoint."""
        block = self._index.get(state.parent)
        return block is not None and (self._disk.name in block.copies or block.id in self.writing or block.id in self._queued)

    def drop_derived(self, keys: Collection[BlockId]) -> None:
        """Drops those of these entries from the disk that are derived. They are offered again only if a request uses them."""
        for key in keys:
            self._unneeded.put(key, None)
            self._queued.pop(key, None)
        self._disk.discard(keys)

    def revive(self, keys: Collection[BlockId]) -> None:
        """A request uses these entries, so the disk may have them again."""
        for key in keys:
            self._unneeded.drop(key)

    def forget(self, entry: Entry) -> None:
        """An entry has left memory."""
        self._queued.pop(entry.id, None)
        self._unneeded.drop(entry.id)
        self._leaving.discard(entry.id)
        if entry.state and self._later:
            self._later = deque(one for one in self._later if one[1] is not entry)

    def leave(self, keys: Collection[BlockId]) -> None:
        """Removes these from the disk. They leave memory as soon as nothing reads them any more."""
        self._leaving.update(keys)
        for key in keys:
            self.discard(key)

    def discard(self, key: BlockId) -> None:
        """Removes an entry from the disk."""
        self._queued.pop(key, None)
        self._disk.discard([key])

    def flush(self) -> None:
        """Offers everything that the disk lacks, without a limit. For the time before the server stops."""
        for entry in sorted(self._index, key=lambda entry: (entry.start, entry.state)):  # a block before its checkpoint
            if self.lacking(entry):
                self._hand_over(entry, last=True)

    def _erase_owners(self, owners: Collection[bytes] | None) -> None:
        if owners is None or owners:
            self.owners_erased = self.owners_erased or Owners()
            self.owners_erased.add(owners)
            self._barred.owners.add(owners)

    def _hand_over(self, entry: Entry, *, last: bool = False) -> bool:
        if entry.owner in self._barred.owners or entry.id in self._barred or entry.id in self.erased:  # it may have to go
            return False
        data = self._memory.read(entry.id)
        assert data is not None
        if not self._disk.offer(self._label(entry, entry.copies[self._memory.name]), data, last=last):
            return False
        entry.holds += 1
        self.writing[entry.id] = entry
        return True

    # ── notices ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def take_notices(self, most: int = STEP) -> bool:
        """Handles notices of the disk, also those about other processes. Returns whether there were any.

        `most`: of them. `ALL` is for callers who have to know what the disk has done for them.
        """
        while len(self._notices) < most and (more := self._disk.notices()):
            self._notices.extend(more)
        handled = min(most, len(self._notices))
        for notice in [self._notices.popleft() for _ in range(handled)]:
            match notice:
                case ObjectStored(label=label):
                    self._answered(label.key)
                    self._appeared(label)
                    self._stored(label.key)
                    self._erased_meanwhile.discard(label.key)
                case ObjectRefused(label=label, reason=reason):
                    entry = self._answered(label.key)
                    if label.key in self._erased_meanwhile:
                        self._erased_meanwhile.remove(label.key)
                        self.erased.add(label.key)
                    elif entry is not None and reason not in ("budget", "erased"):
                        self.offer(entry)
                case ObjectFound(label=label):
                    self._appeared(label)
                case ObjectGone(key=key):
                    self.gone(key, fault=True)
                case ObjectErased(key=key):
                    self.gone(key)
                    # What is on its way is newer, if the disk stores it.
                    (self._erased_meanwhile if key in self.writing else self.erased).add(key)
                case EverythingErased(before=before):
                    self.before = max(self.before, before)
                case OwnersErased(number=number, owners=owners):
                    self._erase_owners(owners)
                    self._disk.obey(number)
                case PinsFound(keys=keys):
                    self._pinned(keys)
                case NoteFound(note=note):
                    with suppress(ValueError):
                        self._reply_tokens.learn(ReplyTokensRecord.unpack(note.key, note.value))
                    with suppress(ValueError):
                        self._conversation_fingerprints.learn(ConversationFingerprint.unpack(note.key, note.value))
        while self._later and self._later[0][0] <= self._clock():
            _, entry = self._later.popleft()
            if self._index.get(entry.id) is entry and self.lacking(entry):
                self._queued[entry.id] = entry
        for entry in list(islice(self._queued.values(), STEP)):  # after a long fault of the disk it may be all of memory
            if self.lacking(entry) and not self._hand_over(entry):
                break
            del self._queued[entry.id]
        self.ask()
        return bool(handled)

    def ask(self) -> None:
        """Asks the disk for what it may have, in portions."""
        if keys := [*islice((key for key in self._unsure if key not in self._barred), STEP)]:
            owners = frozenset(self._unsure.pop(key) for key in keys)
            self._asked = [*self._unanswered(), (self._disk.report(keys), owners)]

    def _unanswered(self) -> list[tuple[Future[None], frozenset[bytes]]]:
        return [one for one in self._asked if not one[0].done()]

    @property
    def behind(self) -> bool:
        """Whether there are more notices than one call has handled."""
        return bool(self._notices)

    @property
    def pending_notices(self) -> bool:
        """Whether an entry is still to be offered or asked for, or still to be answered."""
        return bool(self.writing or self._queued or self._later or self._unsure)

    def unsure(self, owner: bytes | None) -> bool:
        """Whether the disk may have something of an owner that the index lacks, and has not answered yet. None: of anybody."""
        whose = {*self._unsure.values()}.union(*(owners for _, owners in self._unanswered()))
        return owner in whose or b"" in whose if owner else bool(whose)

    def find(self, chain: Chain) -> None:
        """Looks for a request's entries on disk, as long as the disk has not reported them all."""
        if self._disk.listed:
            return
        lacking = [key for key in chain.ids if self._index.get(key) is None]
        for label in sorted(self._disk.find([one for key in lacking for one in (key, checkpoint_id(key))]), key=_place):
            self._appeared(label)

    def gone(self, key: BlockId, *, fault: bool = False) -> None:
        """The disk has lost an entry. `fault`: if it is pinned, nobody wanted that."""
        entry = self._index.get(key)
        self._unsure.pop(key, None)
        if entry is not None and self._disk.name in entry.copies:
            if fault:
                self._lost_by_fault(entry)
            self._index.remove(key, self._disk.name)
            if not entry.copies:
                self._lost(entry)

    def over(self, key: BlockId) -> None:
        """The time of an entry is over here. What the disk has may be younger, or stay a little longer: it is asked."""
        entry = self._index.get(key)
        if entry is not None and self._disk.name in entry.copies:
            self.gone(key)
            self._doubt(key, entry.owner)

    def _doubt(self, key: BlockId, owner: bytes) -> None:
        self._unsure[key] = owner
        self.doubts += 1

    def _answered(self, key: BlockId) -> Entry | None:
        entry = self.writing.pop(key, None)
        if entry is not None:
            entry.holds -= 1
        return entry

    def _appeared(self, label: Label) -> None:
        if not self._usable(label):
            if label.key in self._barred:
                self._doubt(label.key, label.owner)
            return
        if label.start % self._index.block_size == 0 and len(label.tokens) == self._index.block_size:
            known = self._index.get(label.key)
            if known is not None and known.copies.get(self._disk.name, False) > label.canonical:
                self.gone(label.key)  # another process has evicted it and stored a derived one: its ghost is gone too
            tokens, state = as_tokens(label.tokens), label.kind == "state"
            entry = Entry(label.key, label.parent, tokens, label.start, state=state, owner=label.owner, written=label.written)
            self._index.add(entry, self._disk.name, canonical=label.canonical)


def _place(label: Label) -> tuple[int, bool]:
    """Blocks in order, each before its checkpoint."""
    return label.start, label.kind == "state"
