"""Spill: what memory hands down to the disk, and what the disk says back.

Used from the engine thread only. What is handed over is pinned until the disk has answered: the writer reads its cell.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress

from headstart.explain.fingerprint import ConversationFingerprint, ConversationFingerprints
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.prefix_cache.index import Entry, Index
from headstart.prompt.reply_tokens import ReplyTokensMemo, ReplyTokensRecord
from headstart.tiers.disk import Label
from headstart.tiers.disk_tier import DiskTier
from headstart.tiers.memory import Memory
from headstart.tiers.notices import (
    EverythingErased,
    NoteFound,
    ObjectErased,
    ObjectFound,
    ObjectGone,
    ObjectRefused,
    ObjectStored,
)

LATER = 10.0
"""Seconds after which a derived checkpoint is offered. Mostly it has given way by then, and it is large."""


class Offload:
    """Whole blocks, and checkpoints at their ends, on their way from memory to disk.

    Args:
        label: what is written on the outside of an entry's rows, of which the second argument says whether they are canonical.
        stored: told of each block that has come to disk from here.

    Attributes:
        writing: offered, and not answered yet.
        erased: deleted for good by the disk, here or in another process, and not yet forgotten by memory.
        wiped: whether somebody wished so of some of these; `before`: of all that was written by then.
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
        clock: Callable[[], float],
    ) -> None:
        self.writing: dict[BlockId, Entry] = {}
        self.erased: set[BlockId] = set()
        self.wiped, self.before = False, -math.inf
        self._leaving: set[BlockId] = set()  # from memory, as soon as the disk has answered
        self._owed: dict[BlockId, Entry] = {}  # the disk had no time for them yet
        self._index = index
        self._memory = memory
        self._disk = disk
        self._reply_tokens = reply_tokens
        self._conversation_fingerprints = conversation_fingerprints
        self._label = label
        self._stored = stored
        self._clock = clock
        self._later: deque[tuple[float, Entry]] = deque()
        self._dead: set[BlockId] = set()  # derived, and nobody is expected to ask for them: not for the disk

    def offer(self, entry: Entry) -> None:
        """Hands a piece to the disk if it lacks these bytes; later, if it has no time now."""
        if not self.lacking(entry):
            return
        if entry.state and not entry.canonical:
            self._later.append((self._clock() + LATER, entry))
        elif entry.parent in self._owed or not self._hand_over(entry):
            self._owed[entry.id] = entry

    def lacking(self, entry: Entry) -> bool:
        """Whether the disk should have what memory has of a piece."""
        canonical = entry.copies.get(self._memory.name)
        if canonical is None or not self._disk.on or len(entry.tokens) != self._index.block_size or entry.id in self.writing:
            return False
        if entry.id in self._leaving or (entry.id in self._dead and not entry.canonical):
            return False
        if entry.state and not self._has_rows(entry):
            return False
        return self._index.wants(entry.id, self._disk.name, canonical=canonical)

    def _has_rows(self, state: Entry) -> bool:
        """Whether the disk has, or will have before, the block that a checkpoint hangs on."""
        rows = self._index.get(state.parent)
        return rows is not None and (self._disk.name in rows.copies or rows.id in self.writing or rows.id in self._owed)

    def bury(self, pieces: Collection[BlockId]) -> None:
        """The disk need not have these pieces as long as they are derived, unless somebody uses them after all."""
        self._dead.update(pieces)
        for piece in pieces:
            self._owed.pop(piece, None)
        self._disk.discard(pieces)

    def revive(self, pieces: Collection[BlockId]) -> None:
        """Somebody uses these pieces."""
        self._dead.difference_update(pieces)

    def forget(self, entry: Entry) -> None:
        """The entry has left memory."""
        self._owed.pop(entry.id, None)
        self._dead.discard(entry.id)
        self._leaving.discard(entry.id)
        if entry.state and self._later:
            self._later = deque(one for one in self._later if one[1] is not entry)

    def leave(self, pieces: Collection[BlockId]) -> None:
        """These leave memory as soon as nothing reads them any more; the disk must not have them either."""
        self._leaving.update(pieces)
        for piece in pieces:
            self.discard(piece)

    def discard(self, piece: BlockId) -> None:
        """The disk need not have it any more."""
        self._owed.pop(piece, None)
        self._disk.discard([piece])

    def flush(self) -> None:
        """Offers all that the disk lacks, however much that is: before the end."""
        for entry in sorted(self._index, key=lambda entry: (entry.start, entry.state)):  # a checkpoint after its block
            if self.lacking(entry):
                self._hand_over(entry, last=True)

    def _hand_over(self, entry: Entry, *, last: bool = False) -> bool:
        data = self._memory.read(entry.id)
        assert data is not None
        if not self._disk.offer(self._label(entry, entry.copies[self._memory.name]), data, last=last):
            return False
        entry.pins += 1
        self.writing[entry.id] = entry
        return True

    # ── what the disk says ───────────────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> bool:
        """Takes note of what the disk has done, here and in other processes; says whether it has done anything."""
        notices = self._disk.notices()
        for notice in notices:
            match notice:
                case ObjectStored(label=label):
                    self._answered(label.key)
                    self._appeared(label)
                    self._stored(label.key)
                case ObjectRefused(label=label, reason=reason):
                    entry = self._answered(label.key)
                    if entry is not None and reason not in ("budget", "erased"):
                        self.offer(entry)
                case ObjectFound(label=label):
                    self._appeared(label)
                case ObjectGone(key=key):
                    self.gone(key)
                case ObjectErased(key=key):
                    self.gone(key)
                    self.erased.add(key)
                case EverythingErased(before=before):
                    self.wiped, self.before = self.wiped or not before, max(self.before, before or -math.inf)
                case NoteFound(note=note):
                    with suppress(ValueError):
                        self._reply_tokens.learn(ReplyTokensRecord.unpack(note.key, note.value))
                    with suppress(ValueError):
                        self._conversation_fingerprints.learn(ConversationFingerprint.unpack(note.key, note.value))
        while self._later and self._later[0][0] <= self._clock():
            _, entry = self._later.popleft()
            if self._index.get(entry.id) is entry and self.lacking(entry):
                self._owed[entry.id] = entry
        for entry in list(self._owed.values()):
            if self.lacking(entry) and not self._hand_over(entry):
                break
            del self._owed[entry.id]
        return bool(notices)

    @property
    def unsettled(self) -> bool:
        """Whether the disk has yet to take, or to answer for, something that it was offered."""
        return bool(self.writing or self._owed or self._later)

    def gone(self, key: BlockId) -> None:
        """The disk does not have it any more."""
        entry = self._index.get(key)
        if entry is not None and self._disk.name in entry.copies:
            self._index.remove(key, self._disk.name)

    def _answered(self, key: BlockId) -> Entry | None:
        entry = self.writing.pop(key, None)
        if entry is not None:
            entry.pins -= 1
        return entry

    def _appeared(self, label: Label) -> None:
        if label.start % self._index.block_size == 0 and len(label.tokens) == self._index.block_size:
            tokens, state = as_tokens(label.tokens), label.kind == "state"
            entry = Entry(label.key, label.parent, tokens, label.start, state=state, owner=label.owner, written=label.written)
            self._index.add(entry, self._disk.name, canonical=label.canonical)
