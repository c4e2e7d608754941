"""Catalogue watch: learns from the catalogue, in pieces, what is on disk, and what other processes have changed there.

* New objects have growing numbers. All of them are read when a disk was opened; then those behind the last number.
* An evicted object leaves a ghost, and ghosts have growing numbers too.
* An erased object leaves nothing; only a count of erasures grows. Then all known objects are compared with the catalogue,
  unless this process has erased them itself, and has removed them from `known`.
* A user's deletion leaves a tombstone that names the owner, because entries may be meant that were never on disk, or had been
  evicted. Tombstones have growing numbers.

Used on the disk thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, pairwise

from headstart.tiers.disk import catalog as disk_catalog
from headstart.tiers.disk.ages import TOMBSTONES
from headstart.tiers.disk.catalog import Catalog
from headstart.tiers.disk.format import Label
from headstart.tiers.notices import (
    EverythingErased,
    NoteFound,
    Notice,
    ObjectErased,
    ObjectFound,
    ObjectGone,
    OwnersErased,
    PinsFound,
)

PIECE = 250
"""Most rows of one table that one look reads: reading them takes the interpreter for two or three milliseconds."""
LARGE = 256
"""A list of known keys is divided when it has so many."""
_END = b"\xff" * 33
"""Greater than any key."""

KeyRange = tuple[bytes, bytes]
"""Keys from the first one up to below the second one."""


class KnownKeys:
    """A set of keys, in sorted lists that are ranges of keys: 9 bytes for each, where sets of so few take 35 to 250.

    The lists are compared with the catalogue one by one.
    """

    def __init__(self) -> None:
        self._lists: list[list[bytes]] = [[]]
        self._lows = [b""]  # where the range of each begins

    def __contains__(self, key: bytes) -> bool:
        keys = self._lists[self._number(key)]
        place = bisect_left(keys, key)
        return place < len(keys) and keys[place] == key

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._lists)

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            number = self._number(key)
            into = self._lists[number]
            place = bisect_left(into, key)
            if place < len(into) and into[place] == key:
                continue
            into.insert(place, key)
            if len(into) >= LARGE:
                upper = into[LARGE // 2 :]
                self._lists[number : number + 1] = [into[: LARGE // 2], upper]
                self._lows.insert(number + 1, upper[0])

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            number = self._number(key)
            among = self._lists[number]
            place = bisect_left(among, key)
            if place < len(among) and among[place] == key:
                del among[place]
                if not among and number:  # the range before it takes its range
                    del self._lists[number], self._lows[number]

    def lists(self) -> list[list[bytes]]:
        """The lists that have keys, of at most `LARGE` each. They change with the set."""
        return [keys for keys in self._lists if keys]

    def ranges(self) -> list[KeyRange]:
        """Ranges that have all keys, of at most `LARGE` keys each."""
        return [*pairwise([*self._lows, _END])]

    def within(self, keys: KeyRange) -> list[bytes]:
        """The keys in a range, which may have become more lists since, or a part of one."""
        low, high = keys
        found: list[bytes] = []
        for number in range(self._number(low), len(self._lists)):
            if self._lows[number] >= high:
                break
            among = self._lists[number]
            found += among[bisect_left(among, low) : bisect_left(among, high)]
        return found

    def _number(self, key: bytes) -> int:
        """Of the list in whose range a key is."""
        return bisect_right(self._lows, key) - 1


class CatalogWatch:
    """What this process knows of the objects with one fingerprint.

    Args:
        began: when the process began to store text, in seconds since 1970. A later deletion of everything concerns it, also if
            its disk was opened after that.

    Attributes:
        known: keys of the objects that it has reported, and not as gone.
        complete: whether all rows have been read since the disk was opened.
        more: whether the next look has something to do.
        compared: whether no comparison is under way, so that all erasures are known.
        foreign_writes: whether another process had written before the last look.
        wiped: `Ages.wiped`, as it was reported last; None before the first look.
        wiped_first: its time at the first look, if that deletion was before the process began; else 0.
        erased: keys that were found erased since `take_erased`.
        tombstone: the number of the latest tombstone that was reported, or that is of no interest.
    """

    def __init__(self, fingerprint: bytes, began: float = math.inf) -> None:
        self.known = KnownKeys()
        self.wiped: tuple[float, int] | None = None
        self.wiped_first = 0.0
        self.erased: set[bytes] = set()
        self.tombstone = 0
        self._own_tombstones: set[int] = set()
        self._fingerprint, self._began = fingerprint, began
        self._pinned: frozenset[bytes] = frozenset()
        self._found: list[Notice] = []
        self._unseen: list[list[bytes]] = []  # keys that were known when the disk was closed
        self.restart()

    def restart(self) -> None:
        """A disk was opened: everything is read."""
        self.complete = self.foreign_writes = False
        self.more = True
        self._version: tuple[int, ...] = ()
        self._seen = self._seen_notes = 0
        self._seen_ghosts = self._erasures = self._pins = -1
        self._more_rows = self._more_ghosts = False
        self._to_compare: list[KeyRange] = []
        self._compare_again = False
        self._wiped_before: tuple[float, int] = (0.0, 0)  # `Ages.wiped` before the comparison
        self._buried_before = 0  # and the latest tombstone

    @property
    def compared(self) -> bool:
        return not (self._to_compare or self._compare_again)

    def take_erased(self) -> set[bytes]:
        found, self.erased = self.erased, set()
        return found

    def look(self, catalog: Catalog, *, again: bool = False, reports: bool = True, tidied: bool = True) -> list[Notice]:
        """News of the catalogue.

        Args:
            again: report all objects again.
            reports: whether objects may be reported now.
            tidied: whether no object lacks its row. When that changes, set `more`.

        If it raises, `take_found` has what it had found until then: it does not find that again.
        """
        version = catalog.version()
        self.foreign_writes = False
        if again:
            self._seen = 0
        if version == self._version and not (again or self.more):
            return []
        self.foreign_writes = bool(self._version) and version[0] != self._version[0]
        self._version, self.more = version, True  # unless it ends
        goes_on = bool(self._to_compare)
        if not goes_on:  # read before the keys: no deletion is missed, and each is told after all that it has deleted
            self._wiped_before, self._buried_before = catalog.ages.wiped(), catalog.ages.last_tombstone()
        found = self._found
        for notice in self._removed(catalog):
            found.append(notice)
        if not self._to_compare:
            found += self._wiped(self._wiped_before)
            found += self._owners_erased(catalog, self._buried_before)
        more = goes_on  # there may be deletions since it began
        for number, note in [*catalog.notes(self._fingerprint, self._seen_notes, PIECE)]:
            self._seen_notes = number
            found.append(NoteFound(note))
            more |= len(found) >= PIECE
        for notice in self._added(catalog) if reports else ():
            found.append(notice)
        if self.complete and tidied:
            for notice in self._lost_sight_of(catalog):
                found.append(notice)
        if self.complete:
            found += self.pins(catalog)
        more |= self._more_rows or self._more_ghosts or (tidied and bool(self._unseen))
        self.more = more or not (self.compared and reports)
        return self.take_found()

    def lose_sight(self) -> KnownKeys:
        """The disk is closed. Returns what was known. What a user erases until it is opened again is reported afterwards.

        There may be a million keys. So their lists are handed over, and each is freed by itself.
        """
        lost, self.known = self.known, KnownKeys()
        earlier = ([key for key in keys if key not in lost] for keys in self._unseen)  # none twice, however often a disk fails
        self._unseen = [*filter(None, earlier), *lost.lists()]
        return lost

    def _lost_sight_of(self, catalog: Catalog) -> Iterator[Notice]:
        """What has gone of the objects that were known when the disk was closed."""
        if self._unseen:
            yield from self._vanished(catalog, {key for key in self._unseen[-1] if key not in self.known})
            self._unseen.pop()  # afterwards: a fault may end this

    def take_found(self) -> list[Notice]:
        found, self._found = self._found, []
        return found

    def _added(self, catalog: Catalog) -> Iterator[Notice]:
        rows = list(catalog.rows(self._fingerprint, self._seen, PIECE))
        for row in sorted(rows, key=lambda row: row.label.start):  # parents first: the owner is known from them
            self._seen = max(self._seen, row.number)
            self.known.add([row.label.key])
            yield ObjectFound(row.label)
        self._more_rows = len(rows) == PIECE
        self.complete |= len(rows) < PIECE

    def _removed(self, catalog: Catalog) -> Iterator[Notice]:
        """Objects that are gone."""
        erasures, last = catalog.removals()
        if self._erasures < 0:
            self._seen_ghosts = last
        elif self._erasures != erasures or last - self._seen_ghosts > disk_catalog.GHOSTS:
            self._compare_again = True
        self._erasures = erasures
        if self._compare_again and not self._to_compare:  # one that is under way ends first, or frequent erasures would stop it
            self._to_compare, self._compare_again = self.known.ranges(), False
        ghosts = catalog.ghosts_after(self._seen_ghosts, PIECE)
        self._more_ghosts = len(ghosts) == PIECE
        for number, key in ghosts:
            self._seen_ghosts = number
            if key in self.known:
                self.known.remove([key])
                yield ObjectGone(key)
        catalog.ages.seen = self._seen_ghosts
        done = 0
        while self._to_compare and done < 2 * PIECE:
            keys = self.known.within(self._to_compare[-1])
            done += 8 + len(keys)
            yield from self._vanished(catalog, catalog.without_row(keys))
            self._to_compare.pop()  # afterwards: a fault may end this

    def _vanished(self, catalog: Catalog, keys: Collection[bytes]) -> Iterator[Notice]:
        """These objects have no row any more."""
        evicted = catalog.ghosts(keys)
        self.known.remove(keys)
        self.erased |= {*keys} - evicted
        for key in keys:
            yield ObjectGone(key) if key in evicted else ObjectErased(key)

    def erased_here(self, times: int) -> None:
        """This process has erased objects so often since the last call, and all of them were removed from `known`."""
        self._erasures += times if self._erasures >= 0 else 0

    def looked_up(self, catalog: Catalog, keys: Collection[bytes]) -> list[Notice]:
        """The engine has found these objects before they were reported. News of those that have gone since then."""
        gone = catalog.without_row(keys)
        self.known.add({*keys} - gone)
        return list(self._vanished(catalog, gone))

    def told_again(self, catalog: Catalog, keys: Collection[bytes]) -> list[Notice]:
        """Reports those of these objects that are there, whether they were reported before or not."""
        rows = [row for key in {*keys} - catalog.without_row(keys) if (row := catalog.get(key)) is not None]
        found = sorted((row.label for row in rows if row.label.fingerprint == self._fingerprint), key=lambda label: label.start)
        self.known.add([label.key for label in found])
        return list(map(ObjectFound, found))

    def _wiped(self, wiped: tuple[float, int]) -> Iterator[Notice]:
        before, self.wiped = self.wiped, wiped
        if before is None and wiped[0] < self._began:
            self.wiped_first = wiped[0]
        elif wiped[0] and (before is None or wiped[0] != before[0]):
            yield EverythingErased(wiped[0])

    # ── tombstones ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, catalog: Catalog) -> None:
        """The process has stored nothing yet, so earlier deletions do not concern it."""
        self.tombstone = catalog.ages.last_tombstone()

    def buried_here(self, numbers: Collection[int]) -> None:
        """This process has added these tombstones, and obeys them already."""
        self._own_tombstones.update(numbers)

    def outdated(self, catalog: Catalog, label: Label, tombstone: int) -> bool:
        """Whether an object may be of a chain that another process has deleted. Call it under the lock.

        `tombstone`: the latest one that the engine thread had obeyed when it offered the object.
        """
        if (last := catalog.ages.last_tombstone()) == tombstone:
            return False
        owners = catalog.ages.owners_between(tombstone, last, self._own_tombstones)
        return owners is None or label.owner in owners or (bool(owners) and not label.owner)

    def _owners_erased(self, catalog: Catalog, last: int) -> Iterator[Notice]:
        if last != self.tombstone:
            owners = catalog.ages.owners_between(self.tombstone, last, self._own_tombstones)
            self.tombstone = last
            self._own_tombstones = {number for number in self._own_tombstones if number > last - TOMBSTONES}
            yield OwnersErased(last, owners)

    def pins(self, catalog: Catalog) -> list[Notice]:
        """The pins, if they have changed."""
        if (pins := catalog.pins()) == self._pins:
            return []
        before, self._pinned = self._pinned, catalog.pinned(self._fingerprint)
        self._pins = pins
        return [PinsFound(self._pinned)] if self._pinned != before else []
