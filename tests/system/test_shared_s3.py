"""Servers that share a bucket of a real S3 server (SeaweedFS): what moves, what is written, and what is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness import ask, assistant, check, user
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.shared.address import open_store
from live import wait_until
from sharing import BLOCK_SIZE, DELAY, answer, chat, cold, same, start, stored
from stores import S3_ENVIRONMENT, SeaweedServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def store(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for variable, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    return server.url(f"test-{abs(hash(request.node.name))}")


def entries(store: str) -> list[str]:
    """The names of the entries in the store, without notes and the cards of servers."""
    with closing(open_store(store, 30.0)) as there:
        return [one.name for one in there.objects() if "/kv/" in one.name or "/state/" in one.name]


@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
@pytest.mark.parametrize("encrypt", [False, True], ids=["readable", "encrypted"])
def test_a_conversation_moves_when_its_server_stops(store: str, key_file: Path, sliceable: bool, encrypt: bool) -> None:
    def engine() -> FakeEngine:
        return FakeEngine(slots=1, ctx=1024, block_size=BLOCK_SIZE, sliceable=sliceable, delay=DELAY)

    messages = chat("Tell me of the house.")
    with start(store, key_file, engine=engine, shared_encrypt=encrypt) as one:
        for turn in range(3):
            found = ask(one, messages, max_tokens=12)
            messages = [*messages, assistant(found.text), user(f"And what of its room {turn}?")]
            stored(one)
    with start(store, key_file, engine=engine, shared_encrypt=encrypt) as other, cold(engine) as alone:
        moved = ask(other, messages, max_tokens=12, keep_logits=True)
        same(moved, ask(alone, messages, max_tokens=12, keep_logits=True))
        assert moved.report.tiers["shared"] > 0
        assert moved.report.computed <= len(messages[-1]["content"]) + 40 + 64
        check(other)
        assert not [name for name in other.cache.shared.counters if name.startswith("fault")]


def test_a_server_writes_what_is_reused_and_no_more_than_its_share(store: str, key_file: Path) -> None:
    with start(store, key_file) as one:
        answer(one, "Hello, who are you?")
        stored(one)
        assert entries(store) == []
        for number in range(4):
            answer(one, f"Hello, who is number {number}?")
            stored(one)
        written = len(entries(store))
        computed = sum(entry.length == BLOCK_SIZE for entry in one.cache.index)
        assert 0 < written <= 0.3 * computed
    assert len(entries(store)) > written, "what only this server had"


def test_what_is_deleted_is_deleted_in_the_bucket(store: str, key_file: Path) -> None:
    with start(store, key_file) as one:
        answer(one, "Name all rivers of the north.")
    with start(store, key_file) as other:
        assert answer(other, "Name all rivers of the north.").report.tiers["shared"] > 0
        stored(other)
        for chain in other.stored.all():
            other.stored.delete(chain.id, chain.owner)
        assert entries(store) == []


def test_a_dead_s3_server_costs_its_hits_and_no_answer(server: SeaweedServer, store: str, key_file: Path) -> None:
    """The last test of this module: the server stays dead."""
    with start(store, key_file) as one:
        first = answer(one, "Hello?")
    with start(store, key_file) as other:
        server.kill()
        same(answer(other, "Hello?"), first)
        wait_until(lambda: any(name.startswith("fault") for name in other.cache.shared.counters), 30)
        check(other)
