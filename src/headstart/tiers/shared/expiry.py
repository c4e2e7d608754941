"""What is in a store, by owner; deleting what belongs to one owner, and what is too old (`--shared-expire`).

The age of an object counts from when its text was first stored, as on disk. Valkey deletes objects itself when their life ends,
and needs `shorten` when a term is new. Other stores need `sweep`, `LOOKS` times a term. Names say which owner an object belongs
to, so nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headstart.prefix_cache.expiry import LOOKS
from headstart.tiers.shared.names import VERSION, parse
from headstart.tiers.shared.store import SharedStore, Stored

_BATCH = 500


@dataclass(frozen=True, slots=True)
class OwnerContents:
    """What a store holds of one owner.

    Attributes:
        owner: as in names, as hexadecimal digits.
        size: bytes.
        oldest: seconds since the first of its texts was stored; None if the store does not know.
    """

    owner: str
    objects: int
    size: int
    oldest: float | None


def contents(store: SharedStore) -> list[OwnerContents]:
    """What a store holds, by owner; the largest first. Raises StoreError."""
    found: dict[str, OwnerContents] = {}
    for stored in store.objects(f"{VERSION}/"):
        if name := parse(stored.name):
            before = found.get(name.owner, OwnerContents(name.owner, 0, 0, None))
            ages = [age for age in (before.oldest, stored.age) if age is not None]
            oldest = max(ages) if ages else None
            found[name.owner] = OwnerContents(name.owner, before.objects + 1, before.size + stored.size, oldest)
    return sorted(found.values(), key=lambda one: (-one.size, one.owner))


def erase(store: SharedStore, prefix: str = f"{VERSION}/") -> int:
    """Deletes all objects whose names begin with `prefix` (`ObjectNames.prefix`). Returns how many.

    Data keys go first: then nobody can read the others. They go once more at the end, because a server may just have wrapped
    one anew. What is left of interrupted writes may be parts of the objects. Raises StoreError; another call deletes what is
    then left.
    """
    going = list(store.objects(prefix))
    keys = [stored for stored in going if _is_key(stored)]
    count = _delete(store, iter(keys)) + _delete(store, (stored for stored in going if not _is_key(stored)))
    store.clean(prefix)
    _delete(store, iter(keys))
    return count


def sweep(store: SharedStore, term: Callable[[str], float]) -> int:
    """Deletes expired objects, and those that would expire before the sweep after the next one. Returns how many.

    Args:
        term: seconds for which objects of an owner (as in names) may be kept; infinity for ever.

    Raises StoreError; the next call goes on.
    """
    if store.expires:
        return 0

    def old(stored: Stored) -> bool:
        name = parse(stored.name)
        if name is None or name.kind == "key" or stored.age is None:
            return False
        seconds = term(name.owner)
        return seconds < math.inf and stored.age > seconds * (1 - 2 / LOOKS)

    return _delete(store, filter(old, store.objects(f"{VERSION}/")))


def shorten(store: SharedStore, term: Callable[[str], float]) -> Iterator[None]:
    """Gives what is in a store that deletes by itself no more than its term from now: it may be older than the term.

    It does so in pieces: whoever has other work too does it between them. Raises StoreError; another call begins anew.
    """
    lives = list[tuple[str, float]]()
    for stored in store.objects(f"{VERSION}/") if store.expires else ():
        if (name := parse(stored.name)) is not None and name.kind != "key":
            lives.append((stored.name, term(name.owner)))
        if len(lives) == _BATCH:
            store.limit(lives)
            lives = []
            yield
    if lives:
        store.limit(lives)


def _is_key(stored: Stored) -> bool:
    name = parse(stored.name)
    return name is not None and name.kind == "key"


def _delete(store: SharedStore, all: Iterator[Stored]) -> int:
    count, batch = 0, list[str]()
    for stored in all:
        batch.append(stored.name)
        if len(batch) == _BATCH:
            store.delete(batch)
            count, batch = count + len(batch), []
    store.delete(batch)
    return count + len(batch)
