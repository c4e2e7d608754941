"""`/api/pull` through Ollama's own package, from a hub of the test's own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ollama import AsyncClient, Client, ResponseError

from harness import check
from headstart.api.auth import Keys
from headstart.config import Settings
from headstart.hub.names import find
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from hub_server import HubRepo, HubServer, named_hub
from live import Server, serving, wait_until

NAME = "Own/Tiny-GGUF"
SIZE = 400_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("operator = boss\nann = other\n")
    file.chmod(0o600)
    with Runtime(FakeEngine, Settings(memory_budget=1 << 20)) as runtime:
        with serving(runtime, model_id="fake", api_keys=Keys((), file), key="boss", keep_alive=0.1) as served:
            yield served
        check(runtime)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with named_hub(monkeypatch, tmp_path) as running:
        files = {"tiny-Q4_K_M.gguf": b"GGUF".ljust(SIZE, b"x"), "tiny-Q8_0.gguf": b"GGUF".ljust(2 * SIZE, b"y")}
        running.repos[NAME] = HubRepo(files)
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, headers={"authorization": "Bearer boss"}) as client:
        yield client


def test_a_model_is_fetched_with_progress(client: Client, hub: HubServer) -> None:
    first, *lines, hint, last = client.pull(f"{NAME}:Q4_K_M", stream=True)
    assert (first.status, last.status) == ("pulling manifest", "success")
    assert hint.status is not None
    assert hint.status.startswith(f"{NAME}:Q4_K_M is here; `headstart serve {NAME}:Q4_K_M` serves it; this server serves")
    assert {line.total for line in lines} == {SIZE}
    done = [line.completed or 0 for line in lines]
    assert (done, done[-1]) == (sorted(done), SIZE)
    digest = (lines[0].digest or "").removeprefix("sha256:")
    assert lines[0].status == f"pulling {digest[:12]}"
    assert find(f"{NAME}:Q4_K_M").path.stat().st_size == SIZE
    sent = hub.sent
    assert client.pull(f"hf.co/{NAME}:Q4_K_M").status == "success"
    assert hub.sent == sent, "it is here"


def test_what_is_served_is_here(client: Client) -> None:
    assert [line.status for line in client.pull("fake:latest", stream=True)] == ["pulling manifest", "success"]


def test_an_asynchronous_client(server: Server, hub: HubServer) -> None:
    async def fetch() -> list[str | None]:
        async with AsyncClient(server.url, headers={"authorization": "Bearer boss"}) as client:
            assert (await client.pull(f"{NAME}:Q4_K_M")).status == "success"
            return [line.status async for line in await client.pull(f"{NAME}:Q8_0", stream=True)]

    assert asyncio.run(fetch())[-1] == "success"


@pytest.mark.parametrize("stream", [True, False])
def test_errors_are_in_words(client: Client, hub: HubServer, stream: bool) -> None:
    def pull(name: str) -> None:
        list(client.pull(name, stream=stream))

    with pytest.raises(ResponseError, match="give OWNER/NAME") as error:
        pull("llama3.2")
    assert error.value.status_code == 400
    for name in ("Own/Nothing", f"{NAME}:Q2_K"):
        with pytest.raises(ResponseError, match=name.split(":")[-1]):
            pull(name)


def test_only_the_operator_may(server: Server, hub: HubServer) -> None:
    with Client(server.url, headers={"authorization": "Bearer other"}) as other, pytest.raises(ResponseError) as error:
        other.pull(NAME)
    assert error.value.status_code == 403
    assert "'operator'" in error.value.error
    assert not hub.requests


def test_a_caller_that_waits_for_the_end_and_leaves_ends_the_download(server: Server, client: Client, hub: HubServer) -> None:
    hub.repos[NAME].files["tiny-Q8_0.gguf"] = b"GGUF".ljust(40 * SIZE, b"w")
    hub.faults.pause = 0.05
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/api/pull", json={"model": f"{NAME}:Q8_0", "stream": False}, timeout=1.0)
    wait_until(lambda: _still(hub), 20)
    assert 0 < hub.sent < 40 * SIZE
    hub.faults.pause = 0.0
    assert client.pull(f"{NAME}:Q8_0").status == "success"


def test_a_caller_that_leaves_ends_the_download(server: Server, client: Client, hub: HubServer) -> None:
    hub.repos[NAME].files["tiny-Q8_0.gguf"] = b"GGUF".ljust(40 * SIZE, b"z")
    hub.faults.pause = 0.05
    with server.http.stream("POST", "/api/pull", json={"model": f"{NAME}:Q8_0"}) as response:
        for line in response.iter_lines():
            if json.loads(line).get("completed"):
                break
    wait_until(lambda: _still(hub), 20)
    assert hub.sent < 40 * SIZE
    hub.faults.pause = 0.0
    assert client.pull(f"{NAME}:Q8_0").status == "success"


@pytest.mark.parametrize("stream", [True, False])
def test_a_stopping_server_keeps_what_it_has(
    server: Server, hub: HubServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Fault: it said that the engine had failed."""
    hub.repos[NAME].files["tiny-Q8_0.gguf"] = b"GGUF".ljust(40 * SIZE, b"s" if stream else b"t")
    hub.faults.pause = 0.05

    def stop() -> None:
        wait_until(lambda: hub.sent > 0)
        monkeypatch.setattr(server.app.config.app.state.service.drain, "begun", True)

    stopping = threading.Thread(target=stop)
    stopping.start()
    said = server.http.post("/api/pull", json={"model": f"{NAME}:Q8_0", "stream": stream})
    stopping.join()
    assert said.status_code == (200 if stream else 503)
    error = json.loads(said.text.splitlines()[-1])["error"]
    assert error == "The server is stopping. What is here is kept: pull again to go on."


def _still(hub: HubServer) -> bool:
    """Whether nothing is sent for as long as six parts would take."""
    before = hub.sent
    time.sleep(0.3)
    return hub.sent == before
