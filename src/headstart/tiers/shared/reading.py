"""Reading: fetches what one prompt could use, on a thread of its own.

    which of its objects are there → is fetching them worth it → fetch in batches → check each → hand over

It ends at the first object that is missing or bad, because children are of no use without their parents; when the rest would
take longer to fetch than to compute; and when nobody waits any more. In models with state the checkpoint is fetched first:
without it the KV before it is of no use.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.interfaces.tier import KV, STATE
from headstart.tiers.disk import Label
from headstart.tiers.shared.breaker import Breaker
from headstart.tiers.shared.envelope import SealError, open_sealed
from headstart.tiers.shared.keys import OwnerKeys, SealKey
from headstart.tiers.shared.names import KIND_OF
from headstart.tiers.shared.pace import StorePace
from headstart.tiers.shared.recent import Recent
from headstart.tiers.shared.store import Blob, SharedStore, StoreError
from headstart.tiers.shared_tier import Arrival, FetchRequest

log = logging.getLogger("headstart.shared")

PROBE = 128
"""Objects whose presence is asked for in one call."""
BATCH_SECONDS = 0.05
"""Expected seconds of one batch. So a slow store shows progress, and stopping does not wait for long."""
BATCH = 64
"""Most objects of a batch."""


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

    def failed(self, reason: str, why: object) -> None:
        """The store has failed. It is left alone for a while if it fails again and again."""
        before = self.breaker.opened
        self.counters[f"fault_{reason}"] += 1
        self.breaker.failed(self.clock())
        if self.breaker.opened > before:
            log.warning("the shared store fails, serving goes on without it: %s", why)

    def name(self, label: Label) -> str:
        return self.keys.names.of(label.owner, KIND_OF[label.kind], label.key)


class Reading:
    """A `Fetch`. `run` is for a thread of the tier; all else for the engine thread."""

    def __init__(self, wanted: FetchRequest, link: Link, wake: Callable[[], None]) -> None:
        self.progress = link.clock()
        self._wanted = wanted
        self._link = link
        self._wake = wake
        self._arrived: list[Arrival] = []
        self._lock = threading.Lock()
        self._bad: Label | None = None
        self._over = self._stopped = False

    @property
    def over(self) -> bool:
        return self._over and not self._arrived

    def take(self) -> list[Arrival]:
        with self._lock:
            taken, self._arrived = self._arrived, []
        return taken

    def stop(self, *, stalled: bool = False) -> None:
        self._stopped = True
        if stalled and not self._over:
            self._link.failed("stalled", "no answer in time")

    # ── on its thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        try:
            keys = self._link.keys.of(self._wanted.owner)
            goal = self._goal() if keys else []
            for batch in self._batches(goal):
                if self._stopped or not self._bring(batch, keys):
                    break
            if self._bad is not None:  # what follows may be bad too: all of it is replaced by what this server computes
                for label in goal[goal.index(self._bad) :]:
                    self._link.bad.add(label.key)
                    self._link.stored.drop(label.key)
        except StoreError as error:
            self._link.failed(error.reason, error)
        except Exception:
            log.exception("an internal error while reading from the shared store")
        else:
            self._link.breaker.succeeded()
        finally:
            self._over = True
            self._wake()

    def _goal(self) -> list[Label]:
        """The objects to fetch, in order; none if that is not worth it."""
        end, wanted = self._depth(), self._wanted
        first: list[Label] = []
        if wanted.stateful:
            end = self._last_state(end)
            first = [label for label in (wanted.label(end - 1, STATE),) if label.key not in wanted.here] if end else []
        goal = first + [label for label in map(wanted.label, range(wanted.blocks.start, end)) if label.key not in wanted.here]
        tokens = (end - wanted.blocks.start) * wanted.chain.block_size
        if goal and not self._pays(goal, tokens):
            self._link.counters["skipped_slow"] += 1
            return []
        return goal

    def _depth(self) -> int:
        """The number of the first block that is neither here nor in the store."""
        wanted = self._wanted
        for start in range(wanted.blocks.start, wanted.blocks.stop, PROBE):
            labels = [wanted.label(block) for block in range(start, min(start + PROBE, wanted.blocks.stop))]
            there = iter(self._have([label for label in labels if label.key not in wanted.here]))
            for number, label in enumerate(labels, start):
                if label.key not in wanted.here and not next(there):
                    return number
        return wanted.blocks.stop

    def _last_state(self, end: int) -> int:
        """The end of the last of the first `end` blocks that has a checkpoint in the store; 0 if none has."""
        wanted = self._wanted
        for stop in range(end, wanted.blocks.start, -PROBE):
            blocks = range(max(wanted.blocks.start, stop - PROBE), stop)
            there = self._have([wanted.label(block, STATE) for block in blocks])
            for block, found in reversed(list(zip(blocks, there, strict=True))):
                if found or wanted.label(block, STATE).key in wanted.here:
                    return block + 1
        return 0

    def _have(self, labels: Sequence[Label]) -> list[bool]:
        link = self._link
        ask = [label for label in labels if label.key not in link.missing]
        begun = link.clock()
        there = dict(zip((label.key for label in ask), link.store.have(list(map(link.name, ask))) if ask else (), strict=True))
        if ask:
            self.progress = link.clock()
            link.pace.asked(self.progress - begun)
        for key, found in there.items():
            (link.stored if found else link.missing).add(key)
        return [there.get(label.key, False) for label in labels]

    def _pays(self, rest: Sequence[Label], tokens: int) -> bool:
        """Whether fetching `rest`, which saves `tokens` tokens, takes less time than computing them."""
        wanted = self._wanted
        seconds = self._link.pace.seconds(sum(map(self._size, rest))) + tokens * wanted.restore
        return not wanted.prefill or seconds < tokens * wanted.prefill

    def _size(self, label: Label) -> int:
        return self._wanted.state_bytes if label.kind == STATE else self._wanted.kv_bytes

    def _batches(self, goal: Sequence[Label]) -> Iterator[Sequence[Label]]:
        at = 0
        while at < len(goal):
            rest = goal[at:]
            tokens = sum(len(label.tokens) for label in rest if label.kind == KV)
            if at and tokens and not self._pays(rest, tokens):
                self._link.counters["skipped_slow"] += 1
                return
            most, count, size = BATCH_SECONDS * self._link.pace.bandwidth, 0, 0
            while count < min(len(rest), BATCH) and (not count or size + self._size(rest[count]) <= most):
                size += self._size(rest[count])
                count += 1
            yield rest[:count]
            at += count

    def _bring(self, labels: Sequence[Label], keys: Sequence[SealKey]) -> bool:
        """Fetches and checks some objects. False if one of them is missing or bad."""
        link, begun = self._link, self._link.clock()
        names = list(map(link.name, labels))
        blobs = link.store.get(names)
        size, good = 0, True
        for label, name, blob in zip(labels, names, blobs, strict=True):
            arrival = None if blob is None else self._opened(label, name, blob, keys)
            if arrival is None:
                self._bad = None if blob is None else label
                link.counters["missing"] += blob is None
                link.missing.add(label.key)
                link.stored.drop(label.key)
                good = False
                break
            size += len(arrival.payload)
            link.stored.add(label.key)
            link.counters["fetched"] += 1
            link.counters["fetched_bytes"] += len(arrival.payload)
            with self._lock:
                self._arrived.append(arrival)
        self.progress = link.clock()
        link.pace.got(self.progress - begun, size)
        self._wake()
        return good

    def _opened(self, wanted: Label, name: str, blob: Blob, keys: Sequence[SealKey]) -> Arrival | None:
        """The entry in a sealed object; None if it must not be used."""
        out = np.empty(self._size(wanted), np.uint8)
        try:
            found = open_sealed(name, blob, wanted, out, keys)
        except SealError as error:
            self._link.counters[f"fault_{error.reason}"] += 1
            return None
        if found.writer in self._link.distrusted:
            self._link.counters["fault_distrusted"] += 1
            return None
        return Arrival(found.label, out[: found.size], found.writer)

