"""S3 in trouble, with a real server: killed, hanging, wrong keys, no bucket. All slow, but for what needs no server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from headstart.tiers.shared.address import open_store
from headstart.tiers.shared.names import ObjectNames
from headstart.tiers.shared.store import StoreError
from stores import HOST, S3_ENVIRONMENT, SeaweedServer, free_port

NAMES = ObjectNames(b"n" * 32)
BLOB = np.arange(250, dtype=np.uint8).data
DAY = 86_400.0


def name(number: int) -> str:
    return NAMES.of(b"owner", "kv", bytes([number]))


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


def reason(call: Callable[[], object]) -> str:
    with pytest.raises(StoreError) as caught:
        call()
    assert "of-headstart" not in str(caught.value)
    return caught.value.reason


def test_nobody_there_is_refused_at_once() -> None:
    store = open_store(f"s3://bucket?endpoint=http://{HOST}:{free_port()}&region=x")
    calls: list[Callable[[], object]] = [
        lambda: store.get([name(1), name(2)]),
        lambda: store.have([name(1)]),
        lambda: store.put(name(1), BLOB),
        lambda: list(store.objects()),
        lambda: store.delete([name(1)]),
    ]
    for call in calls:
        began = time.monotonic()
        assert reason(call) == "refused"
        assert time.monotonic() - began < 2
    store.close()


def test_what_is_old_already_is_not_uploaded_if_it_must_expire() -> None:
    store = open_store(f"s3://bucket?endpoint=http://{HOST}:{free_port()}&region=x")
    assert not store.put(name(1), BLOB, age=DAY, life=6 * DAY)
    assert not store.put_new(name(1), BLOB, age=DAY, life=6 * DAY)
    assert reason(lambda: store.put(name(1), BLOB, age=DAY / 4, life=6 * DAY)) == "refused"  # it was tried
    assert reason(lambda: store.put(name(1), BLOB, age=99 * DAY)) == "refused"
    store.close()


@pytest.mark.slow
def test_wrong_keys_are_an_error(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    wrong = open_store(server.url(), 5.0)
    assert reason(lambda: wrong.put(name(1), BLOB)) == reason(lambda: wrong.get([name(1)])) == "auth"
    wrong.close()


@pytest.mark.slow
def test_a_hanging_server_costs_the_time_limit_and_a_killed_one_none(server: SeaweedServer) -> None:
    store, patient = open_store(server.url(), 0.5), open_store(server.url(), 30.0)  # on a busy machine half a second is short
    patient.put(name(1), BLOB)
    server.hang()
    began = time.monotonic()
    assert reason(lambda: store.get([name(1), name(2), name(3)])) == "timeout"
    assert time.monotonic() - began < 3
    server.go_on()
    assert patient.get([name(1)]) == [BLOB]
    server.kill()
    assert reason(lambda: patient.get([name(1)])) == "refused"
    store.close()
    patient.close()
