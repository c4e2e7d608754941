"""A member of a fleet, without Ray: a new one has the hot list in memory before it gets requests, whatever fails, and one that
stops ends its replies.

The front is real, and so are the app, the store and the messages between them, but all is in one process.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.datastructures import Headers

from harness import check, system, user
from headstart.api.service import Nowhere
from headstart.chat.tenancy import OPEN
from headstart.config import Settings
from headstart.fleet.cluster import bridge, fronting
from headstart.fleet.cluster import member as members
from headstart.fleet.cluster.booked import BOOKING
from headstart.fleet.cluster.fronting import FrontProcess
from headstart.fleet.cluster.member import MEASURED, Member
from headstart.fleet.cluster.setup import FleetSetup
from headstart.fleet.front.hot import HotStretch
from headstart.fleet.model_card import ModelCard
from headstart.prefix_cache.quota import owner_of
from headstart.serving import shared_audit
from headstart.testing.fake_engine import FakeEngine
from sharing import be_patient, stored
from stores import ValkeyServer

CHAT = "/v1/chat/completions"
RULES = system("You answer in the words of the house, and never in others. " * 4)
LONG = user("What are the words of the house, and who has chosen them? " * 2)
COUNTED = user("How many of them are there, and how often do they change? " * 2)


class OneProcess(Nowhere):
    """A fleet whose front and members are in this process: `member.Fleet`.

    Attributes:
        asked: the limits of the hot lists that were asked for.
        before: called before the front answers with its list.
    """

    def __init__(self, setup: FleetSetup) -> None:
        self.setup = setup
        self.process = FrontProcess(setup)
        self.asked: list[int] = []
        self.before: Callable[[], object] = lambda: None

    async def send(self, report: bytes, card: ModelCard) -> Sequence[bool]:
        return [await self.process.report(report, card)]

    async def hottest(self, fingerprint: bytes, tokens: int) -> Sequence[HotStretch]:
        self.asked.append(tokens)
        found = await self.process.hottest(fingerprint, tokens)
        self.before()
        return found

    async def status(self) -> dict[str, Any]:
        return {}

    async def metrics(self) -> dict[str, bytes]:
        return {}

    @asynccontextmanager
    async def member(self, name: str) -> AsyncIterator[Member]:
        one = Member(self.setup, name)
        await one.start(self)
        try:
            yield one
        finally:
            await one.close()
            self.process.front.leave(name)

    async def chat(
        self, one: Member, *messages: dict[str, Any], key: str = "", id: str = "request", **options: Any
    ) -> dict[str, Any]:
        """The `headstart` object of the answer to a request that the front has seen."""
        while one._name not in self.process.front.replicas:
            await asyncio.sleep(0.01)
        body = json.dumps({"messages": messages, "max_tokens": 2, "temperature": 0, **options}).encode()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers["x-request-id"] = id
        chosen = await self.process.front.route(CHAT, Headers(headers), body)
        assert chosen is not None
        headers[BOOKING] = chosen.booking
        transport = httpx.ASGITransport(one.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            answer = await client.post(CHAT, content=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["headstart"]
        return found


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    monkeypatch.setattr(shared_audit, "PORTION", 0.0)  # a block that is checked is computed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def fleet(url: str | None, key_file: Path | None, *, engine: dict[str, Any] | None = None, **options: Any) -> OneProcess:
    """`options`: settings, and what else a setup has."""
    shape = {"ctx": 2048, "block_size": 8, "slots": 2, **(engine or {})}
    apart = {name: options.pop(name) for name in ("api_keys", "api_key_file", "isolate") if name in options}
    settings = Settings(**{"memory_budget": 1 << 20, "shared": url, "shared_key_file": key_file, **options})
    make = partial(FakeEngine, **shape)
    return OneProcess(FleetSetup(settings, engine=make, tokenizer=FakeEngine.load_tokenizer, **apart))


def computed(one: Member) -> int:
    """Prompt tokens that a member has computed, beside those that measure its speed."""
    return cast(FakeEngine, one._runtime.engine).prefilled - MEASURED - 1


async def used(found: OneProcess, **options: Any) -> None:
    """Three conversations with one system prompt, at a member that stores them and goes."""
    async with found.member("first") as one:
        for question in (LONG, COUNTED, user("Why?")):
            await found.chat(one, RULES, question, **options)
        await asyncio.to_thread(stored, one._runtime)


# ── what a new member has ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sliceable", [True, False], ids=["attention", "hybrid"])
@pytest.mark.parametrize("options", [{}, {"reuse": "exact"}, {"shared_encrypt": True}], ids=["fast", "exact", "encrypted"])
def test_a_new_member_serves_the_first_request_from_its_memory(
    valkey: ValkeyServer, key_file: Path, sliceable: bool, options: dict[str, Any]
) -> None:
    async def run() -> None:
        found = fleet(valkey.url, key_file, engine={"sliceable": sliceable}, **options)
        await used(found)
        async with found.member("second") as one:
            assert computed(one) == 0
            assert one.figures().preloaded > len(RULES["content"])
            assert one.figures().held["memory"].entries
            answer = await found.chat(one, RULES, LONG)
            assert set(answer["tiers"]) == {"memory"}, answer
            assert answer["computed"] <= 16
            assert computed(one) == answer["computed"]
            new = await found.chat(one, RULES, user("Another question, which nobody has asked."))
            assert "shared" not in new["tiers"]
            assert new["cached"] > len(RULES["content"]) - 16
            check(one._runtime)

    asyncio.run(run())


def test_a_store_that_is_only_read(folder: Path, key_file: Path) -> None:
    async def run() -> None:
        await used(wrote := fleet(f"file://{folder}", key_file))
        reads = fleet(f"file://{folder}", key_file, shared_mode="read")
        reads.process = wrote.process
        async with reads.member("second") as one:
            assert one.figures().preloaded > len(RULES["content"])
            assert computed(one) == 0

    asyncio.run(run())


def test_tenants_stay_apart(folder: Path, key_file: Path) -> None:
    async def run() -> None:
        found = fleet(f"file://{folder}", key_file, api_keys=("sk-anna-1234567890", "sk-berta-1234567890"), isolate="key")
        await used(found, key="sk-anna-1234567890")
        async with found.member("second") as one:
            assert (await found.chat(one, RULES, LONG, key="sk-berta-1234567890"))["cached"] == 0
            assert set((await found.chat(one, RULES, LONG, key="sk-anna-1234567890"))["tiers"]) == {"memory"}

    asyncio.run(run())


def test_the_list_fits_into_a_share_of_memory(folder: Path, key_file: Path) -> None:
    async def run() -> None:
        found = fleet(f"file://{folder}", key_file)
        await used(found)
        found.setup = fleet(f"file://{folder}", key_file, memory_budget=100 * 16).setup
        async with found.member("second") as one:
            assert found.asked[-1] == 50
            assert 0 < one.figures().preloaded <= 50
            assert computed(one) == 0
            check(one._runtime)

    asyncio.run(run())


def test_without_a_store_nobody_asks_and_nothing_is_remembered() -> None:
    async def run() -> None:
        found = fleet(None, None)
        async with found.member("first") as one:
            await found.chat(one, RULES, LONG)
            assert not await found.process.hottest(one._card.fingerprint, 1000)
        async with found.member("second") as other:
            assert other.figures().preloaded == 0
        assert not found.asked

    asyncio.run(run())


# ── how long data may be kept ────────────────────────────────────────────────────────────────────────────────────────


def test_the_front_forgets_its_list_as_often_as_data_expires(folder: Path, key_file: Path) -> None:
    async def run() -> None:
        found = fleet(f"file://{folder}", key_file, expire=0.2)
        async with found.member("first") as one:
            forgetting = asyncio.create_task(found.process.forget())
            await found.chat(one, RULES, LONG)
            async with asyncio.timeout(30):
                while await found.process.hottest(one._card.fingerprint, 1000):
                    await asyncio.sleep(0.05)
            forgetting.cancel()

    asyncio.run(run())


def test_the_front_keeps_nothing_longer_than_the_term(folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a term that is no multiple of a minute was rounded up to the next one."""
    found, now, times = fleet(f"file://{folder}", key_file, expire=90.0), [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        if len(times) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(fronting, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    monkeypatch.setattr(fronting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(found.process.reader, "forget", lambda: times.append(now[0]))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(found.process.forget())
    assert times == [90.0, 180.0, 270.0]


def test_prompts_of_users_with_a_term_are_not_listed(folder: Path, key_file: Path, tmp_path: Path) -> None:
    """Fault: a new member keeps them beyond the term, which it would learn from the user's next request only."""
    (keys := tmp_path / "keys").write_text("anna = sk-anna-1234567890  expire=1d\nberta = sk-berta-1234567890\n")

    async def run() -> None:
        found = fleet(f"file://{folder}", key_file, api_key_file=keys, isolate="user")
        async with found.member("first") as one:
            await found.chat(one, RULES, LONG, key="sk-anna-1234567890", user="ann")
            assert not await found.process.hottest(one._card.fingerprint, 1000)
            await found.chat(one, RULES, LONG, key="sk-berta-1234567890", user="bea")
            assert await found.process.hottest(one._card.fingerprint, 1000)

    asyncio.run(run())


def test_what_a_new_member_fetches_expires_there_too(folder: Path, key_file: Path, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("anna = sk-anna-1234567890  expire=1d\nberta = sk-berta-1234567890\n")

    async def run() -> None:
        found = fleet(f"file://{folder}", key_file, api_key_file=keys, isolate="key")
        written = time.time()
        await used(found, key="sk-anna-1234567890")
        began = time.time()
        async with found.member("second") as one:
            (owner,) = {owner_of(one.root) for one in await found.process.hottest(one._card.fingerprint, 1000)}
            store = one._runtime.cache.store
            fetched = [entry for entry in store.index if entry.owner == owner]
            assert sum(len(entry.tokens) for entry in fetched) == one.figures().preloaded
            assert store.terms.of(owner) == 86_400
            assert all(written < entry.written < began for entry in fetched), "their age is that of their text"

    asyncio.run(run())


@pytest.mark.parametrize("id", ["mine", "not one word"])
def test_requests_with_one_id_end_their_own_bookings(id: str) -> None:
    async def run() -> None:
        found = fleet(None, None)
        async with found.member("one") as one:
            await asyncio.gather(*(found.chat(one, RULES, question, id=id) for question in (LONG, COUNTED)))
            async with asyncio.timeout(10.0):
                while len(found.process.front._router._book):
                    await asyncio.sleep(0.01)
            latest = one.explain(OPEN, "", None)
            assert latest is not None
            assert re.fullmatch("mine" if id == "mine" else "req_.{32}", latest["id"])

    asyncio.run(run())


# ── what fails ───────────────────────────────────────────────────────────────────────────────────────────────────────


def stop(server: ValkeyServer, how: str) -> None:
    if how == "hung":
        server.hang()
    elif how == "dead":
        server.kill()
    else:
        store = server.store()
        store.delete([one.name for one in store.objects()])
        store.close()


@pytest.mark.parametrize("how", ["hung", "dead", "evicted"])
def test_a_store_that_fails_while_the_list_is_fetched(
    valkey: ValkeyServer, key_file: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The store's own time limit is 30 s here, so only the member's limit can end a call that hangs."""
    monkeypatch.setattr(members, "HOT_SECONDS", 1.0)

    async def run() -> None:
        found = fleet(valkey.url, key_file)
        await used(found)
        found.before = partial(stop, valkey, how)
        async with found.member("second") as one:
            assert one.figures().preloaded == 0
            assert found.asked
            if how == "hung":
                # What it measured its speed with is there since the first member, and may have been offered before.
                assert {*one._runtime.cache.shared.counters} <= {"there"}, "the store hangs, and its call goes on"
                valkey.go_on()
            answer = await found.chat(one, RULES, LONG)
            assert answer["computed"] + answer["cached"] > len(RULES["content"])

    asyncio.run(run())


@pytest.mark.parametrize("half", [False, True])
def test_part_of_the_list_was_evicted(folder: Path, key_file: Path, half: bool) -> None:
    async def run() -> None:
        found = fleet(f"file://{folder}", key_file)
        await used(found)
        objects = sorted(path for path in folder.rglob("*") if path.is_file() and "/kv/" in str(path))
        assert objects
        for path in objects[:: 2 if half else 1]:
            path.unlink()
        async with found.member("second") as one:
            assert computed(one) == 0
            assert (await found.chat(one, RULES, LONG))["computed"]
            check(one._runtime)

    asyncio.run(run())


SILENCE = object()
NONSENSE: dict[str, object] = {
    "nothing": [],
    "no list": None,
    "numbers": [1, 2, 3],
    "a circle": [HotStretch(0, b"r" * 32, bytes(64))],
    "half a token": [HotStretch(-1, b"r" * 32, bytes(63))],
    "unknown prompts": [HotStretch(-1, b"r" * 32, bytes(640)), HotStretch(0, b"r" * 32, bytes(64))],
    "no root": [HotStretch(-1, b"", bytes(64))],
    "texts": [HotStretch(-1, "root", "tokens")],  # type: ignore[arg-type]
    "an error": OSError("broken"),
    "silence": SILENCE,
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_front_that_answers_nonsense(folder: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = NONSENSE[name]
    if given is SILENCE:
        monkeypatch.setattr(members, "HOT_SECONDS", 0.2)

    async def hottest(fingerprint: bytes, tokens: int) -> Any:
        if given is SILENCE:
            await asyncio.Event().wait()
        if isinstance(given, Exception):
            raise given
        return given

    async def run() -> None:
        found = fleet(f"file://{folder}", key_file)
        monkeypatch.setattr(found, "hottest", hottest)
        async with found.member("first") as one:
            assert one.figures().preloaded == 0
            assert (await found.chat(one, RULES, LONG))["computed"]
            check(one._runtime)

    asyncio.run(run())


def test_the_log_has_counts_only(folder: Path, key_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        found = fleet(f"file://{folder}", key_file)
        await used(found)
        capfd.readouterr()
        async with found.member("second"):
            pass

    asyncio.run(run())
    out, err = capfd.readouterr()
    said = [line for line in (out + err).splitlines() if "hot list" in line]
    assert len(said) == 1
    assert all(word in said[0] for word in ("listed", "prefixes", "tokens", "seconds")), said
    assert "words of the house" not in out + err


# ── a member that stops ──────────────────────────────────────────────────────────────────────────────────────────────


class Nobody(Nowhere):
    """The other processes of a fleet: there are none."""

    async def send(self, report: bytes, card: ModelCard) -> Sequence[bool]:
        return [False]

    async def status(self) -> dict[str, Any]:
        return {}

    async def metrics(self) -> dict[str, bytes]:
        return {}

    async def hottest(self, fingerprint: bytes, tokens: int) -> Sequence[HotStretch]:
        return ()


def files(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.rows"))


def test_a_reply_that_takes_too_long_ends_properly_and_what_it_computed_is_stored(tmp_path: Path) -> None:
    """Fault: Ray killed a replica whose reply took longer than the grace, and nothing was stored."""
    engine = partial(FakeEngine, slots=1, ctx=4096, block_size=8, delay=0.01)
    setup = FleetSetup(Settings(memory_budget=8 << 20, cache_dir=tmp_path, settle="off"), engine=engine)
    content = {"messages": [{"role": "user", "content": "Begin. " * 9}], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}

    async def run() -> tuple[str, int]:
        member = Member(setup, "a")
        await member.start(Nobody())
        sent, ended = b"", False
        async for messages in bridge.call(member.app, scope, json.dumps(content).encode()):
            sent += b"".join(message.get("body", b"") for message in messages)
            if sent.count(b"data: ") > 5 and not ended:
                ended = True
                member.end_replies()
        before = files(tmp_path)
        await member.close()
        return sent.decode(), files(tmp_path) - before

    sent, more = asyncio.run(run())
    assert "this reply is not complete" in sent
    assert sent.endswith("data: [DONE]\n\n")
    assert more > 0
