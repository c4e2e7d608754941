"""Reading: fetches what one prompt could use, on a thread of its own.

    which of its objects are there → is fetching them worth it → fetch in batches → check each → hand over

It ends at the first object that is missing or bad, because children are of no use without their parents; when the rest would
take longer to fetch than to compute; and when nobody waits any more. In models with state the checkpoint is fetched first:
without it the KV before it is of no use. It never is far ahead of the engine thread, which makes room in memory for what has
arrived.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headstart.interfaces.tier import KV, STATE
from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.blocks import checkpoint_id
from headstart.tiers.disk import Label
from headstart.tiers.shared.breaker import Breaker
from headstart.tiers.shared.buffers import Buffers
from headstart.tiers.shared.envelope import PAYLOAD, SealError, open_placed
from headstart.tiers.shared.keys import OwnerKeys, SealKey
from headstart.tiers.shared.names import KIND_OF
from headstart.tiers.shared.pace import StorePace
from headstart.tiers.shared.recent import Recent
from headstart.tiers.shared.store import Placed, SharedStore, StoreError
from headstart.tiers.shared_tier import Arrival, FetchRequest, Unfetched

log = logging.getLogger("headstart.shared")

PROBE = 128
"""Objects whose presence is asked for in one call."""
BATCH_SECONDS = 0.05
"""Expected seconds of one batch. So a slow store shows progress, and stopping does not wait for long."""
BATCH = 64
"""Most objects of a batch."""
AHEAD = 32 << 20
"""Bytes of a prompt that may have arrived and not been taken, beside the batch that is on its way. A batch has as many at most:
each wakes threads that compute a reply, and small ones do so often."""


class ReadAhead:
    """Memory for what has arrived and was not taken. The prompts that fetch at the same time share it.

    Args:
        most: bytes for all of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._readings = 0
        self._lock = threading.Lock()

    @property
    def each(self) -> int:
        """Bytes for one prompt, now."""
        return min(AHEAD, max(1, self._most // max(1, self._readings)))

    @contextmanager
    def shared(self) -> Iterator[None]:
        """One prompt more fetches."""
        with self._lock:
            self._readings += 1
        try:
            yield
        finally:
            with self._lock:
                self._readings -= 1


@dataclass(frozen=True, slots=True)
class Link:
    """What reading needs of the tier: the store, its keys, and what was learnt about both."""

    store: SharedStore
    keys: OwnerKeys
    pace: StorePace
    breaker: Breaker
    missing: Recent
    stored: Recent
    bad: Recent
    distrusted: set[str]
    counters: Counter[str]
    clock: Callable[[], float]
    buffers: Buffers
    read_ahead: ReadAhead

    def failed(self, reason: str, why: object, *, waited: bool = False) -> None:
        """The store has failed. It is left alone for a while if it fails again and again, or at once if a request has `waited`
        for it in vain: the request's next call would wait as long.
        """
        self.counters[f"fault_{reason}"] += 1
        if reason == "refused":  # it may have been restarted, and then it has lost everything
            self.stored.clear()
        news = self.breaker.failed(self.clock())
        if waited:
            news |= self.breaker.trip(self.clock())
        if news:
            log.warning("the shared store fails, serving goes on without it: %s", why)

    def name(self, label: Label) -> str:
        return self.keys.names.of(label.owner, KIND_OF[label.kind], label.key)


class Reading:
    """A `Fetch`. `run` is for a thread of the tier; all else for the engine thread."""

    def __init__(self, wanted: FetchRequest, link: Link, wake: Callable[[], None]) -> None:
        self._wanted = wanted
        self._link = link
        self._wake = wake
        self._arrived: list[Arrival] = []
        self._untaken = 0  # bytes
        self._changed = threading.Condition()
        self._bad: Label | None = None
        self._begun = self._over = self._stopped = self._full = False
        self._checked = 0  # objects
        self.there = 0
        self.unfetched: Unfetched | None = None
        self._seen, self._moved = (link.store.received, 0), link.clock()
        self._made = self._moved

    @property
    def over(self) -> bool:
        return self._over and not self._arrived

    @property
    def arrived(self) -> bool:
        return bool(self._arrived)

    @property
    def progress(self) -> float:
        """Anything that arrives from the store counts, because this one may wait for a thread, and objects are large.
        So does each object that is checked: on a busy machine that takes long. But nobody waits for a thread, or for a store
        that is steady and slow, longer than computing would take.
        """
        received = self._link.store.received, self._checked
        if self._full or (received != self._seen and not self._late):
            self._seen, self._moved = received, self._link.clock()
        return self._moved

    @property
    def _late(self) -> bool:
        """Whether computing would be done by now."""
        wanted = self._wanted
        seconds = len(wanted.blocks) * wanted.chain.block_size * wanted.prefill
        return wanted.prefill > 0 and self._link.clock() >= self._made + seconds

    def take(self) -> list[Arrival]:
        with self._changed:
            taken, self._arrived, self._untaken = self._arrived, [], 0
            self._changed.notify()
        return taken

    def stop(self, *, stalled: bool = False) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if not stalled or self._over:
            return
        if self._begun and self._late and self._link.store.received != self._seen[0]:
            self._skip_slow()
            return
        self.unfetched = "failed"
        if self._begun:
            self._link.failed("stalled", "no answer in time")

    # ── on its thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        self._begun = True
        with self._link.read_ahead.shared():
            self._read()

    def _read(self) -> None:
        try:
            keys = () if self._stopped else self._link.keys.of(self._wanted.owner)
            goal = self._goal() if keys else []
            if not (keys or self._stopped):  # none, or it was destroyed: what was sealed with it is replaced
                self._distrust(map(self._wanted.label, self._wanted.blocks))
            for batch in self._batches(goal):
                if self._stopped or not self._bring(batch, keys):
                    break
            if self._bad is not None:  # what follows may be bad too: all of it is replaced by what this server computes
                self._distrust(goal[goal.index(self._bad) :])
        except StoreError as error:
            self.unfetched = "failed"
            self._link.failed(error.reason, error)
        except Exception:
            self.unfetched = "failed"
            log.exception("an internal error while reading from the shared store")
        finally:
            self._over = True
            self._wake()

    def _distrust(self, labels: Iterable[Label]) -> None:
        """If these are in the store, they must be replaced, with the checkpoints after them."""
        for label in labels:
            for key in (label.key, checkpoint_id(label.key)):
                self._link.bad.add(key)
                self._link.stored.drop(key)

    def _goal(self) -> list[Label]:
        """The objects to fetch, in order; none if that is not worth it."""
        end, wanted = self._depth(), self._wanted
        first: list[Label] = []
        if wanted.stateful:
            end = self._last_state(end)
            first = [label for label in (wanted.label(end - 1, STATE),) if label.key not in wanted.here] if end else []
        goal = first + [label for label in map(wanted.label, range(wanted.blocks.start, end)) if label.key not in wanted.here]
        if goal:
            self.there = end * wanted.chain.block_size
        tokens = (end - wanted.blocks.start) * wanted.chain.block_size
        if goal and not self._pays(goal, tokens):
            self._skip_slow()
            return []
        return goal

    def _skip_slow(self) -> None:
        self.unfetched = "slow"
        self._link.counters["skipped_slow"] += 1

    def _depth(self) -> int:
        """The number of the first block that is neither here nor in the store.

        That others behind it are there shows that the store has lost it: children are stored after their parents.
        """
        wanted, at_once = self._wanted, self._link.store.at_once
        lacking = [label for label in map(wanted.label, wanted.blocks) if label.key not in wanted.here]
        there, end = 0, len(lacking)  # the first `there` of them are in the store, and that at `end` is not
        lost = False
        while there < end:
            step = 1 if at_once >= PROBE else -(-(end - there) // at_once)  # asking is slow: children follow their parents
            asked = range(there + step - 1, end, step)[:at_once]
            found = self._have([lacking[at] for at in asked])
            count = next((number for number, one in enumerate(found) if not one), len(found))
            if count < len(found):
                end = asked[count]
                lost = lost or (found[count] is False and True in found[count:])
            if count:
                there = asked[count - 1] + 1
        if end == len(lacking):
            return wanted.blocks.stop
        self._link.counters["missing"] += lost
        return lacking[end].start // wanted.chain.block_size

    def _last_state(self, end: int) -> int:
        """The end of the last of the first `end` blocks that has a checkpoint in the store; 0 if none has."""
        wanted = self._wanted
        at_once = min(PROBE, self._link.store.at_once)
        for stop in range(end, wanted.blocks.start, -at_once):
            blocks = range(max(wanted.blocks.start, stop - at_once), stop)
            there = self._have([wanted.label(block, STATE) for block in blocks])
            for block, found in reversed(list(zip(blocks, there, strict=True))):
                if found or wanted.label(block, STATE).key in wanted.here:
                    return block + 1
        return 0

    def _have(self, labels: Sequence[Label]) -> list[bool | None]:
        """Whether the objects are there; None for those that were missing a moment ago, which are not asked for again."""
        link = self._link
        ask = [label for label in labels if label.key not in link.missing]
        begun = link.clock()
        there = dict(zip((label.key for label in ask), link.store.have(list(map(link.name, ask))) if ask else (), strict=True))
        if ask:
            link.breaker.succeeded()
            link.pace.asked(link.clock() - begun)
        for key, found in there.items():
            (link.stored if found else link.missing).add(key)
        return [there.get(label.key) for label in labels]

    def _pays(self, rest: Sequence[Label], tokens: int) -> bool:
        """Whether fetching `rest`, which saves `tokens` tokens, takes less time than computing them."""
        wanted = self._wanted
        limit = tokens * (wanted.prefill - wanted.restore)
        return not wanted.prefill or self._link.pace.pays(sum(map(self._size, rest)), limit)

    def _size(self, label: Label) -> int:
        return self._wanted.state_bytes if label.kind == STATE else self._wanted.kv_bytes

    def _batches(self, goal: Sequence[Label]) -> Iterator[Sequence[Label]]:
        at = 0
        while at < len(goal):
            rest = goal[at:]
            tokens = sum(len(label.tokens) for label in rest if label.kind == KV)
            if at and tokens and not self._pays(rest, tokens):
                self._skip_slow()
                return
            most, count, size = min(BATCH_SECONDS * self._link.pace.bandwidth, self._link.read_ahead.each), 0, 0
            while count < min(len(rest), BATCH) and (not count or size + self._size(rest[count]) <= most):
                size += self._size(rest[count])
                count += 1
            yield rest[:count]
            at += count

    def _bring(self, labels: Sequence[Label], keys: Sequence[SealKey]) -> bool:
        """Fetches and checks some objects. False if one of them is missing or bad, or nobody waits any more."""
        self._wait_for_room()
        if self._stopped:
            return False
        link, begun = self._link, self._link.clock()
        wanted = [(link.name(label), link.buffers.take(self._size(label))) for label in labels]
        found = link.store.get_into([(name, out.data) for name, out in wanted], PAYLOAD)
        link.breaker.succeeded()
        size, good = 0, True
        for label, (name, out), placed in zip(labels, wanted, found, strict=True):
            arrival = None if placed is None else self._opened(label, name, placed, out, keys)
            if arrival is None:
                self._bad = None if placed is None else label
                link.counters["missing"] += placed is None
                link.missing.add(label.key)
                link.stored.drop(label.key)
                good = False
                break
            size += len(arrival.payload)
            link.stored.add(label.key)
            link.counters["fetched"] += 1
            link.counters["fetched_bytes"] += len(arrival.payload)
            with self._changed:
                self._arrived.append(arrival)
                self._untaken += len(arrival.payload)
        link.pace.got(link.clock() - begun, size)
        self._wake()
        return good

    def _wait_for_room(self) -> None:
        """Waits until the engine thread has taken what has arrived, if that is much."""
        with self._changed:
            self._full = True
            self._changed.wait_for(lambda: self._untaken < self._link.read_ahead.each or self._stopped)
            self._full = False

    def _opened(self, wanted: Label, name: str, placed: Placed, out: Bytes, keys: Sequence[SealKey]) -> Arrival | None:
        """The entry in a sealed object; None if it must not be used."""
        try:
            found = open_placed(name, placed, wanted, out, keys)
            self._checked += 1
        except SealError as error:
            self._link.counters[f"fault_{error.reason}"] += 1
            return None
        if found.writer in self._link.distrusted:
            self._link.counters["fault_distrusted"] += 1
            return None
        return Arrival(found.label, out[: found.size], found.writer, self._link.buffers.giver(out))
