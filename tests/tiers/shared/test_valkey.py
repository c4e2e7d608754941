"""Valkey in trouble: killed, hanging, full, evicting, with a wrong password, behind TLS. All with a real server."""

from __future__ import annotations

import datetime
import ipaddress
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from valkey.connection import SSLConnection

from headstart.tiers.shared.names import ObjectNames
from headstart.tiers.shared.resp import STEP, SteppedPacker
from headstart.tiers.shared.store import Blob, StoreError
from headstart.tiers.shared.valkey import ValkeyStore
from stores import HOST, ValkeyServer, tls_before

NAMES = ObjectNames(b"n" * 32)
MIB = 1 << 20
Start = Callable[..., ValkeyServer]


def blob(size: int) -> Blob:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).data


def name(number: int) -> str:
    return NAMES.of(b"owner", "kv", number.to_bytes(32, "little"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[ValkeyServer] = []

    def start(*options: str, password: str | None = None) -> ValkeyServer:
        servers.append(ValkeyServer(tmp_path, options, password))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def reason(store: ValkeyStore, call: Callable[[ValkeyStore], object] = lambda store: store.get([name(1)])) -> str:
    with pytest.raises(StoreError) as caught:
        call(store)
    return caught.value.reason


def test_a_killed_server_is_refused_at_once_and_found_again(start: Start) -> None:
    server = start()
    store = server.store()
    store.put(name(1), blob(1000))
    server.kill()
    began = time.monotonic()
    assert reason(store) == reason(store, lambda store: store.put(name(1), blob(9))) == "refused"
    assert time.monotonic() - began < 1
    server.start()
    assert store.get([name(1)]) == [None]
    assert store.put(name(1), blob(1000))
    store.close()


def test_time_limits_hold_while_a_server_hangs(start: Start) -> None:
    server = start()
    store = server.store(timeout=0.2)
    store.put(name(1), blob(MIB))
    server.hang()
    fresh = server.store(timeout=0.2)
    calls: list[Callable[[ValkeyStore], object]] = [
        lambda store: store.get([name(1)]),
        lambda store: store.have([name(1)]),
        lambda store: store.put(name(2), blob(20 * MIB)),
        lambda store: store.touch([name(1)]),
        lambda store: list(store.objects()),
    ]
    for one in (store, fresh):  # with a connection that was open before, and with a new one
        for call in calls:
            began = time.monotonic()
            assert reason(one, call) == "timeout"
            assert 0.1 < time.monotonic() - began < 2
    server.go_on()
    assert store.get([name(1)]) == [blob(MIB)]
    assert fresh.have([name(1)]) == [True]
    store.close()
    fresh.close()


def test_each_call_has_the_whole_time_limit(start: Start) -> None:
    with closing(start().store(timeout=0.5)) as store:
        store.put(name(1), blob(10))
        out = memoryview(bytearray(4))
        for _ in range(2):
            assert store.get([name(1)]) == [blob(10)]
            assert store.get_into([(name(1), out)], 2) is not None
            time.sleep(0.6)


def test_closing_ends_calls_of_other_threads(start: Start) -> None:
    server = start()
    store = server.store(timeout=60.0)
    store.put(name(1), blob(MIB))
    server.hang()
    out = np.zeros(MIB // 2, np.uint8).data
    calls: list[Callable[[], object]] = [lambda: store.get([name(1)]), lambda: store.get_into([(name(1), out)], 64)]
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(call) for call in calls]
        time.sleep(0.2)
        store.close()
        for one in pending:
            with pytest.raises(StoreError) as caught:
                one.result(30)
            assert caught.value.reason == "closed"


def test_a_server_that_dies_in_the_middle_of_an_answer_is_refused_and_leaves_nothing_behind(start: Start) -> None:
    server = start()
    store = server.store()
    outs = [np.zeros(4 * MIB, np.uint8).data for _ in range(8)]
    for number in range(8):
        store.put(name(number), blob(5 * MIB))

    def read() -> str:
        while True:
            try:
                store.get_into([(name(number), out) for number, out in enumerate(outs)], 64)
            except StoreError as error:
                return error.reason

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(read)
        time.sleep(0.1)
        server.kill()
        assert pending.result(30) == "refused"
    server.start()
    store.put(name(1), blob(100))
    assert store.get([name(0), name(1)]) == [None, blob(100)]  # on the same connections, opened anew
    store.close()


def test_a_large_object_may_take_longer_than_the_limit_if_it_makes_progress(start: Start) -> None:
    packed = SteppedPacker().pack("SET", "k", blob(3 * STEP + 5))
    assert max(map(len, packed)) <= STEP
    assert b"".join(packed) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n" % (3 * STEP + 5, bytes(blob(3 * STEP + 5)))


def test_a_full_server_that_evicts_nothing_says_full(start: Start) -> None:
    store = start("--maxmemory", "8mb", "--maxmemory-policy", "noeviction").store()
    assert any("noeviction" in one for one in store.warnings())
    assert reason(store, lambda store: [store.put(name(number), blob(MIB)) for number in range(20)]) == "full"
    assert store.get([name(0)]) == [blob(MIB)]  # it can still be read
    store.close()


def test_evicted_objects_are_missing_and_the_rest_is_there(start: Start) -> None:
    store = start("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru").store()
    assert store.warnings() == []
    for number in range(30):
        store.put(name(number), blob(MIB))
    found = store.get([name(number) for number in range(30)])
    assert 0 < found.count(None) < 30
    assert found[-1] == blob(MIB)
    store.close()


def test_what_is_touched_stays_longer(start: Start) -> None:
    store = start("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lfu", "--maxmemory-samples", "64").store()
    store.put(name(0), blob(MIB))
    for _ in range(200):  # it counts the logarithm, by chance
        store.touch([name(0)])
    for number in range(1, 40):
        store.put(name(number), blob(MIB))
    assert store.have([name(0), name(1)]) == [True, False]
    store.close()


def test_objects_expire_by_the_servers_clock_and_a_touch_does_not_help(start: Start) -> None:
    store = start().store()
    assert store.put(name(1), blob(10), life=0.15)
    assert store.put(name(2), blob(10), life=60.0)
    assert not store.put(name(3), blob(10), life=0.0)
    store.touch([name(1)])
    time.sleep(0.2)
    assert store.have([name(1), name(2), name(3)]) == [False, True, False]
    store.close()


def test_lives_become_shorter_and_never_longer(start: Start) -> None:
    with closing(start().store()) as store:
        for number, life in enumerate((math.inf, 60.0, 2.0, math.inf, math.inf)):
            assert store.put(name(number), blob(10), life=life)
        store.limit([(name(0), 9.0), (name(1), 9.0), (name(2), 9.0), (name(3), -1.0), (name(4), math.inf), (name(5), 9.0)])
        left = [store._client.pttl(name(number)) for number in range(6)]
        assert all(low < life <= high for life, low, high in zip(left, (2000, 2000, 0), (9000, 9000, 2000), strict=False)), left
        assert left[3:] == [-2, -1, -2], "deleted; for ever; missing"


def test_a_wrong_password_is_an_error_that_shows_none(start: Start) -> None:
    server = start(password="right-secret")
    assert server.store().have([name(1)]) == [False]
    for wrong in ("wrong-secret", None):
        store = ValkeyStore(HOST, server.port, password=wrong, timeout=2.0)
        with pytest.raises(StoreError) as caught:
            store.get([name(1)])
        assert caught.value.reason == "auth"
        assert "secret" not in f"{caught.value}{caught.value.__cause__}{store.url}{vars(store)}"
        store.close()


def test_a_user_needs_few_rights(start: Start) -> None:
    """The line for an ACL file in docs/shared.md."""
    rights = "~hs1/* resetchannels -@all +get +set +exists +touch +pexpire +unlink +scan +strlen"
    server = start("--user", *f"headstart on >pw {rights}".split())
    store = ValkeyStore(HOST, server.port, user="headstart", password="pw", timeout=2.0)
    assert store.put(name(1), blob(10))
    assert store.put_new(name(2), blob(10), life=9.0)
    assert store.get([name(1)]) == [blob(10)]
    assert store.have([name(1)]) == [True]
    store.touch([name(1)])
    store.limit([(name(1), 9.0)])
    assert len(list(store.objects())) == 2
    store.delete([name(1)])
    (warning,) = store.warnings()  # INFO is not among the rights
    assert "may not see how Valkey evicts" in warning
    with pytest.raises(StoreError) as caught:
        store.get(["other/name"])
    assert caught.value.reason == "auth"
    store.close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), False)
    signed = builder.sign(key, hashes.SHA256())
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return paths


def test_tls_checks_the_certificate(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(password="pw")
    cert, key = certificate(tmp_path)
    with tls_before(server.port, cert, key) as port:
        untrusted = ValkeyStore(HOST, port, password="pw", tls=True, timeout=5.0)
        assert reason(untrusted) == "auth"
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        trusted = ValkeyStore(HOST, port, password="pw", tls=True, timeout=5.0)
        assert trusted.put(name(1), blob(3 * MIB))
        assert trusted.get([name(1), name(2)]) == [blob(3 * MIB), None]
        other_name = ValkeyStore("localhost", port, password="pw", tls=True, timeout=5.0)
        assert reason(other_name) == "auth"
        for store in (untrusted, trusted, other_name):
            store.close()


def test_tickets_of_tls_are_no_stale_answer(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a password nothing had read them, so a fresh connection was taken for a broken one."""
    server = start()
    cert, key = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    connect = SSLConnection.on_connect

    def slowly(connection: SSLConnection) -> None:
        connect(connection)
        time.sleep(0.02)  # the tickets arrive

    monkeypatch.setattr(SSLConnection, "on_connect", slowly)
    with tls_before(server.port, cert, key) as port:
        for _ in range(5):
            with closing(ValkeyStore(HOST, port, tls=True, timeout=5.0)) as store:
                assert store.have([name(1)]) == [False]


def test_connections_do_not_stay_at_a_server_that_has_become_a_replica(start: Start) -> None:
    """After a failover the address leads to another server. Reads went on at the old one, so nothing else ended them."""
    server = start()
    with closing(server.store()) as store:
        assert store.put(name(1), blob(10))
        before = store._client.execute_command("CLIENT", "ID")
        assert store._client.execute_command("CLIENT", "ID") == before
        store._client.execute_command("REPLICAOF", HOST, "1")
        with pytest.raises(StoreError, match="this is a replica"):
            store.put(name(2), blob(10))
        assert store._client.execute_command("CLIENT", "ID") != before


def test_a_plain_connection_over_a_network_is_warned_of(start: Start) -> None:
    elsewhere = "127.0.0.2"  # not one of the names of this machine that are taken as safe
    server = start("--bind", HOST, elsewhere, "--maxmemory", "12mb", "--maxmemory-policy", "volatile-lru")
    store = ValkeyStore(elsewhere, server.port, timeout=2.0)
    (plain, volatile) = store.warnings()
    assert "valkeys://" in plain
    assert "volatile-lru" in volatile
    assert store.warnings(term=60.0) == [plain]
    store.close()
