"""Hub: sends what the server does to all who read it.

engine thread ──tap──▶ deque ──▶ hub's thread: coalesce, encode once ──▶ bounded queue of each reader ──▶ event loop ──▶ reader

The hub's thread runs, and the tap listens, only while there are readers, and a little longer for those who reconnect.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from headstart.errors import Overloaded, Unavailable
from headstart.events.item import EACH, Item
from headstart.events.mirror import Mirror
from headstart.events.source import Source
from headstart.serving.portions import paced

T = TypeVar("T")

PERIOD = 0.25
"""Seconds between two looks at what is new."""
SELDOM = 8
"""Periods between two looks at what is evicted next."""
SOON = 16
"""Entries in the list of what is evicted next."""
LINGER = 10.0
"""Seconds for which the hub goes on without readers. One that reconnects meanwhile gets what it has missed."""
READERS = 64
"""Most readers at a time. See `Hub.subscribe` for who gets a place when all are taken."""
WAITING = 1 << 20
"""Most bytes that wait for a reader. A slower one is dropped."""
KEPT = 4 << 20
"""Most bytes of events that are kept for readers who reconnect."""
KEPT_TICKS = 240
"""Periods for which they are kept."""
CHUNK = 100
"""Most entries or requests in one event. Some clients take no line of more than 64 KiB."""

log = structlog.get_logger("headstart.api")


@dataclass(frozen=True, slots=True)
class View:
    """What a reader may see: all that is of `owner`; with `everything`, all."""

    owner: bytes
    everything: bool = False

    def of(self, items: Iterable[Item]) -> Iterator[bytes]:
        """What it reads of items."""
        for item in items:
            if data := item.data if self.everything or item.owner == self.owner else item.public:
                yield data


@dataclass(frozen=True, slots=True)
class EventPart:
    """What may become one event. `before`: what readers know already, if the event replaces it."""

    name: str
    items: Sequence[Item]
    before: Sequence[Item] = ()

    def text(self, view: View) -> bytes:
        """The event as a view may see it; b"" if it sees nothing new. So nobody learns that something changed for others."""
        seen = [*view.of(self.items)]
        return b"" if seen == [*view.of(self.before)] else _list(self.name, seen)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one period. `resized`: whether more or less is stored than before."""

    number: int
    parts: Sequence[EventPart]
    resized: bool

    @property
    def size(self) -> int:
        """Bytes of what it keeps."""
        return sum(len(item.data) + len(item.public) for part in self.parts for item in (*part.items, *part.before))


class EventReader:
    """One reader. `wake` is called, on any thread, when there is something to take."""

    def __init__(self, view: View, wake: Callable[[], None]) -> None:
        self.view = view
        self.over = False
        self._wake = wake
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._lock = threading.Lock()

    def put(self, data: bytes, last: bytes) -> bool:
        """Queues events. If too many wait, all of them are given up for `last`, and the reader is over: False."""
        with self._lock:
            if self.over:
                return False
            if self._size + len(data) > WAITING:
                self.over = True
                self._waiting.clear()
                data = last
            self._waiting.append(data)
            self._size += len(data)
        self._wake()
        return not self.over

    def end(self, last: bytes) -> None:
        """The reader is over, after what waits."""
        with self._lock:
            if not self.over:
                self.over = True
                self._waiting.append(last)
        self._wake()

    def take(self) -> bytes:
        """All that waits."""
        with self._lock:
            found = b"".join(self._waiting)
            self._waiting.clear()
            self._size = 0
        return found


class Hub:
    """The events of one source, for many readers. Thread-safe.

    Args:
        threaded: whether it has a thread that calls `tick` while there are readers.
    """

    def __init__(self, source: Source, *, threaded: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._threaded = threaded
        self._clock = clock
        self._lock = threading.RLock()
        self._mirror = Mirror(source)
        self._readers: list[EventReader] = []
        self._epoch: Final = uuid.uuid4().hex[:8]
        self._number = 0
        self._first = 1  # the number of the first batch since the source was opened last
        self._kept: deque[EventBatch] = deque()
        self._size = 0  # bytes of these
        self._open = False
        self._left = 0.0  # when the last reader left
        self._slots: list[Item] = []
        self._soon: list[Item] = []

    @property
    def readers(self) -> int:
        """How many there are."""
        return len(self._readers)

    # ── for routes: they wait for the engine's current step, if there was no reader ───────────────────────────────────

    def subscribe(self, view: View, wake: Callable[[], None], last_id: str = "") -> tuple[EventReader, list[bytes]]:
        """A new reader, and what it reads first: what it has missed since `last_id`, or a snapshot.

        If all places are taken, the owner with the most readers gives up its newest one, unless the new reader's owner would
        then have more than that one. Readers of the operator yield to nobody, and all others yield to them.

        Raises:
            Overloaded: there are too many readers.
        """
        with self._lock:
            if len(self._readers) >= READERS:
                self._free_place(view)
            self._begin()
            first = self._missed(view, last_id)
            reader = EventReader(view, wake)
            self._readers.append(reader)
            return reader, self._snapshot(view) if first is None else first

    def _free_place(self, view: View) -> None:
        """Ends a reader, for a new one."""
        tenants = Counter(reader.view.owner for reader in self._readers if not reader.view.everything)
        mine = sum(reader.view.everything for reader in self._readers) if view.everything else tenants[view.owner]
        owner, most = max(tenants.items(), key=lambda pair: pair[1], default=(b"", 0))
        if not (most if view.everything else most > mine + 1):
            message = f"{READERS} readers of events are the most, and {mine} of them are yours. "
            hint = "Close one." if mine else "Try again when another has closed."
            raise Overloaded(message + hint, retry_after=10.0)
        newest = next(one for one in reversed(self._readers) if one.view.owner == owner and not one.view.everything)
        self._readers.remove(newest)
        newest.end(_YIELDED)

    def once(self, view: View) -> list[bytes]:
        """A snapshot, without a subscription."""
        with self._lock:
            self._begin()
            self._left = self._clock()
            return self._snapshot(view)

    def unsubscribe(self, reader: EventReader) -> None:
        """The reader has gone. Idempotent."""
        with self._lock:
            if reader in self._readers:
                self._readers.remove(reader)
            self._left = self._clock()

    def end(self, reader: EventReader) -> None:
        """Ends a reader, because the server stops. Returns at once."""
        reader.end(_frame("end", b'{"reason":"the server is stopping"}'))

    def close(self) -> None:
        """Ends all readers."""
        with self._lock:
            for reader in self._readers:
                self.end(reader)
            self._readers.clear()
            self._stop()

    # ── the hub's thread ─────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> bool:
        """Sends what is new. False if the hub has stopped, because nobody reads."""
        with self._lock:
            if not self._open:
                return False
            if not self._readers and self._clock() - self._left >= LINGER:
                self._stop()
                return False
            news = self._source.news()
            if news is None:
                self._again()
                return True
            changes = self._mirror.apply(news)
            lists = {"tree": changes.tree, "requests": changes.requests}
            parts = [EventPart(name, part) for name, items in lists.items() for part in _chunks(items)]
            if (slots := self._mirror.slots()) != self._slots:
                parts.append(EventPart("slots", slots, self._slots))
                self._slots = slots
            if self._number % SELDOM == 0 and (soon := self._mirror.soon(SOON)) != self._soon:
                parts.append(EventPart("evicted_next", soon, self._soon))
                self._soon = soon
            self._number += 1
            if parts:
                self._send(EventBatch(self._number, parts, changes.resized))
            self._forget()
            return True

    def _send(self, batch: EventBatch) -> None:
        seen: dict[View, bytes] = {}  # made once for all readers with a view
        for reader in [*self._readers]:
            if reader.view not in seen:
                seen[reader.view] = self._text(batch, reader.view)
            data = seen[reader.view]
            if data and not reader.put(data, _DROPPED):
                self._readers.remove(reader)
        self._kept.append(batch)
        self._size += batch.size

    def _forget(self) -> None:
        """Forgets the oldest batches, if there is too much or they are too old."""
        while self._kept and (self._size > KEPT or self._kept[0].number <= self._number - KEPT_TICKS):
            gone = self._kept.popleft()
            self._size -= gone.size
            self._first = gone.number + 1

    def _text(self, batch: EventBatch, view: View) -> bytes:
        """The events of a batch, as a view may see them; b"" if that is nothing."""
        texts = [(part.name, part.text(view)) for part in batch.parts]
        sizes = self._sizes(view) if batch.resized or any(text for name, text in texts if name == "tree") else b""
        data = b"".join(text for _, text in texts) + sizes
        return data and data + self._mark(batch.number)

    def _mark(self, number: int) -> bytes:
        """The id behind the last event of a batch."""
        return b'id: %s-%d\nevent: mark\ndata: {"time":%.3f}\n\n' % (self._epoch.encode(), number, time.time())

    # ── what a reader gets first ─────────────────────────────────────────────────────────────────────────────────────

    def _missed(self, view: View, last_id: str) -> list[bytes] | None:
        """What a reader has missed. None if that is not known any more."""
        epoch, _, number = last_id.partition("-")
        if epoch != self._epoch or not number.isdecimal() or not self._first <= int(number) + 1 <= self._number + 1:
            return None
        return [self._text(batch, view) for batch in self._kept if batch.number > int(number)]

    def _snapshot(self, view: View) -> list[bytes]:
        """All that a reader may know now."""
        found = [b"retry: 2000\n" + _frame("snapshot", b'{"owner":"%s"}' % view.owner.hex().encode())]
        found += [_list("tree", part) for part in _chunks([*view.of(paced(self._mirror.tree()))])]
        found += [_list("requests", part) for part in _chunks([*view.of(self._mirror.requests())][-EACH:])]
        found += [_list("slots", view.of(self._slots)), _list("evicted_next", view.of(self._soon))]
        found.append(self._sizes(view) + self._mark(self._number))
        return found

    def _sizes(self, view: View) -> bytes:
        """How much is held now, as a view may know it."""
        mine, others = self._mirror.totals(view.owner)
        tiers = {"tiers": self._source.tiers()} if view.everything else {}
        return _frame("sizes", json.dumps({"yours": mine, "others": others, **tiers}, separators=(",", ":")).encode())

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Begins, if it has not begun."""
        if self._open:
            return
        self._learn()
        self._open = True
        if self._threaded:
            threading.Thread(target=self._run, name="headstart-events", daemon=True).start()

    def _learn(self) -> None:
        """Learns anew how all is now."""
        self._mirror.begin(paced(self._source.open()), self._source.past())
        self._slots, self._soon = self._mirror.slots(), self._mirror.soon(SOON)
        self._kept.clear()
        self._size = 0
        self._number += 1
        self._first = self._number + 1

    def _again(self) -> None:
        """Begins anew, because news were lost: all readers get a snapshot."""
        self._learn()
        for reader in [*self._readers]:
            for data in self._snapshot(reader.view):
                if not reader.put(data, _DROPPED):
                    self._readers.remove(reader)
                    break

    def _stop(self) -> None:
        if self._open:
            self._open = False
            self._kept.clear()
            self._mirror.begin(())
            with suppress(Unavailable):  # the runtime is closed
                self._source.close()

    def _run(self) -> None:
        going = True
        while going:
            time.sleep(PERIOD)
            try:
                going = self.tick()
            except Exception as error:
                log.error("internal error", exc_info=error)


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[at : at + CHUNK] for at in range(0, len(items), CHUNK))


def _list(name: str, items: Iterable[bytes]) -> bytes:
    return _frame(name, b"[" + b",".join(items) + b"]")


def _frame(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


RENEWED = _frame("dropped", b'{"reason":"streams of a fleet end after a while; connect again","usual":true}')
"""The last event where nobody sees whether a reader takes anything."""
_YIELDED = _frame("dropped", b'{"reason":"you have the most readers, and another owner needs a place; close some"}')
_DROPPED = _frame("dropped", b'{"reason":"you read too slowly; connect again"}')
