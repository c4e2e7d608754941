"""The feed reads real servers, and says in words what is wrong with them."""

from __future__ import annotations

import http.server
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headstart.api.auth import Keys
from headstart.cli.server import ServerAddress
from headstart.cli.top import feed as feed_module
from headstart.cli.top.feed import Feed, Trouble, Update
from headstart.cli.top.savings import Savings
from headstart.cli.top.state import TopState
from headstart.cli.top.stream import ReadBatch
from headstart.config import Settings
from headstart.events import hub as hub_module
from headstart.events.hub import RENEWED
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving, wait_until


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "PERIOD", 0.02)
    monkeypatch.setattr(feed_module, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(feed_module, "LONGEST_WAIT", 0.05)


@contextmanager
def served(keys: Path | None = None) -> Iterator[Server]:
    options = {"api_keys": Keys((), keys)} if keys is not None else {}
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=2048), Settings(memory_budget=1 << 20)) as runtime,
        serving(runtime, wait=False, keep_alive=0.2, model_id="fake", **options) as server,
    ):
        yield server


class Reading:
    """A feed in a thread, and what it has sent."""

    def __init__(self, server: ServerAddress, **owner: str) -> None:
        self.feed, self.updates, self._stopped = Feed(server, owner), list[Update](), threading.Event()
        self._thread = threading.Thread(target=self.feed.run, args=(self.updates.append, self._stopped))

    def __enter__(self) -> Reading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def state(self) -> TopState:
        return next((one for one in reversed(self.updates) if isinstance(one, TopState)), TopState())

    def wait(self, condition: Callable[[TopState], bool]) -> TopState:
        wait_until(lambda: condition(self.state))
        return self.state

    def trouble(self) -> str:
        wait_until(lambda: any(isinstance(one, Trouble) for one in self.updates))
        return next(one.text for one in self.updates if isinstance(one, Trouble))


def chat(server: Server, words: str, **headers: str) -> None:
    body = {"messages": [{"role": "user", "content": words * 8}], "max_tokens": 4, "ignore_eos": True}
    assert server.post("/v1/chat/completions", json=body, headers=headers).is_success


def ended(state: TopState) -> int:
    return sum(row.state == "length" for row in state.requests.values())


def test_a_server_is_followed() -> None:
    with served() as server, Reading(ServerAddress(server.url)) as reading:
        reading.wait(lambda state: len(state.slots) == 2)
        for words in ("How many roses are in the garden? ", "How many roses are in the house? "):
            chat(server, words)
        state = reading.wait(lambda state: ended(state) == 2 and bool(state.entries))
        first, second = (state.requests[number] for number in sorted(state.requests))
        assert first.prompt == first.computed
        assert second.cached > 0
        assert second.computed == second.prompt - second.cached
        assert state.tiers.keys() == {"memory", "disk"}
        assert not [one for one in reading.updates if isinstance(one, Trouble)]


def test_the_operator_gets_the_sums_since_the_start() -> None:
    with served() as server:
        chat(server, "How many roses are in the garden? ")
        with Reading(ServerAddress(server.url)) as reading:
            wait_until(lambda: any(isinstance(one, Savings) for one in reading.updates))
            sums = next(one for one in reading.updates if isinstance(one, Savings))
            assert (sums.requests, sums.cached) == (1, 0)
            assert sums.prompt == sums.computed > 200


def test_it_goes_on_with_a_server_that_comes_back() -> None:
    with served() as server:
        reading = Reading(ServerAddress(server.url))
        with reading:
            reading.wait(lambda state: len(state.slots) == 2)  # it follows: a request that has ended before is no event
            chat(server, "How many roses? ")
            reading.wait(lambda state: ended(state) == 1)
            server.stop()
            wait_until(lambda: any(isinstance(one, Trouble) for one in reading.updates))
            assert reading.trouble() == "The server is stopping"
            with served() as other:
                reading.feed.server = ServerAddress(other.url)
                reading.wait(lambda state: not state.requests and len(state.slots) == 2)
                chat(other, "How many trees? ")
                assert len(reading.wait(lambda state: ended(state) == 1).requests) == 1
            wait_until(lambda: "No server answers" in [one for one in reading.updates if isinstance(one, Trouble)][-1].text)


def test_a_connection_that_breaks_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is read over a new connection; the server sends what was missed."""
    monkeypatch.setattr(feed_module, "PART", 700)
    with served() as server, Reading(ServerAddress(server.url)) as reading:
        reading.wait(lambda state: len(state.slots) == 2)
        real, names, broken = TopState.then, list[str](), [0]

        def breaking(state: TopState, batch: ReadBatch) -> TopState:
            found = real(state, batch)
            names.extend(name for name, _ in batch.events)
            broken[0] += 1
            if broken[0] % 2:
                reading.feed._state, reading.feed._last_id = found, batch.id
                raise ConnectionResetError("broken by the test")
            return found

        monkeypatch.setattr(TopState, "then", breaking)
        for number in range(1, 7):
            chat(server, f"Number {number}: how many roses are in the garden? ")
            wait_until(lambda number=number: ended(reading.feed._state) == number)  # type: ignore[misc]
        assert broken[0] > 2
        assert "requests" in names
        assert "snapshot" not in names
        with Reading(ServerAddress(server.url)) as fresh:
            fresh.wait(lambda state: ended(state) == 6 and state.entries.keys() == reading.feed._state.entries.keys())


def test_keys_see_their_own(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("operator = sk-operator\nalice = sk-alice\nbob = sk-bob\n")
    (tmp_path / "keys").chmod(0o600)
    with served(tmp_path / "keys") as server:
        with Reading(ServerAddress(server.url, key="sk-wrong")) as reading:
            assert reading.trouble().startswith("The key is missing or wrong")
        with (
            Reading(ServerAddress(server.url, key="sk-alice")) as alice,
            Reading(ServerAddress(server.url, key="sk-operator")) as operator,
        ):
            operator.wait(lambda state: len(state.slots) == 2)
            chat(server, "Bob's secret is in the cellar. ", authorization="Bearer sk-bob")
            operator.wait(lambda state: ended(state) == 1)
            assert alice.wait(lambda state: state.others.get("tokens", 0) > 0).requests == {}
            assert alice.state.tiers == {}
            assert any(isinstance(one, Savings) for one in operator.updates)
            assert {one.requests for one in alice.updates if isinstance(one, Savings)} == {0}, "her own"
            assert not any(isinstance(one, Trouble) for one in alice.updates)


def test_too_many_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "READERS", 0)
    with served() as server, Reading(ServerAddress(server.url)) as reading:
        assert "0 readers of events are the most" in reading.trouble()


def test_a_name_that_the_server_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:
        port = server.url.rpartition(":")[2]
        monkeypatch.setattr("socket.getaddrinfo", lambda host, port, *_: [(2, 1, 6, "", ("127.0.0.1", port))])
        with Reading(ServerAddress(f"http://evil.example:{port}")) as reading:
            assert "--allow-host" in reading.trouble()


class Ending(http.server.BaseHTTPRequestHandler):
    """A proxy that ends each stream of events after half a second. The path begins with the server's port."""

    ends = 0

    def do_GET(self) -> None:
        _, port, path = self.path.split("/", 2)
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}", headers={"Last-Event-ID": self.headers.get("Last-Event-ID", "")}
        )
        with urllib.request.urlopen(asked, timeout=20) as answer:
            self.send_response(200)
            self.send_header("content-type", answer.headers["content-type"])
            self.end_headers()
            if not path.startswith("headstart/events"):
                self.wfile.write(answer.read())
                return
            begun = time.monotonic()
            while time.monotonic() < begun + 0.5:  # the server sends a comment every 0.2 s
                self.wfile.write(answer.read1(1 << 20))
            if Ending.ends % 2:
                self.wfile.write(RENEWED)
        Ending.ends += 1

    def log_message(self, *_: object) -> None:
        return


def test_a_stream_that_ends_after_a_while_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a fleet do, and of proxies."""
    monkeypatch.setattr(feed_module, "USUAL", 0.0)
    with served() as server, http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ending) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        with Reading(ServerAddress(f"http://127.0.0.1:{proxy.server_port}/{server.url.rpartition(':')[2]}")) as reading:
            reading.wait(lambda state: len(state.slots) == 2)
            chat(server, "How many roses are in the garden? ")
            reading.wait(lambda state: ended(state) == 1)
            wait_until(lambda: Ending.ends > 2)
            assert not [one for one in reading.updates if isinstance(one, Trouble)]
            proxy.shutdown()
            proxy.server_close()
            assert "No server answers" in reading.trouble()
        thread.join()


class Other(http.server.BaseHTTPRequestHandler):
    """Another program: what it answers is in the path that the address has."""

    def do_GET(self) -> None:
        self.send_response(200)
        kind, body = {
            "page": ("text/html", b"<h1>Hello</h1>"),
            "noise": ("text/event-stream", b"event: tree\ndata: [{]\n\n"),
        }[self.path.split("/")[1]]
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.parametrize(("kind", "said"), [("page", "it is another program"), ("noise", "sends other events than this")])
def test_another_program(kind: str, said: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        with Reading(ServerAddress(f"http://127.0.0.1:{other.server_port}/{kind}")) as reading:
            assert said in reading.trouble()
        other.shutdown()
        thread.join()


def test_a_certificate_that_can_no_longer_be_read(tmp_path: Path) -> None:
    """Fault: the feed's thread ended, and nobody was told."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        address = ServerAddress(f"https://127.0.0.1:{place.getsockname()[1]}", certificate=tmp_path / "none.pem")
        with Reading(address) as reading:
            assert "Cannot read --tls-cert" in reading.trouble()
