"""Data keys in a real Valkey: made once by many servers, rotated, destroyed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import Label
from headstart.tiers.shared.data_keys import DataKeys
from headstart.tiers.shared.envelope import SealError, open_sealed, seal
from headstart.tiers.shared.expiry import erase
from headstart.tiers.shared.keys import FleetKeys
from headstart.tiers.shared.store import Blob, SharedStore, StoreError
from stores import ValkeyServer
from tiers_shared import OTHER, OWNER


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()


@pytest.fixture
def store(server: ValkeyServer) -> Iterator[SharedStore]:
    store = server.store(timeout=10.0)
    yield store
    erase(store, "")
    store.close()


def sealed(keys: DataKeys, label: Label, payload: Bytes) -> tuple[str, Blob]:
    name = keys.names.of(label.owner, "kv", label.key)
    return name, seal(name, label, payload, keys.newest(label.owner), b"server 1")


def opens(keys: DataKeys, name: str, blob: Blob, label: Label, payload: Bytes) -> bool:
    out = np.zeros_like(payload)
    with contextlib.suppress(SealError):
        open_sealed(name, blob, label, out, keys.of(label.owner))
    return bool((out == payload).all())


def test_servers_agree_on_one_key_an_owner(store: SharedStore) -> None:
    fleet = FleetKeys.generate()
    servers = [DataKeys(store, fleet) for _ in range(6)]
    assert list(servers[0].of(OWNER)) == []
    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda keys: keys.newest(OWNER), servers))
    assert len(found) == 1
    assert servers[0].newest(OTHER) not in found
    (stored,) = (one for one in store.objects() if one.name.startswith(servers[0].names.prefix(OWNER)))
    secret = found.pop().secret
    assert secret not in bytes(store.get([stored.name])[0] or b"")


def test_a_destroyed_key_ends_the_data_wherever_copies_are(store: SharedStore, label: Label, payload: Bytes) -> None:
    fleet = FleetKeys.generate()
    first, second = DataKeys(store, fleet), DataKeys(store, fleet)
    name, blob = sealed(first, label, payload)
    kept = store.get([name, first._name(OWNER)])  # what a backup without the key object would have
    assert kept[0] is None
    assert opens(second, name, blob, label, payload)
    first.destroy(OWNER)
    assert not opens(first, name, blob, label, payload)
    assert opens(second, name, blob, label, payload)  # until it asks again
    second.refresh()
    assert not opens(second, name, blob, label, payload)
    assert not opens(DataKeys(store, fleet), name, blob, label, payload)
    again = sealed(second, label, payload)  # the owner goes on, with a new key
    assert opens(DataKeys(store, fleet), *again, label, payload)
    assert not opens(second, name, blob, label, payload)


def test_keys_survive_rotations_if_servers_run_between_them(store: SharedStore, label: Label, payload: Bytes) -> None:
    fleet = FleetKeys.generate()
    name, blob = sealed(DataKeys(store, fleet), label, payload)
    for _ in range(3):
        fleet = fleet.rotated()
        keys = DataKeys(store, fleet)
        assert opens(keys, name, blob, label, payload)
        keys.refresh()  # wraps the key by the newest fleet key
    assert opens(DataKeys(store, fleet), name, blob, label, payload)


def test_a_server_with_an_old_key_file_reads_nothing_and_destroys_nothing(
    store: SharedStore, label: Label, payload: Bytes
) -> None:
    fleet = FleetKeys.generate()
    name, blob = sealed(keys := DataKeys(store, fleet), label, payload)
    stranger = DataKeys(store, FleetKeys(fleet.name_key, (b"x" * 32,)))
    assert not opens(stranger, name, blob, label, payload)
    with pytest.raises(StoreError, match="same key file"):
        stranger.newest(OWNER)
    keys.refresh()
    assert opens(keys, name, blob, label, payload)


def test_a_dead_store_is_an_error_and_known_keys_stay(server: ValkeyServer, label: Label, payload: Bytes) -> None:
    store = server.store(timeout=0.25)
    keys = DataKeys(store, FleetKeys.generate())
    name, blob = sealed(keys, label, payload)
    server.hang()
    for call in (keys.refresh, lambda: keys.of(OTHER), lambda: keys.newest(OTHER)):
        with pytest.raises(StoreError):
            call()
    assert opens(keys, name, blob, label, payload)
    server.go_on()
    store.close()
