"""Shared store: what the servers of a history share behind a network. It fails, loses and changes objects, as a seed says.

The production code of the shared tier runs unchanged above it. The clients of real stores do not: they are tested with those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.testing.simulation.faults import Faults
from headstart.testing.simulation.kernel import World, world
from headstart.tiers.shared.keys import KEY, FleetKeys
from headstart.tiers.shared.store import MOST, TIMEOUT, Blob, SharedStore, Stored, StoreError

LATENCY = 1e-3
"""Most virtual seconds of a call."""
LATE = 1 / 20
"""As in S3: the part of its life after which an object is not stored any more."""
DOWN = 4.0
"""Most virtual seconds for which nobody answers."""
FLEET = FleetKeys(bytes(KEY), (bytes(range(KEY)),))
"""The keys of all servers."""


@dataclass(slots=True)
class StoreObject:
    """An object in the store. Times are virtual seconds.

    Attributes:
        since: when it was put.
        ends: when it goes by itself.
        used: when it was put, read or touched last.
        spoiled: whether a fault has changed it.
    """

    data: bytes
    since: float
    ends: float
    used: float
    spoiled: bool = False


class StoreSite:
    """The store itself, which outlives the servers.

    Args:
        scheme: as in addresses.
        most: objects that it has room for. It evicts those that were not used for the longest time.
    """

    def __init__(self, scheme: str, most: int, faults: Faults, here: World) -> None:
        self.scheme = scheme
        self.faults = faults
        self.down = -math.inf
        self._most = most
        self._here = here
        self._objects: dict[str, StoreObject] = {}
        self._written: dict[str, dict[str, float]] = {}  # when each process has put each object last

    def objects(self) -> dict[str, StoreObject]:
        """What is there."""
        for name in [name for name, kept in self._objects.items() if kept.ends <= self._here.now]:
            del self._objects[name]
        return self._objects

    def keep(self, name: str, data: bytes, life: float) -> None:
        now, objects, task = self._here.now, self.objects(), self._here.task
        objects[name] = StoreObject(data, now, now + life, now)
        if task is not None:
            self._written.setdefault(name, {})[task.process.name] = now
        while len(objects) > self._most:
            del objects[min(objects, key=lambda one: (objects[one].used, one))]

    def rewritten(self, name: str, since: float, by: str) -> bool:
        """Whether another server than that of the process `by` has put an object since a time. Processes are numbered."""
        written = self._written.get(name, {}).items()
        return any(at >= since for process, at in written if process.split()[0] != by.split()[0])

    def read(self, name: str) -> StoreObject | None:
        found = self.objects().get(name)
        if found is not None:
            found.used = self._here.now
        return found


class SimulatedStore(SharedStore):
    """The store as one server sees it."""

    def __init__(self, site: StoreSite) -> None:
        self.url = f"{site.scheme}://simulated"
        self.expires = site.scheme == "valkey"
        self.received = 0
        self.at_once = 128 if self.expires else 4
        self._site = site
        self._closed = False

    def _call(self, call: str, names: Sequence[str] = ()) -> str | None:
        """Takes time, and fails if it must. Returns a fault that the caller carries out."""
        site, here, counts = self._site, world(), self._site.faults.counts
        here.say(f"shared {call} of {len(names)}")
        here.pause(LATENCY)
        if self._closed:
            raise StoreError("closed", "the store was closed")
        if here.now < site.down:
            raise StoreError("refused", "nobody answers")
        kind = site.faults.take(f"shared {call}")
        if kind in ("store_refused", "store_down", "store_restarted", "store_hung", "store_slow", "store_full"):
            counts[kind] += 1
        match kind:
            case "store_refused":
                raise StoreError("refused", "nobody answers")
            case "store_down":
                site.down = here.now + DOWN * here.dice.random()
                raise StoreError("refused", "nobody answers")
            case "store_restarted":
                site.objects().clear()
                raise StoreError("refused", "nobody answers")
            case "store_hung":
                self._time_out()
            case "store_slow":
                here.sleep(TIMEOUT * here.dice.random())
            case "store_full":
                raise StoreError("full", "no room")
            case "store_evicted":
                objects = site.objects()
                gone = [name for name in names if name in objects and here.dice.random() < 0.5]
                counts[kind] += bool(gone)
                for name in gone:
                    del objects[name]
        self.received += 1
        return kind

    def _time_out(self) -> None:
        world().sleep(TIMEOUT)
        raise StoreError("closed" if self._closed else "timeout", "no answer in time")

    def _unanswered(self, kind: str | None) -> None:
        """A call is carried out, and nobody hears of it."""
        if kind == "store_unanswered":
            self._site.faults.counts[kind] += 1
            self._time_out()

    def _spoil(self, kind: str, kept: StoreObject) -> None:
        """Changes an object for good."""
        dice, data = world().dice, kept.data
        if kind == "store_rot":
            at = dice.randrange(len(data))
            kept.data = data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
        elif kind == "store_cut":
            kept.data = data[: dice.randrange(len(data))]
        else:
            others = [one for _, one in sorted(self._site.objects().items()) if one.data != data]
            if not others:
                return
            kept.data = dice.choice(others).data
        kept.spoiled = True
        self._site.faults.counts[kind] += 1

    # ── the contract ─────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, names: Sequence[str], most: int = MOST) -> list[Blob | None]:
        kind = self._call("get", names)
        found = [self._site.read(name) for name in names]
        there = [one for one in found if one is not None and one.data]
        if kind in ("store_rot", "store_cut", "store_swapped") and there:
            self._spoil(kind, world().dice.choice(there))
        if kind == "store_half" and there:
            self._site.faults.counts[kind] += 1
            self.received += len(there) // 2
            self._time_out()
        self.received += len(there)
        return [None if one is None else np.frombuffer(bytearray(one.data[:most]), np.uint8).data for one in found]

    def have(self, names: Sequence[str]) -> list[bool]:
        found = [name in self._site.objects() for name in names]
        self._call("have", names)  # what is evicted is evicted after it was found
        return found

    def put(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        return self._put(name, data, age, life, new=False)

    def put_new(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        return self._put(name, data, age, life, new=True)

    def _put(self, name: str, data: Blob, age: float, life: float, *, new: bool) -> bool:
        kind = self._call("put", [name])
        if not self.expires:
            if age > (age + life) * LATE:
                return False
            life = math.inf
        if life <= 0 or (new and name in self._site.objects()):
            return False
        if kind == "store_lost":
            self._site.faults.counts[kind] += 1
            return True
        self._site.keep(name, bytes(data), life)
        self._unanswered(kind)
        return True

    def touch(self, names: Sequence[str]) -> None:
        kind = self._call("touch", names)
        for name in names:
            self._site.read(name)
        self._unanswered(kind)

    def limit(self, lives: Sequence[tuple[str, float]]) -> None:
        kind, objects, now = self._call("limit", [name for name, _ in lives]), self._site.objects(), world().now
        for name, life in lives if self.expires else ():
            if name in objects:
                objects[name].ends = min(objects[name].ends, now + life)
        self._unanswered(kind)

    def delete(self, names: Sequence[str]) -> None:
        kind = self._call("delete", names)
        for name in names:
            self._site.objects().pop(name, None)
        self._unanswered(kind)

    def objects(self, prefix: str = "") -> Iterator[Stored]:
        self._call("list")
        now = world().now
        for name, kept in sorted(self._site.objects().items()):
            if name.startswith(prefix):
                yield Stored(name, len(kept.data), now - kept.since)

    def clean(self, prefix: str = "") -> None:
        return  # writes leave nothing behind

    def warnings(self, term: float = math.inf) -> list[str]:
        return []

    def close(self) -> None:
        self._closed = True


def simulated_store(url: str) -> SharedStore:
    """Stands for `open_store`."""
    site = world().store
    assert isinstance(site, StoreSite)
    return SimulatedStore(site)


def simulated_keys(path: object) -> FleetKeys:
    """Stands for `fleet_keys`."""
    return FLEET
