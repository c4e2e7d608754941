"""Virtual disk: files and folders that lose in a power failure what was not made durable.

    content   is durable after `fsync` of the file. Later writes are lost, kept or torn, each for itself
    names     are durable after `fsync` of their folder, with all earlier names of the same file. Each later creation, rename
              and deletion is lost or kept

A folder itself is durable at once. The catalogue's files are real files of SQLite, in a real folder (`database`).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

UNIT = 4096
SECTOR = 512
"""Bytes that a disk writes whole or not at all."""


@dataclass(eq=False, slots=True)
class Inode:
    """An inode. `synced`: what is durable; `pending`: positions and bytes written since."""

    number: int
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    modified: float = 0.0
    changed: float = 0.0
    rotten: bool = False

    @property
    def allocated(self) -> int:
        return -(-len(self.data) // UNIT) * UNIT

    def write(self, at: int, data: bytes) -> None:
        self.data[at : at + len(data)] = data
        self.pending.append((at, data))

    def sync(self) -> None:
        self.synced = bytes(self.data)
        self.pending.clear()


@dataclass(eq=False, slots=True)
class Change:
    """A change of names that is not durable yet: a creation, a deletion, or a rename, which is both."""

    file: Inode
    before: tuple[str, str] | None
    after: tuple[str, str] | None

    def touches(self, folder: str) -> bool:
        return folder in ((self.before or ("",))[0], (self.after or ("",))[0])


FolderNames = dict[str, dict[str, Inode]]


class VirtualDisk:
    """All folders, by path.

    Attributes:
        names: what programs see.
        durable: what they see after a power failure, if nothing of the last changes is kept.
        free: bytes that other programs have left.
        short: whether no program has asked for that since it became little.
        lost: what power failures have taken, by kind.
    """

    def __init__(self, free: int) -> None:
        self.names: FolderNames = {"/": {}}
        self.free = free
        self.short = False
        self.lost: Counter[str] = Counter()
        self.durable: FolderNames = {"/": {}}
        self._changes: list[Change] = []
        self._numbers = 1

    def make(self, folder: str) -> None:
        self.names[folder] = {}
        self.durable[folder] = {}

    def file(self, path: str) -> Inode:
        """Raises FileNotFoundError."""
        folder, _, name = path.rpartition("/")
        try:
            return self.names[folder][name]
        except KeyError:
            raise FileNotFoundError(2, "simulated: no such file", path) from None

    def create(self, path: str, now: float) -> Inode:
        folder, _, name = path.rpartition("/")
        if folder not in self.names:
            raise FileNotFoundError(2, "simulated: no such folder", path)
        self._numbers += 1
        file = Inode(self._numbers, modified=now, changed=now)
        self.names[folder][name] = file
        self._changes.append(Change(file, None, (folder, name)))
        return file

    def unlink(self, path: str) -> None:
        file = self.file(path)
        folder, _, name = path.rpartition("/")
        del self.names[folder][name]
        self._changes.append(Change(file, (folder, name), None))

    def lose(self, path: str) -> bool:
        """Somebody else has deleted a file, and made that durable. Returns whether it was there."""
        folder, _, name = path.rpartition("/")
        file = self.names.get(folder, {}).pop(name, None)
        if file is None:
            return False
        self._changes = [change for change in self._changes if change.file is not file]
        for names in self.durable.values():
            for old in [old for old, one in names.items() if one is file]:
                del names[old]
        return True

    def rename(self, old: str, new: str, now: float) -> None:
        file = self.file(old)
        before, after = old.rpartition("/")[::2], new.rpartition("/")[::2]
        if after[0] not in self.names:
            raise FileNotFoundError(2, "simulated: no such folder", new)
        del self.names[before[0]][before[1]]
        self.names[after[0]][after[1]] = file
        file.changed = now
        self._changes.append(Change(file, (before[0], before[1]), (after[0], after[1])))

    def sync_folder(self, folder: str) -> None:
        """Makes the names in a folder durable."""
        synced = {id(change) for change in self._changes if change.touches(folder)}
        later: set[int] = set()  # files of which a later change becomes durable, and so the earlier ones too
        for change in reversed(self._changes):
            if id(change) in synced:
                later.add(change.file.number)
            elif change.file.number in later:
                synced.add(id(change))
        for change in self._changes:
            if id(change) in synced:
                _apply(change, self.durable)
        self._changes = [change for change in self._changes if id(change) not in synced]

    def used(self, folder: str) -> int:
        """Bytes that the files in a folder occupy."""
        return sum(file.allocated for file in self.names.get(folder, {}).values())

    def lose_power(self, dice: random.Random) -> None:
        """Forgets what was not durable, as the dice say."""
        skipped = False
        for change in self._changes:
            if dice.random() < 0.5:
                _apply(change, self.durable)
                self.lost["reordered name"] += skipped
            else:
                skipped = True
                self.lost["lost rename" if change.before and change.after else "lost name"] += 1
        self._changes.clear()
        seen = {file.number: file for names in (*self.names.values(), *self.durable.values()) for file in names.values()}
        for file in seen.values():
            if file.pending:
                file.data = bytearray(self._torn(file, dice))
                file.pending.clear()
                file.synced = bytes(file.data)
        self.names = {folder: dict(names) for folder, names in self.durable.items()}

    def _torn(self, file: Inode, dice: random.Random) -> bytes:
        data, skipped = bytearray(file.synced), False
        for at, new in file.pending:
            match dice.randrange(3):
                case 0:
                    self.lost["lost write"] += 1
                    skipped = True
                    continue
                case 1:
                    kept = dice.randrange(len(new) // SECTOR + 1) * SECTOR
                    self.lost["torn write"] += 1
                    new = new[:kept]
            self.lost["reordered write"] += skipped
            data.extend(bytes(max(0, at + len(new) - len(data))))
            data[at : at + len(new)] = new
        return bytes(data)


def _apply(change: Change, names: FolderNames) -> None:
    if change.before is not None and names[change.before[0]].get(change.before[1]) is change.file:
        del names[change.before[0]][change.before[1]]
    if change.after is not None:
        names[change.after[0]][change.after[1]] = change.file
