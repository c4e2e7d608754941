"""The routes of what is stored: tenants reach their own chains only, the operator all, and nobody the text of another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.api.auth import Keys
from headstart.api.cache.actions import ChainAnswer, ChainRequest, answer
from headstart.api.service import Nowhere
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving, wait_until

KEYS = {"operator": "sk-operator", "alice": "sk-alice", "bob": "sk-bob"}
WORDS = {"alice": "Alice speaks of her garden and its many roses.", "bob": "Bob keeps his secrets in the cellar below."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"{name} = {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=2048), Settings(memory_budget=1 << 20)) as runtime,
        serving(runtime, wait=False, model_id="fake", api_keys=Keys((), keys)) as server,
    ):
        for name, words in WORDS.items():
            body = {"messages": [{"role": "user", "content": words}], "max_tokens": 4}
            assert call(server, name, "POST", "/v1/chat/completions", json=body).is_success
        wait_until(lambda: settled_turns(runtime) == len(WORDS))
        yield server


def settled_turns(runtime: Runtime) -> int:
    """Settling replaces the chains of a reply, some time after its caller has it: a test waits for that before it lists."""
    turns: int = runtime.snapshot()["settle"].get("turns", 0)
    return turns


def call(server: Server, name: str, method: str, path: str, **more: Any) -> httpx.Response:
    return server.http.request(method, path, headers={"authorization": f"Bearer {KEYS[name]}"}, **more)


def listed(server: Server, name: str, **query: Any) -> dict[str, Any]:
    answer = call(server, name, "GET", "/headstart/cache", params=query)
    assert answer.is_success
    found: dict[str, Any] = answer.json()
    return found


def test_a_tenant_lists_and_reads_its_own_chains_only(server: Server) -> None:
    mine = {name: {chain["id"] for chain in listed(server, name)["data"]} for name in KEYS}
    assert mine["alice"]
    assert mine["bob"]
    assert not mine["alice"] & mine["bob"]
    assert mine["operator"] == mine["alice"] | mine["bob"]
    assert listed(server, "operator", limit=1)["has_more"]
    for name, other in (("alice", "bob"), ("bob", "alice")):
        page = listed(server, name)
        assert all(chain["yours"] and chain["complete"] and chain["tiers"]["memory"] for chain in page["data"])
        assert page["others"]["tokens"] > 0
        texts = [call(server, name, "GET", f"/headstart/cache/{id}/text").json()["text"] for id in mine[name]]
        assert any(WORDS[name] in text for text in texts)
        (id, *_), (foreign, *_) = mine[name], mine[other]
        shown = call(server, name, "GET", f"/headstart/cache/{id}").json()
        assert sum(entry["tokens"] for entry in shown["entries"]) == shown["tokens"]
        part = call(server, name, "GET", f"/headstart/cache/{id}/text", params={"start": shown["tokens"] - 1}).json()["text"]
        path, pieces = f"/headstart/cache/{id}/text", [{}, {"tokens": 8}, {"start": 8, "tokens": 9}, {"start": 17}]
        whole, *parts = (call(server, name, "GET", path, params=which).json()["text"] for which in pieces)
        assert "".join(parts) == whole
        assert whole.endswith(part)
        assert len(part) <= len("<|im_start|>"), "one token"
        assert all(parts)
        for method, path in (
            ("GET", foreign),
            ("GET", f"{foreign}/text"),
            ("POST", f"{foreign}/pin"),
            ("POST", f"{foreign}/unpin"),
            ("DELETE", foreign),
            ("GET", "nothing"),
            ("GET", foreign[:12]),
            ("GET", "00" * 32),
        ):
            answer = call(server, name, method, f"/headstart/cache/{path}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "chain_not_found"


def test_the_operator_reads_the_text_of_nobody(server: Server) -> None:
    for chain in listed(server, "operator")["data"]:
        assert not chain["yours"]
        assert call(server, "operator", "GET", f"/headstart/cache/{chain['id']}").is_success
        assert call(server, "operator", "GET", f"/headstart/cache/{chain['id']}/text").status_code == 404


@pytest.mark.parametrize("name", ["bob", "operator"])
def test_a_chain_is_pinned_unpinned_and_deleted(server: Server, name: str) -> None:
    id = next(chain["id"] for chain in listed(server, "bob")["data"])
    path = f"/headstart/cache/{id}"
    assert call(server, name, "POST", f"{path}/pin").json()["pinned"]
    refused = call(server, name, "DELETE", path)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "pinned"
    assert not call(server, name, "POST", f"{path}/unpin").json()["pinned"]
    if name == "operator":
        gone = call(server, name, "DELETE", path).json()
        assert gone["deleted"]
        assert gone["entries"]
        assert call(server, "bob", "GET", path).status_code == 404
        assert listed(server, "alice")["data"]


def test_without_isolation_a_salt_still_hides_its_text() -> None:
    with Runtime(lambda: FakeEngine(slots=1, ctx=512), Settings(memory_budget=1 << 20)) as runtime, serving(runtime) as server:
        body = {"messages": [{"role": "user", "content": WORDS["bob"]}], "max_tokens": 1, "cache_salt": "bob"}
        assert server.post("/v1/chat/completions", json=body).is_success
        wait_until(lambda: settled_turns(runtime) == 1)
        (chain, *_) = server.http.get("/headstart/cache").json()["data"]
        path = f"/headstart/cache/{chain['id']}/text"
        assert server.http.get(path).status_code == 404
        assert WORDS["bob"] in server.http.get(path, params={"cache_salt": "bob"}).json()["text"]


class Fleet(Nowhere):
    """Servers that ask each other. `silent`: how many do not answer. `after`: called once, when they have answered."""

    def __init__(self) -> None:
        self.runtimes: list[Runtime] = []
        self.silent = 0
        self.after: Callable[[], object] | None = None

    async def chain(self, asked: ChainRequest) -> list[ChainAnswer]:  # type: ignore[override]
        found = [answer(one, asked) for one in self.runtimes]
        after, self.after = self.after, None
        if after is not None:
            await asyncio.to_thread(after)
        return [*found, *([ChainAnswer(message="One did not answer.")] if self.silent else [])]


def test_in_a_fleet_every_server_that_has_a_chain_does_it() -> None:
    fleet, options = Fleet(), {"model_id": "fake", "api_keys": [*KEYS.values()], "isolate": "key"}
    settings = Settings(memory_budget=1 << 20)
    with (
        Runtime(lambda: FakeEngine(slots=1, ctx=512), settings) as first,
        Runtime(lambda: FakeEngine(slots=1, ctx=512), settings) as second,
        serving(first, wait=False, elsewhere=fleet, **options) as a,
        serving(second, wait=False, elsewhere=fleet, **options) as b,
    ):
        fleet.runtimes = [first, second]
        for server, words, turns in ((a, "bob", [1, 0]), (b, "bob", [1, 1]), (b, "alice", [1, 2])):
            body = {"messages": [{"role": "user", "content": WORDS[words]}], "max_tokens": 1, "temperature": 0}
            assert call(server, "bob", "POST", "/v1/chat/completions", json=body).is_success
            wait_until(lambda turns=turns: [settled_turns(one) for one in fleet.runtimes] == turns)  # type: ignore[misc]

        def settled() -> bool:
            first, second = ({chain["id"] for chain in listed(server, "bob")["data"]} for server in (a, b))
            return len(first) == 1 and len(second) == 2 and first < second

        wait_until(settled)
        both = listed(a, "bob")["data"][0]["id"]
        (alone,) = {chain["id"] for chain in listed(b, "bob")["data"]} - {both}
        path = f"/headstart/cache/{alone}"
        assert call(a, "bob", "GET", path).json()["id"] == alone
        assert WORDS["alice"] in call(a, "bob", "GET", f"{path}/text").json()["text"]
        for method, other in (("GET", path), ("GET", f"{path}/text"), ("POST", f"{path}/pin"), ("DELETE", path)):
            assert call(a, "alice", method, other).status_code == 404
        path = f"/headstart/cache/{both}"
        assert call(a, "bob", "POST", f"{path}/pin").json()["pinned"]
        assert all(one.stored.get(bytes.fromhex(both), None).pinned for one in fleet.runtimes)
        first.stored.unpin(bytes.fromhex(both), None)
        refused = call(a, "bob", "DELETE", path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "pinned")
        assert "Another server" in refused.json()["error"]["message"]
        assert not call(a, "bob", "POST", f"{path}/unpin").json()["pinned"]
        fleet.silent = 1
        assert call(a, "bob", "GET", path).is_success
        silent = call(a, "bob", "DELETE", path)
        assert (silent.status_code, silent.json()["error"]["message"]) == (503, "One did not answer.")
        fleet.silent = 0
        assert call(a, "bob", "DELETE", path).status_code == 404, "the others had it deleted"
        assert [chain["id"] for chain in listed(b, "bob")["data"]] == [alone]
        gone = call(a, "bob", "DELETE", f"/headstart/cache/{alone}").json()
        assert gone["entries"] > 3
        assert listed(b, "bob")["data"] == []


def test_what_a_server_gets_again_while_the_others_delete_it_is_deleted_too() -> None:
    fleet, options = Fleet(), {"model_id": "fake", "api_keys": [*KEYS.values()], "isolate": "key"}
    body = {"messages": [{"role": "user", "content": WORDS["bob"]}], "max_tokens": 1, "temperature": 0}
    with ExitStack() as stack:
        settings = Settings(memory_budget=1 << 20)
        fleet.runtimes = [stack.enter_context(Runtime(lambda: FakeEngine(slots=1, ctx=512), settings)) for _ in range(2)]
        servers = [stack.enter_context(serving(one, wait=False, elsewhere=fleet, **options)) for one in fleet.runtimes]

        def chat(server: Server) -> None:
            turns = settled_turns(fleet.runtimes[servers.index(server)])
            assert call(server, "bob", "POST", "/v1/chat/completions", json=body).is_success
            wait_until(lambda: settled_turns(fleet.runtimes[servers.index(server)]) > turns)

        for server in servers:
            chat(server)
        (chain,) = listed(servers[1], "bob")["data"]
        fleet.after = lambda: chat(servers[0])
        gone = call(servers[0], "bob", "DELETE", f"/headstart/cache/{chain['id']}").json()
        assert (gone["deleted"], gone["tokens"]) == (True, chain["tokens"])
        assert [listed(server, "bob")["data"] for server in servers] == [[], []]


@pytest.mark.parametrize(
    "asked", [0, 1, 2], ids=["by one that has the first turn", "by one that has both", "by one that has none"]
)
def test_a_deletion_takes_the_earlier_turns_of_a_conversation_that_has_moved(asked: int) -> None:
    fleet, options = Fleet(), {"model_id": "fake", "api_keys": [*KEYS.values()], "isolate": "key"}
    settings = Settings(memory_budget=1 << 20)
    with ExitStack() as stack:
        fleet.runtimes = [stack.enter_context(Runtime(lambda: FakeEngine(slots=1, ctx=1024), settings)) for _ in range(3)]
        servers = [stack.enter_context(serving(one, wait=False, elsewhere=fleet, **options)) for one in fleet.runtimes]
        system, question = {"role": "system", "content": "Be kind. " * 20}, {"role": "user", "content": WORDS["bob"]}
        other = {"role": "user", "content": WORDS["alice"]}

        def say(server: Server, *messages: dict[str, str]) -> dict[str, str]:
            body = {"messages": [*messages], "max_tokens": 4, "temperature": 0}
            reply: dict[str, str] = call(server, "bob", "POST", "/v1/chat/completions", json=body).json()["choices"][0][
                "message"
            ]
            return {name: reply[name] for name in ("role", "content")}

        reply = say(servers[0], system, question)
        say(servers[0], system, other)
        say(servers[1], system, question, reply, {"role": "user", "content": "And then?"})
        wait_until(lambda: [settled_turns(one) for one in fleet.runtimes] == [2, 1, 0])
        (moved,) = listed(servers[1], "bob")["data"]
        assert len(listed(servers[0], "bob")["data"]) == 2
        assert call(servers[asked], "alice", "DELETE", f"/headstart/cache/{moved['id']}").status_code == 404
        gone = call(servers[asked], "bob", "DELETE", f"/headstart/cache/{moved['id']}").json()
        assert gone["deleted"]
        assert gone["tokens"] == moved["tokens"]
        assert listed(servers[1], "bob")["data"] == []
        (left,) = listed(servers[0], "bob")["data"]
        text = call(servers[0], "bob", "GET", f"/headstart/cache/{left['id']}/text").json()["text"]
        assert WORDS["alice"][:20] in text
        assert WORDS["bob"] not in text
