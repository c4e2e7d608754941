"""Store tier: the `SharedTier` of a server with `--shared`. It reads on some threads, and writes on one."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from headstart.interfaces.tokens import BlockId, Bytes
from headstart.tiers.disk import Label, Note
from headstart.tiers.shared.breaker import Breaker
from headstart.tiers.shared.buffers import Buffers
from headstart.tiers.shared.envelope import SealError, open_note, written_by
from headstart.tiers.shared.keys import OwnerKeys
from headstart.tiers.shared.pace import StorePace
from headstart.tiers.shared.reading import AHEAD, Link, ReadAhead, Reading
from headstart.tiers.shared.recent import Recent
from headstart.tiers.shared.servers import ServerCard
from headstart.tiers.shared.store import SharedStore, StoreError
from headstart.tiers.shared.terms import SharedTerms
from headstart.tiers.shared.writing import Writing
from headstart.tiers.shared_tier import Arrival, Fetch, FetchRequest, NoSharedListener, SharedListener

log = logging.getLogger("headstart.shared")

READERS = 4
"""Prompts that fetch at the same time."""
MISSING = 5.0
"""Seconds for which an object that was not there is not asked for again."""
STORED = 3600.0
"""Seconds for which an object that was there is believed to be there still."""
TOUCHED = 600.0
"""Seconds between two touches of one object."""


@dataclass(frozen=True, slots=True)
class Saves:
    """What a kind of store gets.

    Attributes:
        when: entries are written as soon as they are `computed`, when a request has `reused` them, and when the server is
            `leaving`.
        share: most bytes that are written for each byte that is computed, before the server stops.
    """

    when: Set[str]
    share: float = math.inf


_EVERYTHING: Final = Saves(frozenset({"computed", "reused", "leaving"}))
SAVES: Final[dict[str, Saves]] = {
    "valkey": _EVERYTHING,
    "valkeys": _EVERYTHING,
    "file": _EVERYTHING,
    "s3": Saves(frozenset({"reused", "leaving"}), 0.3),  # requests cost money and time
}
"""By the scheme of the store's URL."""


class StoreTier:
    """A `SharedTier`.

    Args:
        card: describes this server to others.
        room: most bytes that wait to be written. They are part of the memory tier.
        writes: whether anything is written or deleted at all (`--shared-mode`).
        terms: how long entries may be kept, by the clock `wall`.
        listener: hears what is in the store.
    """

    name = "shared"
    on = True

    def __init__(
        self,
        store: SharedStore,
        keys: OwnerKeys,
        *,
        card: ServerCard,
        room: int,
        writes: bool,
        terms: SharedTerms,
        listener: SharedListener | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        saves = SAVES[store.url.partition(":")[0]]
        self.saves: Set[str] = saves.when if writes else frozenset()
        self._listener = listener = NoSharedListener() if listener is None else listener
        missing = Recent(MISSING, clock, added=listener.not_in_store)
        stored = Recent(STORED, clock, dropped=listener.not_in_store)
        bad = Recent(STORED, clock)
        read_ahead = ReadAhead(min(READERS * AHEAD, room // 4))
        buffers = Buffers(2 * read_ahead.each)  # what waits for the engine thread, and a batch on its way
        self._link = Link(
            *(store, keys, StorePace(), Breaker(), missing, stored, bad, set(), self.counters, clock, buffers, read_ahead)
        )
        self._touched = Recent(TOUCHED, clock)
        self._offered: dict[BlockId, Label] = {}  # and not answered yet
        self._writing = Writing(self._link, room, card, terms, wall, saves.share, writes=writes)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="headstart-shared-read")
        self._closed = False

    def fetch(self, wanted: FetchRequest, wake: Callable[[], None]) -> Fetch | None:
        link = self._link
        first = wanted.label(wanted.blocks.start).key
        if (first in link.missing and first not in wanted.here) or not link.breaker.allows(link.clock()):
            return None
        reading = _HeardReading(wanted, link, wake, self._listener)
        self._readers.submit(reading.run)
        return reading

    def lacks(self, key: BlockId) -> bool:
        return key not in self._link.stored

    def due(self, key: BlockId) -> bool:
        return key in self._link.stored and key not in self._touched

    def offer(self, label: Label, payload: Bytes, *, last: bool = False) -> bool:
        if not (self.saves and self._writing.offer(label, payload, last=last)):
            return False
        self._offered[label.key] = label
        return True

    def takes(self, size: int) -> bool:
        return self._writing.takes(size)

    def fetching(self, size: int) -> float | None:
        return self._link.pace.seconds(size) if self._link.breaker.closed else None

    def computed(self, size: int) -> None:
        self._writing.computed(size)

    def touch(self, labels: Sequence[Label]) -> None:
        if labels and self.saves:
            for label in labels:
                self._touched.add(label.key)
            self._writing.touch(labels)

    def note(self, owner: bytes, note: Note) -> None:
        if self.saves:
            self._link.missing.drop(note.key)
            self._writing.note(owner, note)

    def find_note(self, owner: bytes, key: bytes) -> Note | None:
        link = self._link
        if key in link.missing or not link.breaker.allows(link.clock()):
            return None
        try:
            name = link.keys.names.of(owner, "note", key)
            (blob,) = link.store.get([name])
            link.breaker.succeeded()
            if blob is not None:
                found = open_note(name, blob, key, link.keys.of(owner))
                if written_by(blob) not in link.distrusted:
                    self.counters["notes_fetched"] += 1
                    return found
                self.counters["fault_distrusted"] += 1
        except SealError as error:
            self.counters[f"fault_{error.reason}"] += 1
        except StoreError as error:
            link.failed(error.reason, error, waited=error.reason == "timeout")
        link.missing.add(key)
        return None

    def answered(self) -> list[BlockId]:
        keys = self._writing.answered()
        for key in keys:
            label = self._offered.pop(key)
            if key in self._link.stored:
                self._listener.in_store(label)
        return keys

    def distrust(self, labels: Sequence[Label], writer: str) -> None:
        self._link.distrusted.add(writer)
        for label in labels:
            self._link.bad.add(label.key)  # one that is there nevertheless is replaced
            self._link.missing.add(label.key)
            self._link.stored.drop(label.key)
        self.counters["fault_differs"] += 1
        log.error("an object of server %s in the shared store is not what this server computes", writer)
        self._writing.discard(labels)

    def erase(self, labels: Sequence[Label]) -> Future[None]:
        return self._writing.erase(labels)

    def close(self, seconds: float) -> bool:
        if not self._closed:
            self._closed = True
            self._ended = self._writing.close(seconds)
            self._link.store.close()  # ends the calls that are running
            self._readers.shutdown(wait=False, cancel_futures=True)
        return self._ended


class _HeardReading(Reading):
    """A reading of which the listener hears."""

    def __init__(self, wanted: FetchRequest, link: Link, wake: Callable[[], None], listener: SharedListener) -> None:
        super().__init__(wanted, link, wake)
        self._listener = listener

    def take(self) -> list[Arrival]:
        arrived = super().take()
        for arrival in arrived:
            self._listener.in_store(arrival.label)
        return arrived
