"""`GET /headstart/events` of a real server: what a reader sees of its requests, and that it sees nothing of those of others."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.api.auth import Keys
from headstart.api.events import routes
from headstart.config import Settings
from headstart.events import hub as hub_module
from headstart.fleet.cluster import bridge
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, idle, serving, wait_until

KEYS = {"operator": "sk-operator", "alice": "sk-alice", "bob": "sk-bob"}
SECRET = "Bob keeps his secrets in the cellar below, behind the third barrel."


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "PERIOD", 0.02)


@contextmanager
def served(folder: Path | None = None, **engine: Any) -> Iterator[Server]:
    options: dict[str, Any] = {}
    if folder is not None:
        (folder / "keys").write_text("".join(f"{name} = {key}\n" for name, key in KEYS.items()))
        (folder / "keys").chmod(0o600)
        options["api_keys"] = Keys((), folder / "keys")
    settings = Settings(memory_budget=1 << 20)
    with (
        Runtime(lambda: FakeEngine(**{"slots": 2, "ctx": 2048, **engine}), settings) as runtime,
        serving(runtime, wait=False, keep_alive=0.2, model_id="fake", **options) as server,
    ):
        yield server
        assert runtime.cache.store.listener is runtime.listeners


class Watching:
    """A reader of the stream in a thread."""

    def __init__(self, server: Server, name: str = "", **headers: str) -> None:
        self.read = b""
        self.headers = {**({"authorization": f"Bearer {KEYS[name]}"} if name else {}), **headers}
        self._server = server
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with (
            httpx.Client(base_url=self._server.url, timeout=20) as http,
            http.stream("GET", "/headstart/events", headers=self.headers) as answer,
        ):
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            for data in answer.iter_raw():
                self.read += data
                if self.stop.is_set():
                    return

    def __enter__(self) -> Watching:
        self._thread.start()
        wait_until(lambda: b"event: mark" in self.read)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def events(self) -> list[tuple[str, Any]]:
        return parsed(self.read)

    def wait(self, condition: Callable[[list[tuple[str, Any]]], bool]) -> list[tuple[str, Any]]:
        wait_until(lambda: condition(self.events()))
        return self.events()


def parsed(data: bytes) -> list[tuple[str, Any]]:
    found = []
    for frame in data.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if ": " in line)
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def requests(events: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [item for name, value in events if name == "requests" for item in value]


def chat(server: Server, words: str, name: str = "", **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[name]}"} if name else {}
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 4, "ignore_eos": True, **more}
    answer = server.post("/v1/chat/completions", json=body, headers={**headers, "x-request-id": f"of-{name or 'anybody'}"})
    assert answer.is_success
    return answer


def test_a_request_is_followed_from_the_queue_to_its_end() -> None:
    with served(slots=1, delay=0.005) as server, Watching(server) as watching:
        words = "How many roses are there in the garden of the house? " * 12
        for _ in range(2):
            used = chat(server, words, max_tokens=12).json()["headstart"]
        over = watching.wait(lambda events: sum(one["state"] == "length" for one in requests(events)) == 2)
        numbers = dict.fromkeys(one["number"] for one in requests(over))
        first, last = ([one for one in requests(over) if one["number"] == number] for number in numbers)
        assert first[-1]["state"] == last[-1]["state"] == "length"
        assert {one["id"] for one in first} == {"of-anybody"}
        assert last[-1]["cached"] == used["cached"]
        assert last[-1]["computed"] == used["computed"]
        assert last[-1]["completion"] == 12
        assert last[-1]["cause"] is None
        assert last[-1]["prompt"] == last[-1]["cached"] + last[-1]["computed"]
        assert set(last[-1]["seconds"]) == {"queued", "prefill", "ttft", "decode"}
        slots = [item for name, value in over if name == "slots" for item in value]
        assert {"idle", "prefill", "reply"} >= {item["state"] for item in slots} >= {"idle"}
        assert any(item.get("request") in numbers and item["total"] > 0 for item in slots)
        tree = watching.wait(lambda events: any(name == "tree" and value for name, value in events))
        entries = [item for name, value in tree if name == "tree" for item in value if "parent" in item]
        assert sum(item["tokens"] for item in entries) >= last[-1]["prompt"] - 8
        assert {item["parent"] for item in entries} - {item["id"] for item in entries} == {None}


def test_a_quick_request_tells_what_it_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: its prefill and its end came within one period: only the end was told, so what it used seemed old."""
    monkeypatch.setattr(hub_module, "PERIOD", 1.0)
    with served(slots=1) as server, Watching(server) as watching:
        words = "How many roses are there in the garden of the house? " * 12
        for _ in range(2):
            chat(server, words)
        over = watching.wait(lambda events: sum(one["state"] == "length" for one in requests(events)) == 2)
        assert len(requests(over)) < 6, "stages are left out"
        tree = [item for name, value in over if name == "tree" for item in value]
        last = requests(over)[-1]
        assert last["cached"] > 0
        assert last["reused"] in {item["id"] for item in tree if "id" in item}


def test_a_failed_and_a_cancelled_request_end_too() -> None:
    with served(slots=1, delay=0.02) as server, Watching(server) as watching:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x " * 500, "max_tokens": 400, "stream": True}):
            watching.wait(lambda events: any(one["state"] in ("prefill", "reply") for one in requests(events)))
        watching.wait(lambda events: requests(events)[-1]["state"] == "cancelled")


def test_a_tenant_reads_no_byte_of_another(tmp_path: Path) -> None:
    """Alice reads while Bob chats, and afterwards; she comes back, and asks once."""
    with served(tmp_path) as server:
        with Watching(server, "alice") as alice, Watching(server, "bob") as bob, Watching(server, "operator") as operator:
            chat(server, "Alice speaks of her garden.", "alice")
            for number in range(3):
                chat(server, f"{SECRET} {number}", "bob")
            runtime = server.runtime
            assert runtime is not None
            wait_until(lambda: idle(runtime) and not any(slot.dirty for slot in runtime.scheduler.slots))
            ids = {entry.id.hex() for entry in runtime.stored.entries()}
            wait_until(lambda: all(id.encode() in operator.read for id in ids))
            for reader in (alice, bob):
                reader.wait(lambda events: any(one["state"] in ("stop", "length") for one in requests(events)))
        with Watching(server, "alice") as again:
            pass
        once = server.http.get("/headstart/events?once=true", headers=alice.headers).content
        everything = server.http.get("/headstart/events?once=true", headers=operator.headers).content
        theirs = {chain.id for chain in runtime.stored.all()}
        foreign = {entry for entry in runtime.stored.entries() if entry.id.hex().encode() in bob.read}
        assert len(foreign) > 3 < len(theirs) + 3
        assert b"of-bob" in bob.read
        assert b"of-alice" in alice.read
        for read in (alice.read, again.read, once):
            for entry in foreign:
                assert entry.id.hex().encode() not in read
                assert entry.owner.hex().encode() not in read
                assert ",".join(map(str, entry.tokens.tolist())).encode() not in read
            for word in (b"of-bob", b"secrets", b"Bob", b"bob", KEYS["bob"].encode()):
                assert word not in read
        sizes = next(value for name, value in reversed(parsed(once)) if name == "sizes")
        assert sizes["others"]["tokens"] >= 8 * len({entry for entry in foreign if len(entry.tokens) == 8 and not entry.state})
        assert "tiers" not in sizes
        assert b"secrets" not in everything, "texts are not in any stream"
        assert b"of-bob" in everything


def test_a_reader_needs_a_key(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert httpx.get(f"{server.url}/headstart/events").status_code == 401
        page = {"authorization": f"Bearer {KEYS['alice']}", "host": "evil.example"}
        assert httpx.get(f"{server.url}/headstart/events", headers=page).status_code == 403


def test_a_reader_that_comes_back_goes_on() -> None:
    with served() as server:
        with Watching(server) as first:
            chat(server, "One.")
            first.wait(lambda events: any(one["state"] == "length" for one in requests(events)))
        last = [line for line in first.read.decode().splitlines() if line.startswith("id: ")][-1][4:]
        chat(server, "Two.")
        with Watching(server, **{"last-event-id": last}) as second:
            events = second.wait(lambda events: any(one["state"] == "length" for one in requests(events)))
        assert "snapshot" not in {name for name, _ in events}
        assert not {one["number"] for one in requests(events)} & {one["number"] for one in requests(first.events())}
        with Watching(server, **{"last-event-id": "other-1"}) as third:
            assert third.events()[0][0] == "snapshot"


def test_twenty_readers_see_the_same_beside_four_replies() -> None:
    with served(slots=4) as server:
        readers = [Watching(server) for _ in range(20)]
        for reader in readers:
            reader.__enter__()
        calls = [threading.Thread(target=chat, args=(server, f"{number}: roses")) for number in range(4)]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        for reader in readers:
            reader.wait(lambda events: sum(one["state"] == "length" for one in requests(events)) == 4)
            reader.stop.set()
        for reader in readers:
            reader.__exit__()
        assert server.runtime is not None
        service = server.app.config.app.state.service
        wait_until(lambda: service.hub.readers == 0)


def test_a_stopping_server_does_not_wait_for_readers() -> None:
    with served() as server, Watching(server) as watching:
        server.stop()
        wait_until(lambda: watching.ended)
        assert watching.events()[-1][0] == "end"


def test_a_reader_that_takes_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SLOW", 0.2)
    with served() as server, Watching(server) as watching:
        hub = server.app.config.app.state.service.hub
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as line:
            line.sendall(b"GET /headstart/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            wait_until(lambda: hub.readers == 2)
            reader = hub._readers[1]

            def gone() -> bool:
                if not reader._size:
                    reader.put(b":" + b"." * 500_000 + b"\n\n", b"")
                return bool(hub.readers == 1)

            wait_until(gone)
        chat(server, "Roses.")
        watching.wait(lambda events: any(one["state"] == "length" for one in requests(events)))


def test_pins_are_told() -> None:
    with served() as server, Watching(server) as watching:
        chat(server, "Roses, and roses again.")
        watching.wait(lambda events: any(name == "tree" and value for name, value in events))
        id = server.http.get("/headstart/cache").json()["data"][0]["id"]
        assert server.post(f"/headstart/cache/{id}/pin").json()["pinned"]
        pinned = watching.wait(
            lambda events: any(item.get("pinned") for name, value in events if name == "tree" for item in value)
        )
        assert id in {item["id"] for name, value in pinned if name == "tree" for item in value if item.get("pinned")}


@pytest.mark.parametrize("bound", [(1_000, 600.0), (1 << 20, 0.2)], ids=["bytes", "seconds"])
def test_a_stream_whose_reader_nobody_sees_ends(monkeypatch: pytest.MonkeyPatch, bound: tuple[int, float]) -> None:
    """Fault: over the bridge of a fleet a reader never seemed slow, and its events filled the memory of the front."""
    monkeypatch.setattr(routes, "BUFFERED", bound)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/headstart/events",
        "raw_path": b"/headstart/events",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 80),
    }
    with served() as server:

        async def read() -> bytes:
            stream, found = bridge.call(server.app.config.app, bridge.carried(scope), b""), b""
            async with asyncio.timeout(60):
                async for messages in stream:
                    found += b"".join(message.get("body", b"") for message in messages)
                    if bound[0] < 1 << 20 and b"event:" in found:
                        await asyncio.to_thread(chat, server, "roses")
            return found

        found = asyncio.run(read())
        assert b"snapshot" in found
        assert b"connect again" in found
        assert server.app.config.app.state.service.hub.readers == 0
