"""Erasures: what owners have deleted. Nothing of it may be left in any part of a server, and nothing may come back.

What a later request has computed again is there by right. Its text may still be older than the deletion: the block may begin
with tokens that another chain has.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.interfaces.tier import STATE
from headstart.interfaces.tokens import BlockId, Tokens, as_tokens
from headstart.prefix_cache.blocks import Chain, checkpoint_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.testing.simulation.disk import FolderNames, Inode
from headstart.testing.simulation.filesystem import ROOT, FileSystem
from headstart.testing.simulation.threads import STARTED
from headstart.testing.simulation.violation import require
from headstart.tiers.disk import FormatError, Label, format

if TYPE_CHECKING:
    from headstart.serving.erased_text import IdentifiedText
    from headstart.serving.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Deletion:
    """A request of an owner, as the engine thread carries it out.

    Attributes:
        blocks: the deleted entries, and the checkpoints that they may have had, each with the block whose tokens it has.
        at: when that was, in seconds since 1970.
        began: the same in virtual seconds.
        by: the process.
    """

    blocks: Mapping[BlockId, BlockId]
    at: float
    began: float
    by: str

    @classmethod
    def of(cls, keys: Collection[BlockId], at: float, began: float, by: str) -> Deletion:
        return cls({key: key for key in keys} | {checkpoint_id(key): key for key in keys}, at, began, by)

    def without(self, needed: Collection[BlockId]) -> Deletion:
        """The same, but for blocks that other chains need."""
        return replace(self, blocks={key: block for key, block in self.blocks.items() if block not in needed})


class Erasures:
    """All deletions that owners have had an answer to.

    Args:
        made: when each block was computed last.

    Attributes:
        returned: whether a deleted entry is there again through the shared store, by right.
        set_back: when the clock was set back last, in virtual seconds.
    """

    def __init__(self, block_size: int, made: Mapping[BlockId, float]) -> None:
        self.returned: Callable[[BlockId, Deletion], bool] = lambda key, deletion: False
        self.set_back = float("-inf")
        self._block_size = block_size
        self._made = made
        self._gone: dict[BlockId, Deletion] = {}
        self._swept: list[tuple[float, frozenset[BlockId]]] = []

    def __len__(self) -> int:
        return len(self._gone)

    def answered(self, deletion: Deletion) -> None:
        """The owner knows that it is done."""
        self._gone.update(dict.fromkeys(deletion.blocks, deletion))

    def swept(self, before: float, spared: Collection[BlockId]) -> None:
        """Everything written up to a time is deleted, except what is spared."""
        self._swept.append((before, frozenset(spared)))

    def beside(self, server: str, began: float) -> bool:
        """Whether others have deleted anything since a server began. While its disk hangs, it does not hear of that."""
        return any(one.by != server and one.began > began for one in self._gone.values())

    def clock_set_back(self, now: float) -> None:
        """Times of later texts may be earlier than those of deleted ones. `now`: in virtual seconds."""
        self.set_back = now
        self._gone.clear()
        self._swept.clear()

    def again(self, key: BlockId) -> bool:
        """Whether a block, or that of a checkpoint, was computed since its deletion, or has `returned`."""
        deletion = self._gone[key]
        return self._made.get(deletion.blocks[key], deletion.at) > deletion.at or self.returned(key, deletion)

    def left(self, label: Label) -> bool:
        """Whether an object was deleted. A server may hold what is `swept` until it hears of it, but not write it."""
        block = label.parent if label.kind == STATE else label.key
        return self._is_swept(label.key, block, label.written) or self._old(label.key, label.written)

    def _is_swept(self, key: BlockId, block: BlockId, written: float) -> bool:
        latest = max(written, self._made.get(block, 0.0))
        return any(latest <= before and spared.isdisjoint((key, block)) for before, spared in self._swept)

    def _old(self, key: BlockId, written: float) -> bool:
        """Whether what was written at a time, of an entry of this key, was deleted by its owner."""
        return key in self._gone and written <= self._gone[key].at and not self.again(key)

    def begun(self, runtime: Runtime, deletion: Deletion, tails: Sequence[Entry]) -> None:
        """A deletion has begun: nothing will be settled that belongs to it, and no text has one of its open `tails`.

        Later texts may have them by right, so there is no other moment for this.
        """
        scheduler = runtime.scheduler
        records = [task.turn.record for task in getattr(scheduler.settle, "_tasks", ())]
        require(all(deletion.blocks.keys().isdisjoint(record.ids) for record in records), "a deleted turn will be settled")
        texts: list[IdentifiedText] = [*records, *scheduler.history, *(slot for slot in scheduler.slots if not slot.unsavable)]
        require(not any(_has(text, tail) for text in texts for tail in tails), "a text has an open tail that was deleted")

    # ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def server(self, runtime: Runtime, *, rests: bool) -> None:
        """Nothing is left in a server, on its engine thread."""
        if not self._gone:
            return
        store, scheduler = runtime.cache.store, runtime.scheduler
        for key in self._gone:
            entry = store.index.get(key)
            require(entry is None or not self._old(key, entry.written), "a deleted entry is in the index")
            ghost = store.retention._ghosts.get(key) if rests else None
            later = ghost is None or ghost.last > STARTED + self._gone[key].began  # memory may have refused what came again
            require(later or self.again(key), "a deleted entry has a ghost in memory")
        for slot in scheduler.slots:
            for number, key in enumerate(slot.ids if not slot.busy else ()):
                written = slot.written(number * self._block_size, (number + 1) * self._block_size)
                require(not self._old(key, written), "a slot holds what was deleted")
        for record in scheduler.history:
            old = self._has_old(record.root, record.tokens, record.written)
            require(not old, "a deleted text can still be explained")
        for record in (task.turn.record for task in getattr(scheduler.settle, "_tasks", ())):
            old = self._has_old(record.root, record.tokens, record.written)
            require(not old, "a deleted turn will be settled")

    def _has_old(self, root: BlockId, tokens: Tokens, written: float) -> bool:
        """Whether a text has a block that was deleted.

        The last token of a reply is never computed, so a block that ends with it is not known to be new.
        """
        return any(self._old(key, written) for key in Chain(root, self._block_size, tokens[:-1]).ids)

    def heard(self, runtime: Runtime) -> None:
        """A server that rests has nothing of what is swept."""
        index = runtime.cache.index
        for entry in index if self._swept else ():
            if entry.state and entry.length < self._block_size:
                swept = any(self._is_swept(key, key, written) for key, written in _text(index, entry))
            else:
                swept = self._is_swept(entry.id, entry.parent if entry.state else entry.id, entry.written)
            require(not swept, "a server has what was deleted with everything else")

    # ── the disk ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def durable(self, files: FileSystem, deletion: Deletion) -> None:
        """A power failure brings nothing back, and the quarantine, where parts of any chain may be, was emptied."""
        self._files(files.disk.durable)
        kept = files.disk.names.get(f"{ROOT}/quarantine", {}).values()
        require(all(file.changed > deletion.at for file in kept), "a deletion has left the quarantine")

    def files(self, files: FileSystem) -> None:
        """No file is left."""
        self._files(files.disk.names)

    def _files(self, names: FolderNames) -> None:
        for folder in ("objects", "tmp", "quarantine") if self._gone or self._swept else ():
            for name, file in names.get(f"{ROOT}/{folder}", {}).items():
                label = label_of(file)
                require(label is None or not self.left(label), f"a deleted entry is in {folder}")
                key = _key(name)
                there = label is None and key in self._gone and not self.again(key)
                require(not there, f"a deleted entry is in {folder}, damaged")

    def rows(self, database: sqlite3.Connection) -> None:
        """The catalogue lists none of it."""
        for table, column in (("objects", "key"), ("ghosts", "key"), ("notes", "block")) if self._gone else ():
            found = sqlite3.Connection.execute(database, f"SELECT {column}, written FROM {table}")
            require(not any(self._old(key, written) for key, written in found), f"a deleted entry is in the table {table}")

    def bytes(self, folder: Path, deletion: Deletion) -> None:
        """The catalogue's files do not contain the ids that were deleted, in free pages either."""
        for path in folder.iterdir():
            data = path.read_bytes()
            found = any(key in data and not self.again(key) for key in deletion.blocks)
            require(not found, "the id of a deleted entry is in the catalogue's files")


def open_tails(index: Index, keys: Collection[BlockId]) -> list[Entry]:
    """The open tails among entries. If another entry begins with the text of one, that text stays, and it is left out."""
    entries = [entry for key in keys if (entry := index.get(key)) is not None and not entry.state]
    tails = [entry for entry in entries if entry.length < index.block_size]
    return [entry for entry in tails if not index.children(entry.parent).extends(entry.packed)]


def _has(text: IdentifiedText, tail: Entry) -> bool:
    """Whether a text has an open tail, or goes on after it."""
    if tail.parent not in (text.root, *text.ids):
        return False
    return as_tokens(text.tokens[tail.start : tail.start + tail.length]).tobytes() == tail.packed


def _text(index: Index, checkpoint: Entry) -> Iterator[tuple[BlockId, float]]:
    """What a checkpoint of an open tail covers, from its end back to what is missing, with the times of the text.

    The checkpoint has the time of the oldest text, which may be spared. What is missing is as old at most.
    """
    key = checkpoint.parent
    while (entry := index.get(key)) is not None:
        yield key, entry.written
        if not entry.start:
            return
        key = entry.parent
    yield key, checkpoint.written  # when it was computed is known, but for a clock that was set back since


def label_of(file: Inode) -> Label | None:
    """The label of an object; None if it is damaged."""
    try:
        return format.decode(bytes(file.data[: format.header_size(bytes(file.data[:32]))]), len(file.data)).label
    except FormatError:
        return None


def _key(name: str) -> bytes:
    try:
        return bytes.fromhex(name.split(".")[0])
    except ValueError:
        return b""
