"""The contract of shared stores, on each real one: Valkey, a folder, and (slow) S3."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headstart.tiers.shared.address import open_store
from headstart.tiers.shared.names import ObjectNames
from headstart.tiers.shared.store import BEHIND, Blob, SharedStore, StoreError
from stores import S3_ENVIRONMENT, SeaweedServer, ValkeyServer

NAMES = ObjectNames(b"n" * 32)
KINDS = ["valkey", "folder", pytest.param("s3", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("store")
    if request.param == "folder":
        yield folder.as_uri()
        return
    server = ValkeyServer(folder) if request.param == "valkey" else SeaweedServer(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in S3_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield server.url if isinstance(server, ValkeyServer) else server.url()
    server.kill()


@pytest.fixture
def store(url: str) -> Iterator[SharedStore]:
    store = open_store(url, 10.0, {})
    yield store
    store.delete([stored.name for stored in store.objects()])
    store.close()


def blob(size: int, seed: int = 0) -> Blob:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).data


def name(number: int, owner: bytes = b"owner") -> str:
    return NAMES.of(owner, "kv", number.to_bytes(32, "little"))


def test_what_was_put_is_there_in_order(store: SharedStore) -> None:
    values = [blob(size, size) for size in (0, 1, 70_000, 3_000_000)]
    for number, value in enumerate(values):
        assert store.put(name(number), value)
    asked = [name(3), name(77), name(0), name(2), name(1), name(3)]
    found = store.get(asked)
    assert found[1] is None
    assert [one is not None and bytes(one) for one in found if one is not None] == [
        bytes(values[number]) for number in (3, 0, 2, 1, 3)
    ]
    assert store.have(asked) == [True, False, True, True, True, True]
    assert store.get([]) == []
    assert store.have([]) == []


def test_the_middle_of_an_object_goes_where_it_is_wanted(store: SharedStore) -> None:
    sizes = [0, 30, 64, 100, 164, 165, 70_000, 3_000_000]
    for number, size in enumerate(sizes):
        store.put(name(number), blob(size, number))
    for space in (1, 100, 69_900, 2_999_000):
        outs = [np.zeros(space, np.uint8) for _ in range(len(sizes) + 1)]
        asked = [(name(number), out.data) for number, out in enumerate(outs)]
        found = store.get_into(asked, 64)
        assert found.pop() is None
        for number, (placed, out, size) in enumerate(zip(found, outs, sizes, strict=False)):
            assert placed is not None
            whole = bytes(blob(size, number))
            if size <= 64 + space:
                assert (bytes(placed.head), bytes(placed.tail)) == (whole, b"")
            else:
                assert bytes(placed.head) + bytes(out.data) + bytes(placed.tail) == whole[: 64 + space + BEHIND]
                assert len(placed.head) == 64
    assert store.get_into([], 64) == []
    assert store.get([name(6)]) == [blob(70_000, 6)]


def test_an_object_that_is_larger_than_it_may_be_is_cut(store: SharedStore) -> None:
    """Fault: whoever can write to the store fills the memory of those who read."""
    store.put(name(1), blob(3 * BEHIND))
    store.put(name(2), blob(100))
    out = np.zeros(50, np.uint8)
    found = store.get_into([(name(1), out.data), (name(2), np.zeros(10, np.uint8).data)], 64)
    assert found[0] is not None
    assert found[1] is not None
    whole = bytes(blob(3 * BEHIND))
    assert bytes(found[0].head) + bytes(out.data) + bytes(found[0].tail) == whole[: 64 + 50 + BEHIND]
    assert len(found[1].head) + 10 + len(found[1].tail) == 100
    assert store.get([name(2)]) == [blob(100)], "the connection is where it should be"


def test_the_last_of_two_writers_wins_and_put_new_leaves_what_is_there(store: SharedStore) -> None:
    assert store.put_new(name(1), blob(100, 1))
    assert not store.put_new(name(1), blob(100, 2))
    assert store.get([name(1)]) == [blob(100, 1)]
    assert store.put(name(1), blob(100, 3))
    assert store.get([name(1)]) == [blob(100, 3)]


def test_one_of_many_writers_of_a_new_name_is_told_that_it_wrote(store: SharedStore) -> None:
    values = [blob(50_000, seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        wrote = list(pool.map(lambda value: store.put_new(name(9), value), values))
    assert wrote.count(True) == 1
    assert store.get([name(9)]) == [values[wrote.index(True)]]


def test_readers_see_objects_whole_while_writers_replace_them(store: SharedStore) -> None:
    values = [blob(400_000, seed) for seed in range(2)]
    store.put(name(5), values[0])
    going = threading.Event()

    def write() -> None:
        for turn in range(20):
            store.put(name(5), values[turn % 2])
        going.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = [store.get([name(5)])[0]]
    while not going.is_set():
        seen += store.get([name(5)])
    writer.join()
    whole = {bytes(value) for value in values}
    assert all(one is not None and bytes(one) in whole for one in seen)


def test_objects_of_an_owner_are_listed_and_deleted(store: SharedStore) -> None:
    ours = {name(number, b"ours") for number in range(3)}
    for one in [*ours, name(1, b"theirs")]:
        store.put(one, blob(1000))
    listed = list(store.objects(NAMES.prefix(b"ours")))
    assert {stored.name for stored in listed} == ours
    assert {stored.size for stored in listed} == {1000}
    assert all(stored.age is None or stored.age < 3600 for stored in listed)
    assert len(list(store.objects())) == 4
    store.delete([*ours, name(99)])
    assert [stored.name for stored in store.objects()] == [name(1, b"theirs")]


def test_many_objects_are_asked_for_at_once(store: SharedStore) -> None:
    for number in range(40):
        store.put(name(number), blob(5000, number))
    assert store.get([name(number) for number in range(45)]) == [*(blob(5000, number) for number in range(40)), *[None] * 5]
    store.touch([name(number) for number in range(45)])


def test_warnings_are_sentences(store: SharedStore) -> None:
    assert all(one.endswith(".") and one[0].isupper() for one in store.warnings(math.inf) + store.warnings(60.0))
    assert store.warnings(math.inf)


def test_a_closed_store_says_so(url: str) -> None:
    store = open_store(url, 10.0, {})
    store.close()
    with pytest.raises(StoreError) as caught:
        store.get([name(1)])
    assert caught.value.reason == "closed"


def test_a_folder_is_found_again_by_a_path_with_special_characters(tmp_path: Path) -> None:
    (folder := tmp_path / "a b%ä").mkdir()
    store = open_store(folder.as_uri())
    store.put(name(1), blob(10))
    assert open_store(store.url).get([name(1)]) == [blob(10)]
