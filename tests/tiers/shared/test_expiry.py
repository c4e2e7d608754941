from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headstart.prefix_cache.expiry import LOOKS
from headstart.tiers.shared.expiry import OwnerContents, contents, erase, shorten, sweep
from headstart.tiers.shared.folder import FolderStore
from headstart.tiers.shared.names import ObjectNames, parse
from headstart.tiers.shared.store import SharedStore
from stores import ValkeyServer
from tiers_shared import OTHER, OWNER

NAMES = ObjectNames(b"n" * 32)
DAY = 86_400.0
BLOB = np.zeros(100, np.uint8).data


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedStore]:
    store = FolderStore(tmp_path, 10.0)
    yield store
    store.close()


def fill(store: SharedStore) -> None:
    for day in range(10):
        store.put(NAMES.of(OWNER, "kv", bytes([day])), BLOB, age=day * DAY)
        store.put(NAMES.of(OTHER, "state", bytes([day])), BLOB, age=day * DAY)
    store.put(NAMES.of(OWNER, "key", b""), BLOB, age=99 * DAY)


def short(owner: bytes) -> str:
    return NAMES.prefix(owner).split("/")[1]


def test_contents_are_counted_by_owner(store: SharedStore) -> None:
    assert contents(store) == []
    fill(store)
    found = contents(store)
    assert [(one.owner, one.objects, one.size) for one in found] == [(short(OWNER), 11, 1100), (short(OTHER), 10, 1000)]
    assert found[1].oldest == pytest.approx(9 * DAY, abs=60)


def test_the_age_of_an_object_counts_from_its_first_write(store: SharedStore) -> None:
    fill(store)
    store.touch([stored.name for stored in store.objects()])
    removed = sweep(store, lambda owner: 5 * DAY if owner == short(OWNER) else math.inf)
    assert removed == sum(day > 5 * (1 - 2 / LOOKS) for day in range(10)) == 5
    left = [name for stored in store.objects() if (name := parse(stored.name))]
    assert sum(name.owner == short(OTHER) for name in left) == 10
    assert sum(name.kind == "key" for name in left) == 1  # a key is as old as its owner, and is not text
    assert sweep(store, lambda _: math.inf) == 0


def test_one_owner_is_erased_and_nobody_else(store: SharedStore) -> None:
    fill(store)
    assert erase(store, NAMES.prefix(OWNER)) == 11
    assert [(one.owner, one.objects) for one in contents(store)] == [(short(OTHER), 10)]
    assert erase(store) == 10
    assert contents(store) == []


def test_parts_of_objects_are_erased_with_their_owner(store: SharedStore, tmp_path: Path) -> None:
    """Fault: a server that was killed while it wrote left a file, which `fleet rm` did not see."""
    fill(store)
    left = [tmp_path / NAMES.prefix(owner) / "kv" / "ab" / ".tmp-dead-0" for owner in (OWNER, OTHER)]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half of an object")
    assert erase(store, NAMES.prefix(OWNER)) == 11
    assert [path.exists() for path in left] == [False, True]
    assert len(list(store.objects())) == 10
    erase(store)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_valkey_expires_by_itself(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    store = server.store()
    store.put(NAMES.of(OWNER, "kv", b"1"), BLOB, age=DAY, life=0.1)
    store.put(NAMES.of(OWNER, "kv", b"2"), BLOB)
    assert store.expires
    time.sleep(0.15)
    assert contents(store) == [OwnerContents(short(OWNER), 1, 100, None)]
    assert sweep(store, lambda _: 0.0) == 0
    assert len(list(store.objects())) == 1
    assert erase(store, NAMES.prefix(OWNER)) == 1
    store.close()
    server.kill()


def test_what_valkey_has_already_gets_a_new_term(tmp_path: Path) -> None:
    """Fault: what was stored before a term was set stayed for ever."""
    server = ValkeyServer(tmp_path)
    store = server.store()
    names = [NAMES.of(owner, kind, b"1") for owner in (OWNER, OTHER) for kind in ("kv", "state", "note", "key")]  # type: ignore[arg-type]
    for name in names:
        store.put(name, BLOB)
    assert list(shorten(store, lambda owner: 60.0 if owner == short(OWNER) else math.inf)) == []
    left = [store._client.pttl(name) for name in names]
    assert all(0 < life <= 60_000 for life in left[:3])
    assert left[3:] == [-1] * 5, "a data key, and another owner"
    store.close()
    server.kill()
