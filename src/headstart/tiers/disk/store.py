"""Disk: stores objects in files. Each object is written once, completely, and checked at every read.

    write   temporary file ─▶ fsync ─▶ rename ─▶ fsync of the folder ─▶ row in the catalogue
    delete  row in the catalogue ─▶ unlink
    bad     rename into quarantine ─▶ row in the catalogue

So a crash can leave a temporary file, an object without a row, or the row of a bad object. No other row is without a complete
object. `reconcile` cleans up after crashes. One process writes at a time, under a lock on the folder. Reading needs no lock.

The budget covers everything in the folder. Objects count with their sizes in the catalogue, other files with their real sizes.
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
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from headstart.errors import Conflict
from headstart.interfaces.tier import Store
from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.quota import NoQuota, OwnerLimits, PinLimits, quota
from headstart.tiers.disk import files, format, reader
from headstart.tiers.disk.ages import TOMBSTONE_TERM
from headstart.tiers.disk.catalog import Row, StoredModel
from headstart.tiers.disk.catalog_file import CatalogFile
from headstart.tiers.disk.format import FormatError, Header, Label, Sealed
from headstart.tiers.disk.lock import Lock
from headstart.tiers.disk.quarantine import Quarantine
from headstart.tiers.disk.schema import damages
from headstart.units import count

log = logging.getLogger("headstart.disk")

RESERVE = 32 << 20
"""Bytes of the budget that are reserved for the catalogue. If it needs more, objects are evicted."""
AT_ONCE = 1000
"""Objects up to which everything is looked at before the first write. More are looked at piece by piece, meanwhile."""
UNSEEN = 64 << 20
"""Bytes that are kept free as long as objects without a row may be there: more than a write of each of two processes."""
AHEAD = 24 << 20
"""Bytes that an eviction frees if it can, so that the next writes need none: choosing a few takes as long as choosing many."""
AHEAD_PART = 256
"""For writes to come, no more is evicted than one of so many parts of the budget."""
TOGETHER = 128 << 20
"""Bytes that are evicted together."""
AT_A_TIME = 32
"""Objects that are evicted at once."""
EXPIRE = 8
"""Objects that are deleted in one piece because they have expired."""
PIECE = 256
"""Files that are looked at in one piece."""
_SUFFIX = ".rows"
_FAULTS_HERE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of this process, which do not mean that a file is bad."""


@dataclass(frozen=True, slots=True)
class Tidied:
    """A piece of what `Disk.tidy` has done.

    Attributes:
        found: objects that had no row.
        dropped: keys of rows that had no object, or a bad one.
        evicted: keys of objects for which the budget has no room.
    """

    found: Sequence[Label] = ()
    dropped: Sequence[bytes] = ()
    evicted: Sequence[bytes] = ()


class Disk(Store):
    """Objects under `folder`, within `budget` bytes together with everything else there.

    `read_into` may be called from any thread; everything else from one thread at a time.

    Args:
        budget: most bytes. At each write it is limited to half of the free space and the objects' space together.
        portion: the share of the budget that is the quota of one owner (`prefix_cache/quota`).
        clock: a clock in seconds since 1970.
        check: whether the whole catalogue is read, which shows damage at once. A small one always is.

    Raises:
        OSError: the folder cannot be created or read.
        sqlite3.Error: the catalogue cannot be opened. A damaged one is deleted and created again.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        budget: int,
        portion: float = 1.0,
        clock: Callable[[], float] = time.time,
        *,
        check: bool = True,
    ) -> None:
        self.folder = folder
        self._clock = clock
        self.objects = folder / "objects"
        self._objects = os.path.join(self.objects, "")
        self._temporary = folder / "tmp"
        for path in (self.objects, self._temporary):
            files.make(path)
        self._quarantine = Quarantine(folder / "quarantine")
        self._serial = itertools.count()
        self._unseen = 0  # bytes kept free for objects without a row
        self._strange = dict[bytes, int]()  # bytes of objects without a row: of a later version, or that could not be deleted
        with contextlib.ExitStack() as undo:
            self._lock = Lock(folder / "lock")
            undo.callback(self._lock.close)
            self._file = CatalogFile(folder, self._lock, check=check)
            self.catalog = self._file.open()
            undo.callback(self.catalog.close)
            if self._lock.stale:
                with self._lock.renewed():
                    self.catalog.refuse_later()
            self._unit = files.unit(folder)
            self._given = budget
            self._portion = portion
            self.measure()
            undo.pop_all()

    def measure(self) -> None:
        """Computes the budget again, because other programs may need the space. Raises OSError, sqlite3.Error."""
        objects = self.catalog.used() + sum(self._strange.values())
        self._budget = min(self._given, (shutil.disk_usage(self.folder).free + objects) // 2)

    def abandon_catalog(self) -> None:
        """Closes the disk, and deletes a damaged catalogue. Opening the folder again rebuilds it. Raises OSError."""
        try:
            with self.writing():  # fails if another process has done this already
                self._file.drop()
        finally:
            self.close()

    def learn(self, fingerprint: bytes, model: StoredModel) -> None:
        """Remembers what a fingerprint belongs to, for people. It does not matter if that fails now.

        Raises the error of a damaged catalogue, which is deleted.
        """
        try:
            self.catalog.learn(fingerprint, model)
        except (sqlite3.Error, ValueError, TypeError) as error:
            if damages(error):
                self.abandon_catalog()
                raise

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
        return self._stored + files.occupied(self.folder)

    @property
    def _stored(self) -> int:
        """Bytes of all but the catalogue and the small files beside it."""
        return self.catalog.used() + sum(self._strange.values()) + files.occupied(self._temporary) + self._quarantine.used

    @property
    def reserved(self) -> int:
        """Bytes of the budget that are neither used nor free, because the catalogue may need them."""
        return max(0, RESERVE - files.occupied(self.folder))

    @property
    def index(self) -> Path:
        """The path of the catalogue."""
        return self._file.path

    def path(self, key: bytes) -> Path:
        return Path(self._where(key))

    def _where(self, key: bytes) -> str:
        """The path as a string. Building a Path takes longer than opening the file."""
        return f"{self._objects}{key.hex()}{_SUFFIX}"

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(
        self,
        batch: Sequence[tuple[Label, Bytes]],
        spared: Callable[[], Collection[bytes]] = frozenset,
        wanted: Callable[[Label], bool] = lambda _: True,
    ) -> tuple[list[Label], list[bytes]]:
        """Stores objects, after evicting others. Returns the labels of the stored objects, and the keys of the evicted ones.

        An object is not stored if it is no longer `wanted`, or if it does not fit beside the pinned and `spared` ones. Both
        functions are called under the lock. No object is evicted for one that does not fit anyway. An object that is there
        already is not written again, and a derived one never replaces a canonical one.

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
            gone = self._evict_until(sum(map(self._need, fitting)), spare, fitting)
            placed = fitting[: self._place(fitting)]
        missing = {file.label.key for file in new} - {file.label.key for file in placed}
        return [label for label, _ in asked if label.key not in missing], gone

    def _sealed(self, lacking: Sequence[tuple[Label, Bytes]]) -> list[Sealed]:
        """The objects as they will be written, with their owners and with the times at which their text was first stored."""
        owners = self.catalog.owners([label for label, _ in lacking])
        new: list[Sealed] = []
        for label, data in lacking:
            row = self.catalog.get(label.key)  # replacing an object does not make its text younger
            written = min(label.written or self._clock(), math.inf if row is None else row.label.written)
            label = replace(label, written=written, owner=owners[label.key])
            new.append(Sealed(label, format.encode(label, data), data))
        return new

    def _holds(self, label: Label) -> bool:
        """Whether this object, or a better one, is there."""
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
        """The objects that fit, if necessary after evicting others. Children of an object that does not fit are left out too.

        If others must be evicted, no owner gets more than its quota.
        """
        need = sum(map(self._need, new))
        left = self._free(need)
        shares: OwnerLimits = NoQuota()
        if need > left:
            shares = self._quota()
            left += self.catalog.used() - self.catalog.kept(spare, shares)
        fitting, without = list[Sealed](), set[bytes]()
        for file in new:
            size = self._need(file)
            if size > left or file.label.parent in without or file.label.owner in shares.over(file.label.owner, size):
                without.add(file.label.key)
            else:
                left -= size
                shares.hold(file.label.owner, size)
                fitting.append(file)
        return fitting

    def _free(self, need: int) -> int:
        """Free bytes. If they are fewer than `need`, the quarantine is emptied first."""
        left = self._left
        if need > left:
            self._quarantine.tidy(0)
            left = self._left
        return left

    @property
    def _left(self) -> int:
        return self._budget - self._stored - max(RESERVE, files.occupied(self.folder)) - self._unseen

    def _evict_until(self, need: int, spare: Collection[bytes], coming: Sequence[Sealed] = ()) -> list[bytes]:
        """Evicts until `need` bytes are free for new objects, or nothing more can go. Returns the evicted keys."""
        spare, gone = set(spare), list[bytes]()
        while (missing := need - self._free(need)) > 0:
            shares, owners = self._quota(), {file.label.owner for file in coming}
            for file in coming:
                shares.hold(file.label.owner, self._need(file))
            # With quotas, only what is missing: the rest could be of owners who are within theirs.
            ahead = 0 if shares.on else min(AHEAD, (self._budget - RESERVE) // AHEAD_PART)
            size = min(max(missing, ahead), TOGETHER)
            rows = self.catalog.victims(spare, size, shares=shares, coming=owners, most=AT_A_TIME)
            victims = [row.label.key for row in rows]
            if not victims:
                break
            gone += self._remove(victims)
            spare.update(victims)  # an object that cannot be deleted is not tried again
        return gone

    def _place(self, new: Sequence[Sealed]) -> int:
        """Writes objects in order, as many as fit, and adds their rows. Returns how many."""
        left = self._left
        temporary: list[Path] = []
        placed: list[Label] = []
        try:
            for file in new:
                if self._need(file) > left:
                    break
                temporary.append(self._write_temporary(file))
                left -= files.allocated(temporary[-1])
                if left < 0:  # it occupies more than its size
                    temporary.pop().unlink()
                    break
            for path, file in zip(temporary, new, strict=False):
                os.replace(path, self.path(file.label.key))
                self._strange.pop(file.label.key, None)
                placed.append(file.label)
            if placed:
                files.sync(self.objects)
                self.catalog.add([(label, files.allocated(self.path(label.key))) for label in placed])
        except BaseException:
            for path in temporary:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            for label in placed:
                self._take_back(label.key)
            raise
        return len(placed)

    def _take_back(self, key: bytes) -> None:
        """Deletes an object that has got no row. It counts if it cannot be deleted, or if nobody knows whether it has a row."""
        with contextlib.suppress(OSError):
            try:
                if self.catalog.get(key) is None:
                    self.path(key).unlink()
            except (OSError, sqlite3.Error):
                if (stays := self._allocated(key)) is not None:
                    self._strange[key] = stays

    def _write_temporary(self, whole: Sealed) -> Path:
        path = self._temporary / f"{os.getpid()}-{next(self._serial)}{_SUFFIX}"
        # No other process writes now: an existing file of this name was left by a dead process with the same id.
        files.write(path, (memoryview(whole.head), whole.payload.data), whole.label.written)
        return path

    def compare(self) -> None:
        """Raises OSError if another process has replaced the catalogue: what is in this one says nothing any more."""
        self._lock.compare()

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Holds the folder's lock: no other process writes meanwhile. Raises what `Lock.held` raises."""
        return self._lock.held()

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def read_into(self, label: Label, out: Bytes, count: Callable[[int], None] = lambda _: None) -> int:
        """Reads an object into `out`. Returns its bytes. Thread-safe. See `reader.read`, also for the errors."""
        return reader.read(self._where(label.key), label, out, count)

    def inspect(self, key: bytes) -> Header:
        """The header of an object. Raises what `read_into` raises."""
        return reader.inspect(self._where(key))

    # ── delete ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def remove(self, keys: Collection[bytes]) -> list[bytes]:
        """Removes objects, in one transaction. Returns the keys of those that are gone."""
        with self.writing():
            gone = self._remove(keys)
            files.sync(self.objects)
        return gone

    def discard(self, keys: Collection[bytes]) -> list[bytes]:
        """Removes objects, except pinned ones and parents of remaining ones. Returns the keys of those that are gone."""
        with self.writing():  # another process may pin one of them, or write a child
            going = {key for key in keys if (row := self.catalog.get(key)) is not None and not row.pinned}
            while stays := {key for key in going if not going.issuperset(self.catalog.children(key))}:
                going -= stays
            if not going:
                return []
            gone = self._remove(going)
            files.sync(self.objects)
        return gone

    def shrink(self, size: int) -> list[bytes]:
        """Evicts until all objects fit into `size` bytes, or nothing more can go. Returns the keys of those that are gone."""
        with self.writing():
            gone = self._remove([row.label.key for row in self.catalog.victims((), self.catalog.used() - size)])
            files.sync(self.objects)
        return gone

    def erase(
        self,
        keys: Collection[bytes],
        before: float = -math.inf,
        spared: Callable[[], Collection[bytes]] = frozenset,
        owners: Collection[bytes] = (),
    ) -> list[Row]:
        """Deletes objects on request of a user, with every trace of them in the folder. Returns the rows of deleted objects.

        It also empties the quarantine, which may hold parts of any chain, and deletes everything that was written up to
        the time `before`. Objects that are `spared` stay; this function is called under the lock. Running servers forget the
        objects too. If this raises, `reconcile` finishes the work.

        Args:
            owners: of those entries that are not on disk. Without `before`, running servers also forget what only their memory
                has of the owners of all entries: some of it may be meant.

        Raises:
            Conflict: one of the objects is pinned. None is deleted then.
            OSError: also if some of the files cannot be deleted. The rows of objects stay then.
            sqlite3.Error: the catalogue cannot be changed.
        """
        with self.writing():
            keys = ({*keys} | self.catalog.ages.old(before)) - {*spared()}
            rows = [row for key in keys if (row := self.catalog.get(key)) is not None]
            buried = set[bytes]()
            if before == -math.inf:
                if any(row.pinned for row in rows):
                    raise Conflict("This chain is pinned: unpin it first.", code="pinned")
                buried = {*owners, *(row.label.owner for row in rows)}
            gone = set(self._remove(keys, lambda: self.catalog.ages.wipe(keys, before, self._clock(), buried)))
            if before > -math.inf:
                self._file.note_deleted(self.catalog.ages.wiped()[0])
            self._quarantine.empty()
            self._sweep(before)
            if not self.catalog.ages.clean:
                raise BlockingIOError("another process reads the catalogue for too long; run `headstart cache gc` to finish")
            if stuck := len(keys) - len(gone):
                raise OSError(errno.EIO, f"{count(stuck, 'file')} cannot be deleted, and stay; the log names them")
        return [row for row in rows if row.label.key in gone]

    def expire(
        self, terms: Terms, spared: Callable[[], Collection[bytes]] = frozenset
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Deletes expired objects, in pieces: the keys of those that are gone, and of objects that were evicted meanwhile.

        Objects that are `spared` are not evicted. Others may write between two pieces. The last piece removes all traces. If it
        is not reached, the next call does so.
        """
        if terms.shortest == math.inf:
            return
        yield from self._expire(terms, None)
        owner: bytes | None = None
        while owners := self.catalog.ages.owners(owner, PIECE):
            owner = owners[-1]
            # The owners that have a term may be many more than those of objects.
            for one in owners:
                if not one or one in terms:
                    yield from self._expire(terms, one)
            yield [], []
        now = self._clock()
        for _ in self.catalog.ages.fade(terms, now, PIECE):
            yield [], []
        with self.writing():
            before = terms.cut(b"", now)
            self._quarantine.drop((), before)
            evicted = self._sweep(before, spared())
            self.catalog.ages.forget_terms(now)
        yield [], evicted

    def _expire(self, terms: Terms, owner: bytes | None) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Deletes the expired objects of an owner, or with None those that are older than everybody's term."""
        stuck = set[bytes]()

        def due() -> list[bytes]:
            found = self.catalog.ages.due(terms, self._clock(), owner, EXPIRE + len(stuck))
            return [key for key in found if key not in stuck]

        while due():
            with self.writing():
                keys = due()
                gone = self._remove(keys, partial(self.catalog.ages.erase, keys, self._clock()))
                self._quarantine.drop({self.path(key).name for key in keys}, -math.inf)
            stuck |= {*keys} - {*gone}
            yield gone, []

    def _sweep(self, before: float, spare: Collection[bytes] = ()) -> list[bytes]:
        """Deletes files without a row, and makes all deletions durable. Returns the keys of objects evicted for it."""
        for key in self.catalog.without_row(self._strange):  # this process may have stored an object of its own there
            try:
                if self.path(key).stat().st_mtime > before:
                    continue
                self.path(key).unlink()
            except FileNotFoundError:
                pass
            del self._strange[key]
        files.empty(self._temporary)  # no other process writes now, so a crash has left them
        files.sync(self.objects)
        return self._scrub(spare)

    def _scrub(self, spare: Collection[bytes] = ()) -> list[bytes]:
        """Removes deleted text from the catalogue's files. Returns the keys of objects that were evicted for it."""
        if self.catalog.ages.clean:
            return []
        # While it is rewritten, there are two copies of it.
        evicted = self._evict_until(max(0, files.occupied(self.folder) - self.reserved), spare)
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
            else:
                self._strange.pop(key, None)
        self._occupy([row for row in rows if row.label.key in stuck])
        return [key for key in keys if key not in stuck]

    def quarantine(self, key: bytes) -> Row | None:
        """Moves a bad object into quarantine.

        Returns its row if the object is good after all: another process may have written it again.
        """
        with self.writing():
            row = self.catalog.get(key)
            if row is None or self._good(row):
                return row
            if not self._newer(key):
                self._put_aside(key)
                return None
            self.catalog.remove([key])
            if (stays := self._allocated(key)) is not None:
                self._strange[key] = stays
        return None

    def _put_aside(self, key: bytes) -> None:
        """Moves an object into quarantine, and drops its row. One that cannot be moved keeps its row: it occupies space.

        The row goes last, because the object may be good, and only the folder is not: it must not lose its pin in a crash.
        """
        try:
            self._quarantine.take(self.path(key))
        finally:
            if self._allocated(key) is None:
                self.catalog.remove([key])

    def _occupy(self, rows: Sequence[Row]) -> None:
        """Gives objects that could not be deleted their rows again: they occupy space. What gets none counts nevertheless."""
        try:
            if rows:
                self.catalog.add([(row.label, row.allocated) for row in rows])
        except sqlite3.Error:
            self._strange |= {row.label.key: row.allocated for row in rows}
            raise

    def _newer(self, key: bytes) -> bool:
        """Whether an object is of a later version. It must then stay as it is."""
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
            if error.errno in _FAULTS_HERE:
                raise
            return False
        return True

    def pin(self, keys: Collection[bytes]) -> set[bytes] | None:
        """Pins objects. Returns those that were not pinned before.

        None if they do not fit into the share for pins, or are not all there. Then none is pinned.
        """
        with self.writing():
            self.measure()
            limits = PinLimits.of(self._portion, self._budget, RESERVE)
            held, need, new = Counter(self.catalog.pinned_bytes()), Counter[bytes](), set[bytes]()
            for key in keys:
                if (row := self.catalog.get(key)) is None:
                    return None
                if not row.pinned:
                    need[row.label.owner] += row.allocated
                    new.add(key)
            if not all(limits.fits(held[owner] + size, held.total() + need.total()) for owner, size in need.items()):
                return None
            self.catalog.pin(keys)
            return new

    def empty_quarantine(self) -> int:
        """Deletes all objects in quarantine. Returns how many. Raises OSError."""
        with self.writing():
            return self._quarantine.empty()

    # ── after a crash ────────────────────────────────────────────────────────────────────────────────────────────────

    def reconcile(self, *, evict: bool = True) -> tuple[list[Label], list[bytes]]:
        """Makes folder and catalogue consistent. Returns the labels of found objects, and the keys of removed ones.

        Temporary files and rows without an object are deleted. Objects without a row get one. With `evict`, objects beyond the
        budget are evicted. Interrupted deletions are finished.
        """
        found, gone = list[Label](), list[bytes]()
        for piece in self.tidy(evict=evict):
            found += piece.found
            gone += [*piece.dropped, *piece.evicted]
        return sorted((label for label in found if label.key not in gone), key=lambda label: label.start), gone

    def keep_room(self) -> None:
        """Keeps some bytes free until `tidy` has ended: a crash may have left objects without a row."""
        self._unseen = UNSEEN

    def tidy(self, *, evict: bool = True, whole: bool = True, rows: bool = True) -> Iterator[Tidied]:
        """Does what `reconcile` does, in pieces. Others may write between two of them.

        Args:
            whole: whether the totals are counted too. Otherwise some bytes are kept free until the end.
            rows: whether the object of each row is looked at. Otherwise objects without a row are looked for.
        """
        with self.writing():
            files.clear(self._temporary)
            if whole:
                self.catalog.recount()
        if rows:
            self._unseen = 0 if whole else UNSEEN
            key = b""
            while sizes := self.catalog.sizes(key, PIECE):
                key = sizes[-1][0]
                # A row may be older than its object, if a derived object was being replaced.
                doubtful = [one for one, allocated, canonical in sizes if not canonical or self._allocated(one) != allocated]
                yield Tidied(dropped=self._correct(doubtful) if doubtful else ())
        strange, later = dict[bytes, int](), list[tuple[Label, int]]()
        with os.scandir(self.objects) as entries:
            while names := [entry.name for entry in itertools.islice(entries, PIECE)]:
                lacking = self.catalog.without_row([key for key in map(self._key, names) if key is not None])
                yield Tidied(self._take_in(lacking, strange, later) if lacking else ())
        with self.writing():
            later.sort(key=lambda one: one[0].start)  # parents first
            self._list(later)
            self._unseen, self._strange = 0, strange
            self.measure()  # the found objects belong to the budget too
            gone = self._evict_until(0, ()) if evict else []
            if not self.catalog.ages.clean:  # a deletion was interrupted
                self._quarantine.empty()
                files.sync(self.objects)
            self.catalog.ages.outdate_tombstones(self._clock() - TOMBSTONE_TERM)
            gone += self._scrub()
        yield Tidied([label for label, _ in later], evicted=gone)

    def _correct(self, doubtful: Sequence[bytes]) -> list[bytes]:
        """Gives rows what their objects say. Rows without an object are deleted; returns their keys."""
        with self.writing():
            listed = [key for key in doubtful if self.catalog.get(key) is not None]
            sizes = {key: size for key in listed if (size := self._allocated(key)) is not None}
            labels = {key: self._label(key) for key in sizes}
            gone = [key for key in listed if labels.get(key) is None]  # no object, or a bad one, which is in quarantine now
            self.catalog.remove(gone)
            self._list([(label, sizes[key]) for key, label in labels.items() if label is not None])
        return gone

    def _take_in(self, lacking: Collection[bytes], strange: dict[bytes, int], later: list[tuple[Label, int]]) -> list[Label]:
        """Adds rows for objects. Returns their labels. Those that cannot be used are added to `strange`.

        Those of older versions that do not name their owner are added to `later`: they must come after their parents.
        """
        found = list[tuple[Label, int]]()
        with self.writing():
            for key in self.catalog.without_row(lacking):  # another process may have added some
                size = self._allocated(key)
                label = self._label(key) if size is not None else None
                if label is not None and size is not None:
                    (found if label.owner or not label.start else later).append((label, size))
                elif (stays := self._allocated(key)) is not None:
                    strange[key] = stays
            found.sort(key=lambda one: one[0].start)
            self._list(found)
        return [label for label, _ in found]

    def _list(self, found: Sequence[tuple[Label, int]]) -> None:
        """Adds rows for objects that were found. The process that wrote them may have ended before it synced the folder."""
        if found:
            files.sync(self.objects)
            self.catalog.add(found)

    def strays(self) -> bool:
        """Whether there are objects without a row, as a crash leaves them."""
        with os.scandir(self.objects) as entries:
            keys = (key for entry in entries if (key := self._key(entry.name)) is not None and key not in self._strange)
            return any(self.catalog.without_row([key]) for key in keys)

    def _key(self, name: str) -> bytes | None:
        """The key of the object in a file of this name."""
        with contextlib.suppress(ValueError):
            key = bytes.fromhex(name.removesuffix(_SUFFIX))
            if f"{key.hex()}{_SUFFIX}" == name:
                return key
        return None

    def _allocated(self, key: bytes) -> int | None:
        """Bytes that an object occupies. None if there is none."""
        try:
            return os.stat(self._where(key), follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            return None

    def _label(self, key: bytes) -> Label | None:
        """The label in an object. None if the object cannot be used; it then goes into quarantine."""
        try:
            label = self.inspect(key).label
            if label.key != key:
                raise FormatError("other", "its name is not its key")
            if not label.written:  # older versions did not store it
                label = replace(label, written=self.path(key).stat().st_mtime)
        except (FormatError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _FAULTS_HERE:
                raise
            log.warning("not an object that can be used: %s (%s)", self.path(key).name, error)
            if not (isinstance(error, FormatError) and error.reason == "newer"):
                self._put_aside(key)
            return None
        return label

    def __contains__(self, key: bytes) -> bool:
        return self.catalog.get(key) is not None

    def __len__(self) -> int:
        return len(self.catalog)
