"""Disk: the tier itself. Objects are written once, whole, and checked each time they are read.

    write   temporary file ─▶ fsync ─▶ rename ─▶ fsync of the folder ─▶ row in the catalogue
    delete  row in the catalogue ─▶ unlink

So a crash leaves a temporary file, or an object without a row; never a row whose object is not complete. `reconcile` finds
what crashes left. One process writes at a time (a lock on the folder); reading needs no lock.

Everything in the folder is within the budget: objects as the catalogue knows them, the rest as it is found.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from headstart.interfaces.tier import Store
from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.quota import NoQuota, OwnerLimits, quota
from headstart.tiers.disk import files, format, reader
from headstart.tiers.disk.catalog import Catalog, Row
from headstart.tiers.disk.format import FormatError, Header, Label, Sealed
from headstart.tiers.disk.lock import Lock
from headstart.tiers.disk.quarantine import Quarantine
from headstart.tiers.disk.schema import damages, drop

log = logging.getLogger("headstart.disk")

RESERVE = 32 << 20
"""Bytes of the budget that are kept for the catalogue; should it need more, objects give way."""
HALF_LIFE = 6 * 3600.0
"""Seconds in which a use halves in weight."""
SLACK = 256
"""For so many objects one more than needed is evicted."""
_SUFFIX = ".rows"
_INDEX = "index.sqlite"
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Faults that say nothing of the file."""


class Disk(Store):
    """Objects under `folder`, within `budget` bytes together with everything else there.

    `read_into` may be called from any thread; everything else from one thread at a time.

    Args:
        budget: bytes; at most half of what is free (and already ours), as found at each writing.
        portion: of that, an owner's quota: see `prefix_cache/quota`.
        clock: seconds since 1970.

    Raises:
        OSError: the folder cannot be made or read.
        sqlite3.Error: the catalogue cannot be opened (a damaged one is deleted and made anew).
    """

    name = "disk"

    def __init__(self, folder: Path, budget: int, portion: float = 1.0, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self.objects = folder / "objects"
        self._objects = os.path.join(self.objects, "")
        self._temporary = folder / "tmp"
        for path in (self.objects, self._temporary):
            files.make(path)
        self._quarantine = Quarantine(folder / "quarantine")
        self._serial = itertools.count()
        self._strange: Collection[bytes] = ()  # objects that get no row: of a later version
        with contextlib.ExitStack() as undo:
            self._lock = Lock(folder / "lock")
            undo.callback(self._lock.close)
            self.catalog = self._open_catalog(folder / _INDEX)
            undo.callback(self.catalog.close)
            self._lock.watch(folder / _INDEX)
            self._unit = files.unit(folder)
            self._given = budget
            self._portion = portion
            self.measure()
            undo.pop_all()

    def measure(self) -> None:
        """Finds out anew how much may be used: others may need the room. Raises OSError, sqlite3.Error."""
        self._budget = min(self._given, (shutil.disk_usage(self.folder).free + self.catalog.used()) // 2)

    def _open_catalog(self, path: Path) -> Catalog:
        # Made here if it is not there: SQLite would let others read it. Never opened if it is: closing a file drops the
        # locks of all who have it open in this process.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        try:
            catalog = Catalog(path, HALF_LIFE)
            try:
                catalog.used()  # reads the whole table
            except BaseException:
                catalog.close()
                raise
            return catalog
        except Exception as error:
            if not damages(error):
                raise
            log.warning("the catalogue is damaged and will be made anew from the objects, without pins: %s", error)
            drop(path)
            return self._open_catalog(path)

    def abandon_catalog(self) -> None:
        """Closes for good, and deletes a damaged catalogue: who opens the folder next makes it anew. Raises OSError."""
        try:
            with self.writing():  # which fails if another process has done so already
                drop(self.folder / _INDEX)
        finally:
            self.close()

    def close(self) -> None:
        try:
            self.catalog.close()
        finally:
            self._lock.close()

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def used(self) -> int:
        beside = files.occupied(self._temporary) + self._quarantine.used
        return self.catalog.used() + files.occupied(self.folder) + beside

    @property
    def reserved(self) -> int:
        """Bytes of the budget that are neither used nor free: the catalogue may need them."""
        return max(0, RESERVE - files.occupied(self.folder))

    def path(self, key: bytes) -> Path:
        return Path(self._where(key))

    def _where(self, key: bytes) -> str:
        """A string: to build a Path takes longer than to open the file."""
        return f"{self._objects}{key.hex()}{_SUFFIX}"

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(
        self,
        batch: Sequence[tuple[Label, Bytes]],
        spared: Callable[[], Collection[bytes]] = frozenset,
        wanted: Callable[[Label], bool] = lambda _: True,
    ) -> tuple[list[Label], list[bytes]]:
        """Stores objects, evicting first; returns the labels that are stored, and the keys that had to go.

        Fewer are stored than given if some are not `wanted` any more, or the budget has no room for them besides what is pinned
        or `spared` (both asked when nobody else is writing); nothing is evicted for what will not fit all the same. What is
        there already is not written again, and derived never replaces canonical.

        Raises:
            OSError, sqlite3.Error: none of the batch is stored.
        """
        with self.writing():
            spare = {*spared(), *(label.key for label, _ in batch), *(label.parent for label, _ in batch)}
            self.measure()
            asked = [(label, data) for label, data in batch if wanted(label)]
            lacking = [(label, data) for label, data in asked if not self._holds(label)]
            new = self._sealed(lacking)
            fitting = self._fitting(new, spare)
            gone = self._make_room(sum(map(self._need, fitting)), spare, fitting)
            placed = fitting[: self._place(fitting)]
        missing = {file.label.key for file in new} - {file.label.key for file in placed}
        return [label for label, _ in asked if label.key not in missing], gone

    def _sealed(self, lacking: Sequence[tuple[Label, Bytes]]) -> list[Sealed]:
        """Objects as they will lie there: it is said whose they are, and since when their text has been kept."""
        owners = self.catalog.owners([label for label, _ in lacking])
        new: list[Sealed] = []
        for label, data in lacking:
            row = self.catalog.get(label.key)  # whose place it takes: no younger for that
            written = min(label.written or self._clock(), math.inf if row is None else row.label.written)
            label = replace(label, written=written, owner=owners[label.key])
            new.append(Sealed(label, format.encode(label, data), data))
        return new

    def _holds(self, label: Label) -> bool:
        """Whether there is this object, or a better one."""
        row = self.catalog.get(label.key)
        if row is None or row.label.canonical < label.canonical:
            return False
        try:
            return self.inspect(label.key).label.canonical >= label.canonical
        except (FormatError, OSError):
            return False

    def _need(self, file: Sealed) -> int:
        return -(-file.size // self._unit) * self._unit

    def _quota(self) -> OwnerLimits:
        return quota(self._portion, max(0, self._budget - RESERVE))

    def _fitting(self, new: Sequence[Sealed], spare: Collection[bytes]) -> list[Sealed]:
        """The objects for which there is room, or can be made; not those that hang on one for which there is none.

        If room has to be made, nobody is given any beyond its quota.
        """
        need = sum(map(self._need, new))
        room = self._free(need)
        shares: OwnerLimits = NoQuota()
        if need > room:
            shares = self._quota()
            room += self.catalog.used() - self.catalog.kept(spare, shares)
        fitting, without = list[Sealed](), set[bytes]()
        for file in new:
            size = self._need(file)
            if size > room or file.label.parent in without or file.label.owner in shares.over(file.label.owner, size):
                without.add(file.label.key)
            else:
                room -= size
                shares.hold(file.label.owner, size)
                fitting.append(file)
        return fitting

    def _free(self, need: int) -> int:
        """Bytes that are free; what was put aside gives way if they are fewer than `need`."""
        if need > self._left:
            self._quarantine.tidy(0)
        return self._left

    @property
    def _left(self) -> int:
        return self._budget - self.used - self.reserved

    def _make_room(self, need: int, spare: Collection[bytes], coming: Sequence[Sealed] = ()) -> list[bytes]:
        """Evicts until `need` bytes are free for what is coming, or nothing more can go; the keys that went."""
        spare, gone = set(spare), list[bytes]()
        while (missing := need - self._free(need)) > 0:
            count = len(self.catalog)
            spared = count // SLACK * (self.catalog.used() // max(1, count))  # to rank very many takes a while
            shares = self._quota()
            for file in coming:
                shares.hold(file.label.owner, self._need(file))
            victims = [row.label.key for row in self.catalog.victims(spare, missing + spared, shares=shares)]
            if not victims:
                break
            gone += self._remove(victims)
            spare.update(victims)  # what cannot be deleted must not be tried again and again
        return gone

    def _place(self, new: Sequence[Sealed]) -> int:
        """Writes as many objects as there is room for, in order, and gives them rows; how many."""
        room = self._left
        temporary: list[Path] = []
        placed: list[Label] = []
        try:
            for file in new:
                if self._need(file) > room:
                    break
                temporary.append(self._write_temporary(file))
                room -= files.allocated(temporary[-1])
                if room < 0:  # it occupies more than its bytes
                    temporary.pop().unlink()
                    break
            for path, file in zip(temporary, new, strict=False):
                os.replace(path, self.path(file.label.key))
                placed.append(file.label)
            if placed:
                files.sync(self.objects)
                self.catalog.add([(label, files.allocated(self.path(label.key))) for label in placed])
        except BaseException:
            for path in temporary:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError, sqlite3.Error):  # else they would not be counted
                for label in placed:
                    if self.catalog.get(label.key) is None:
                        self.path(label.key).unlink()
            raise
        return len(placed)

    def _write_temporary(self, whole: Sealed) -> Path:
        path = self._temporary / f"{os.getpid()}-{next(self._serial)}{_SUFFIX}"
        # Under the lock nobody else is writing: what has this name was left by a process of the same number.
        files.write(path, (memoryview(whole.head), whole.payload.data), whole.label.written)
        return path

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Holds the folder's lock: no other process writes meanwhile. Raises what `Lock.held` raises."""
        return self._lock.held()

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def read_into(self, label: Label, out: Bytes, count: Callable[[int], None] = lambda _: None) -> int:
        """Reads exactly this object into `out`; its bytes. Thread-safe. See `reader.read`, also for what it raises."""
        return reader.read(self._where(label.key), label, out, count)

    def inspect(self, key: bytes) -> Header:
        """The header of an object. Raises what `read_into` raises."""
        return reader.inspect(self._where(key))

    # ── delete ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def delete(self, key: bytes) -> None:
        self.remove([key])

    def remove(self, keys: Collection[bytes]) -> list[bytes]:
        """Deletes objects for good, in one transaction; returns the keys of those that are gone."""
        with self.writing():
            gone = self._remove(keys)
            files.sync(self.objects)
        return gone

    def discard(self, keys: Collection[bytes]) -> list[bytes]:
        """Deletes objects for good, but for pinned ones and all that others hang on; the keys of those that are gone."""
        going = {key for key in keys if (row := self.catalog.get(key)) is not None and not row.pinned}
        while stays := {key for key in going if not going.issuperset(self.catalog.children(key))}:
            going -= stays
        return self.remove(going) if going else []

    def erase(
        self, keys: Collection[bytes], before: float = -math.inf, spared: Callable[[], Collection[bytes]] = frozenset
    ) -> list[Row]:
        """Deletes objects with all that is known and left of them elsewhere in the folder, all that was put aside (it may be of
        any chain), and everything else that was written `before`, but what is `spared` (asked when nobody else is writing).
        Running servers forget it too. The rows that went. If it raises, `reconcile` finishes what was begun.
        """
        with self.writing():
            keys = ({*keys} | self.catalog.ages.old(before)) - {*spared()}
            rows = [row for key in keys if (row := self.catalog.get(key)) is not None]
            gone = set(self._remove(keys, lambda: self.catalog.ages.wipe(keys, before, self._clock())))
            self._quarantine.tidy(0)
            self._sweep(before)
            if not self.catalog.ages.clean:
                raise BlockingIOError("another process reads the catalogue for too long; `headstart cache gc` finishes this")
        return [row for row in rows if row.label.key in gone]

    def expire(self, terms: Terms, spared: Callable[[], Collection[bytes]] = frozenset) -> tuple[list[bytes], list[bytes]]:
        """Erases what has been kept for long enough; the keys of those objects that are gone, and of those that had to make
        room meanwhile, which what is `spared` does not.
        """
        if terms.shortest == math.inf:
            return [], []
        with self.writing():
            now = self._clock()
            keys = self.catalog.ages.due(terms, now)
            gone = self._remove(keys, lambda: self.catalog.ages.erase(keys))
            self.catalog.ages.fade(terms, now)
            before = terms.cut(b"", now)
            self._quarantine.drop({self.path(key).name for key in keys}, before)
            evicted = self._sweep(before, spared())
        return gone, evicted

    def _sweep(self, before: float, spare: Collection[bytes] = ()) -> list[bytes]:
        """Deletes what no row of the catalogue speaks of, and makes all of it durable; the keys that had to make room."""
        for key in self._strange:
            with contextlib.suppress(FileNotFoundError):
                if self.path(key).stat().st_mtime <= before:
                    self.path(key).unlink()
        files.clear(self._temporary)  # nobody else is writing: a crash has left it
        files.sync(self.objects)
        return self._scrub(spare)

    def _scrub(self, spare: Collection[bytes] = ()) -> list[bytes]:
        """Leaves nothing of what was erased in the catalogue's files; the keys that had to make room."""
        if self.catalog.ages.clean:
            return []
        evicted = self._make_room(max(0, files.occupied(self.folder) - self.reserved), spare)  # for a while there are two
        self.catalog.ages.scrub()
        return evicted

    def _remove(self, keys: Collection[bytes], forget: Callable[[], None] | None = None) -> list[bytes]:
        rows = [row for key in keys if (row := self.catalog.get(key)) is not None]
        (forget or (lambda: self.catalog.remove(keys)))()
        stuck: set[bytes] = set()
        for key in keys:
            try:
                self.path(key).unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot delete %s: %s", self.path(key).name, error)
                stuck.add(key)
        if stuck:  # they still occupy what they did
            self.catalog.add([(row.label, row.allocated) for row in rows if row.label.key in stuck])
        return [key for key in keys if key not in stuck]

    def quarantine(self, key: bytes) -> Row | None:
        """Puts an object aside that could not be used, so that it can be looked at; the latest few are kept.

        Returns its row if it is good after all: another process may have written it anew.
        """
        with self.writing():
            row = self.catalog.get(key)
            if row is None or self._good(row):
                return row
            self.catalog.remove([key])
            if not self._newer(key):
                self._quarantine.take(self.path(key))
        return None

    def _newer(self, key: bytes) -> bool:
        """Whether an object is of a later version, and so not ours to touch."""
        try:
            self.inspect(key)
        except FormatError as error:
            return error.reason == "newer"
        except OSError:
            pass
        return False

    def _good(self, row: Row) -> bool:
        try:
            self.read_into(row.label, np.empty(self.inspect(row.label.key).size, np.uint8))
        except FormatError:
            return False
        except OSError as error:
            if error.errno in _OURS:
                raise
            return False
        return True

    def empty_quarantine(self) -> int:
        """Deletes all that was put aside; how many. Raises OSError."""
        with self.writing():
            return self._quarantine.tidy(0)

    # ── what crashes left ────────────────────────────────────────────────────────────────────────────────────────────

    def reconcile(self, *, evict: bool = True) -> tuple[list[Label], list[bytes]]:
        """Brings folder and catalogue together: temporary files go, objects without a row get one, rows without an object
        go, and with `evict` so does what is beyond the budget. Deleting is finished where it was broken off. Returns what was
        found and what went.
        """
        with self.writing():
            files.clear(self._temporary)
            there = self._scan()
            known = {row.label.key: row for row in self.catalog.rows()}
            gone = sorted(known.keys() - there.keys())
            self.catalog.remove(gone)
            # A row may also be older than its object: when what is derived was being replaced.
            changed = [
                key for key, row in known.items() if there.get(key, row.allocated) != row.allocated or not row.label.canonical
            ]
            current = [(label, there[key]) for key in changed if key in there and (label := self._label(key)) is not None]
            found = [
                (label, there[key]) for key in sorted(there.keys() - known.keys()) if (label := self._label(key)) is not None
            ]
            found.sort(key=lambda one: one[0].start)  # as they were written: what they hang on is known before them
            self.catalog.add(current + found)
            self.measure()  # what was found is ours too
            if evict:
                gone += self._make_room(0, ())
            gone += self._scrub()
            self._strange = there.keys() - self.catalog.keys()
        return [label for label, _ in found if label.key not in gone], gone

    def strays(self) -> bool:
        """Whether there seem to be objects that the catalogue does not know, as a crash leaves them."""
        return not self.catalog.keys().union(self._strange).issuperset(self._scan())

    def _scan(self) -> dict[bytes, int]:
        """The keys of all objects, with their allocated bytes."""
        there: dict[bytes, int] = {}
        with os.scandir(self.objects) as entries:
            for entry in entries:
                with contextlib.suppress(ValueError, FileNotFoundError):
                    key = bytes.fromhex(entry.name.removesuffix(_SUFFIX))
                    if self.path(key).name == entry.name:
                        there[key] = entry.stat(follow_symlinks=False).st_blocks * 512
        return there

    def _label(self, key: bytes) -> Label | None:
        """What an object says it is; None if it cannot be used, and is put aside."""
        try:
            label = self.inspect(key).label
            if label.key != key:
                raise FormatError("other", "its name is not its key")
            if not label.written:  # older versions did not say
                label = replace(label, written=self.path(key).stat().st_mtime)
        except (FormatError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _OURS:
                raise
            log.warning("not an object that can be used: %s (%s)", self.path(key).name, error)
            if not (isinstance(error, FormatError) and error.reason == "newer"):
                self._quarantine.take(self.path(key))
            return None
        return label

    def __contains__(self, key: bytes) -> bool:
        return self.catalog.get(key) is not None

    def __len__(self) -> int:
        return len(self.catalog)
