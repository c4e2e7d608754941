"""Upkeep: what is done on a disk from time to time, a piece in each round of its thread: cleaning up, and expiry.

Used on the disk's thread; while a disk is opened, on the thread that opens it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from headstart.names import OptionText, option
from headstart.prefix_cache.expiry import Terms
from headstart.tiers.catalog_watch import CatalogWatch
from headstart.tiers.disk import Disk
from headstart.tiers.disk.store import AT_ONCE, Tidied
from headstart.tiers.notices import ObjectErased, ObjectGone
from headstart.units import count

log = logging.getLogger("headstart.disk")

TIDY = 600.0
"""Seconds between two searches for files that crashes of other processes have left."""


class Upkeep:
    """Tidies a disk, and erases what has expired.

    Args:
        terms: how long entries may be kept.
        clock: a clock in seconds since 1970.
        spared: keys of objects that must not be evicted now.
        gone: is told which objects are gone, and how.

    Attributes:
        untidied: whether there are objects without a row, which the first tidying has still to find.
        tidied: when a disk was last tidied, by the monotonic clock.
        looked: when expired objects were last looked for, in seconds since 1970.
        terms_seen: the version of the terms that the next look obeys, or the last one has obeyed.
    """

    def __init__(
        self,
        watch: CatalogWatch,
        terms: Terms,
        clock: Callable[[], float],
        *,
        counters: Counter[str],
        spared: Callable[[], frozenset[bytes]],
        gone: Callable[[Collection[bytes], type[ObjectGone | ObjectErased]], None],
    ) -> None:
        self.untidied = False
        self._watch = watch
        self._terms = terms
        self._clock = clock
        self._counters = counters
        self._spared = spared
        self._gone = gone
        self.terms_seen = -1
        self._mended: Counter[str] = Counter()
        self._at_once = True  # whether this clean-up ends before anything else is done
        self.restart()

    def restart(self) -> None:
        """A disk was opened: all is due."""
        self.stop()
        self.tidied = -math.inf
        self.looked = self._began_look = -math.inf  # the latter: when the look under way began

    def stop(self) -> None:
        """Gives up what is under way."""
        self._tidying: Iterator[Tidied] | None = None
        self._expiring: Iterator[tuple[list[bytes], list[bytes]]] | None = None

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return self._tidying is not None or self._expiring is not None

    @staticmethod
    def small(disk: Disk) -> bool:
        """Whether a disk has so few objects that all of them can be looked at in one go."""
        return len(disk) <= AT_ONCE

    def tidy(self, disk: Disk) -> None:
        """Cleans up after crashes: of all processes at the start, and of other processes later. If it is much, by pieces."""
        if self._tidying is None and time.monotonic() >= self.tidied + min(TIDY, self._terms.look):
            small = self.small(disk)
            if not (small or self._watch.complete):
                return
            first = self.tidied == -math.inf
            self._tidying, self._at_once = disk.tidy(whole=small, rows=first), small
            self._mended = Counter()
        while self._tidying is not None:
            piece = next(self._tidying, None)
            if piece is None:
                self._tidying, self.tidied, self.untidied = None, time.monotonic(), False
                self._watch.more = True
                if self._mended["found"] or self._mended["dropped"]:
                    found, dropped = count(self._mended["found"], "object"), count(self._mended["dropped"], "row")
                    log.info("after a crash: %s found again, %s dropped", found, dropped)
                    self.looked = self._began_look = -math.inf  # what was found may be expired
                if self._mended["evicted"]:
                    evicted = count(self._mended["evicted"], "object")
                    log.info("%s evicted: they need more than %s", evicted, OptionText(option("disk_budget")))
            else:
                self._mended.update(found=len(piece.found), dropped=len(piece.dropped), evicted=len(piece.evicted))
                self._counters.update(["evicted"] * len(piece.evicted))
                self._gone([*piece.dropped, *piece.evicted], ObjectGone)
                if not self._at_once:
                    break

    def expire(self, disk: Disk, *, whole: bool = False) -> None:
        """Erases expired objects. `whole`: all pieces."""
        if self._terms.news():
            self.agree(disk)
        if self.terms_seen != self._terms.version:
            self.terms_seen, self.looked = self._terms.version, -math.inf
        now = self._clock()
        if self._expiring is None and abs(now - self.looked) >= self._terms.look:  # the clock may be set back
            self.agree(disk)
            self._expiring, self._began_look = disk.expire(self._terms, self._spared), now
        while self._expiring is not None:
            before = disk.catalog.ages.own
            piece = next(self._expiring, None)
            if piece is None:
                self.agree(disk)  # `expire` may have removed some terms
                self._expiring, self.looked = None, self._began_look
            else:
                erased, evicted = piece
                self._counters.update(["erased"] * len(erased) + ["evicted"] * len(evicted))
                self._gone(erased, ObjectErased)
                self._gone(evicted, ObjectGone)
                self._watch.erased_here(disk.catalog.ages.own - before)
                if not whole:
                    break

    def agree(self, disk: Disk) -> None:
        """Writes the terms that were set here into the catalogue, and reads those of other processes."""
        news = self._terms.news()
        found = disk.catalog.ages.agree(news, self._clock())
        self._terms.kept(news)
        if found is not None:
            self._terms.learn(found)
