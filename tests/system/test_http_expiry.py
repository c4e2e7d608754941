"""Over HTTP: what callers have said is nowhere any more once its time has come, or once somebody has deleted it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.api.auth import Keys
from headstart.cli.main import main
from headstart.config import Settings
from headstart.errors import ConfigError
from headstart.serving import scheduler, settle
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers import write_behind
from live import Server, idle, serving, wait_until
from remains import DAY, START, Clock, kept, mark, marked, stored

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "POLL", 0.02)
    monkeypatch.setattr(scheduler, "IDLE_POLL", 0.05)
    monkeypatch.setattr(settle, "AFTER", 0.01)


@contextmanager
def served(clock: Clock, folder: Path | None = None, *, keys: Path | None = None, **options: Any) -> Iterator[Server]:
    given = {name: options.pop(name) for name in {"isolate"} & options.keys()}
    settings = Settings(**{"memory_budget": 1 << 20, "cache_dir": folder, **options})
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=4096), settings, clock=clock) as runtime,
        serving(runtime, model_id="fake", api_keys=Keys((), keys), **given) as server,
    ):
        yield server


def looked(server: Server) -> None:
    """Waits until the server has looked for what is due."""
    runtime = server.runtime
    assert runtime is not None
    expiry, disk, version = runtime.scheduler.expiry, runtime.cache.disk, runtime.cache.store.terms.version
    offload, slots = runtime.cache.store.offload, runtime.scheduler.slots
    wait_until(lambda: idle(runtime))
    runtime.scheduler.wake()
    wait_until(lambda: expiry.pause > 0 and expiry._version == version and runtime.scheduler.idle)
    wait_until(lambda: not (any(slot.dirty for slot in slots) or offload.writing or offload._queued))
    if isinstance(disk, write_behind.WriteBehind):
        look, clock = runtime.cache.store.terms.look, runtime.clock
        wait_until(
            lambda: disk._upkeep.terms_seen == version and abs(disk._upkeep.looked - clock()) < look and not disk._notices
        )


def respond(server: Server, text: str, before: str | None = None, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"input": text, "max_output_tokens": 4, "previous_response_id": before}
    return server.post("/v1/responses", json=body, headers=headers)


def told(server: Server, id: str, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return server.http.get(f"/v1/responses/{id}", headers=headers).status_code


def say_everywhere(server: Server) -> int:
    """Says a mark of its own on each route that takes text; how many that were."""
    schema = {"type": "object", "properties": {mark(9): {"type": "string"}}}
    chat = {"max_tokens": 4, "tools": [TOOL | {"function": TOOL["function"] | {"description": marked(6)}}]}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": marked(0)}], "max_tokens": 4}),
        ("/v1/messages", {"model": "fake", "messages": [{"role": "user", "content": marked(1)}], "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": marked(2)}]}),
        ("/v1/responses", {"input": marked(3), "max_output_tokens": 4}),
        ("/v1/completions", {"prompt": marked(4), "max_tokens": 4}),
        ("/tokenize", {"content": marked(5)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Look."}], **chat}),
        ("/apply-template", {"messages": [{"role": "user", "content": marked(7)}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": marked(8)}], "max_tokens": 4, "stream": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "As JSON."}], "max_tokens": 4, "json_schema": schema},
        ),
        ("/headstart/explain", {"a": {"messages": [{"role": "user", "content": marked(10)}]}, "b": {"messages": []}}),
        ("/completion", {"prompt": marked(11), "n_predict": 4}),
    ]
    for path, body in calls:
        response = server.post(path, json=body)
        assert response.status_code == (400 if path == "/headstart/explain" else 200), f"{path}: {response.text}"
    return len(calls)


def test_no_route_keeps_what_it_was_told(tmp_path: Path) -> None:
    clock = Clock()
    with served(clock, tmp_path, expire=7 * DAY) as server:
        marks = [mark(number) for number in range(say_everywhere(server))]
        looked(server)
        there = kept(server.app, marks)
        assert there >= {mark(number) for number in (0, 1, 3, 4, 5, 6, 8, 9)}, "else this shows nothing"
        assert stored(tmp_path, marks)
        clock.now += 7 * DAY
        looked(server)
        server.http.get("/health")  # in place of the last request
        assert kept(server.app, marks) | stored(tmp_path, marks) == set()


def test_nothing_comes_back_after_all_was_deleted(tmp_path: Path) -> None:
    with served(Clock(time.time() - DAY), tmp_path) as server:
        marks = [mark(number) for number in range(say_everywhere(server))]
        looked(server)
        id = respond(server, marked(20)).json()["id"]
        with pytest.raises(SystemExit) as end:
            main(["cache", "rm", "--all", "--cache-dir", str(tmp_path)])
        assert end.value.code == 0
        wait_until(lambda: told(server, id) == 404)
        assert respond(server, "And then?", id).json()["error"]["code"] == "previous_response_not_found"
        wait_until(lambda: not kept(server.app, [*marks, mark(20)]))
        assert not stored(tmp_path, [*marks, mark(20)])


def test_a_response_is_as_old_as_the_first_of_its_line() -> None:
    clock = Clock()
    with served(clock, expire=10 * DAY) as server:
        first = respond(server, marked(0)).json()["id"]
        clock.now += 6 * DAY
        second = respond(server, "And then?", first).json()["id"]
        other = respond(server, marked(1)).json()["id"]
        looked(server)
        assert [told(server, id) for id in (first, second, other)] == [200, 200, 200]
        clock.now += 5 * DAY
        looked(server)
        assert [told(server, id) for id in (first, second, other)] == [404, 404, 200]
        clock.now += 6 * DAY
        looked(server)
        assert told(server, other) == 404


def test_a_stored_response_quotes_no_older_text() -> None:
    clock = Clock()
    with served(clock, expire=10 * DAY) as server:
        for number in (0, 1):
            clock.now += 4 * DAY
            body = {"instructions": f"Today is {marked(number)}", "input": "Name all rivers of the country. " * 8}
            answer = server.post("/v1/responses", json={**body, "max_output_tokens": 4}).json()
        assert mark(0) in answer["headstart"]["diverged_at"]["previous"]
        assert server.http.get(f"/v1/responses/{answer['id']}").json()["headstart"]["diverged_at"]["previous"] is None
        clock.now += 7 * DAY
        looked(server)
        server.http.get("/health")  # in place of the last request
        assert kept(server.app, [mark(0), mark(1)]) == {mark(1)}


# ── terms of keys ────────────────────────────────────────────────────────────────────────────────────────────────────


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


@pytest.mark.parametrize("isolate", ["key", "user"])
def test_keys_have_terms_of_their_own(tmp_path: Path, isolate: str) -> None:
    keys, clock = tmp_path / "keys", Clock()
    write(keys, "alice = key-a expire=2d\nalice = key-b\nbob = key-c\nkey-d expire=3d\n")
    folder = tmp_path / "cache"
    with served(clock, folder, keys=keys, isolate=isolate, expire=9 * DAY) as server:
        ids = {key: respond(server, marked(number), key=key).json()["id"] for number, key in enumerate(KEYS)}
        looked(server)
        for day, left in ((1.5, "abcd"), (2, "cd"), (3, "c")):
            clock.now = START + day * DAY
            looked(server)
            assert [key[-1] for key, id in ids.items() if told(server, id, key) == 200] == list(left)
            assert stored(folder, [mark(number) for number in range(4)]) == {mark("abcd".index(key)) for key in left}
        write(keys, "bob = key-c expire=1d  # at once, also of what is there\n")
        assert told(server, ids["key-c"], "key-c") in (200, 404)
        looked(server)
        assert told(server, ids["key-c"], "key-c") == 404
        assert not stored(folder, [mark(number) for number in range(4)])


KEYS = ("key-a", "key-b", "key-c", "key-d")


def test_where_nobody_is_kept_apart_the_shortest_term_is_everybodys(tmp_path: Path) -> None:
    keys, clock = tmp_path / "keys", Clock()
    write(keys, "alice = key-a expire=5d\nbob = key-c\n")
    with served(clock, keys=keys, isolate="none") as server:
        ids = [respond(server, marked(number), key="key-c").json()["id"] for number in range(2)]
        clock.now += 5 * DAY
        looked(server)
        assert [told(server, id, "key-c") for id in ids] == [404, 404]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("key-a expire=", "line 1: write `key` or `name = key`"),
        ("key-a expire=never", "line 1: expire='never' is not a time; write it like 7d, 12h or 90min"),
        ("key-a expire=0d", "line 1: expire='0d' is not a time"),
        ("alice = key-a keep=7d", "`expire=7d` may follow"),
        ("expire=7d", "line 1: `expire=7d` must follow a key; --expire sets it for all keys."),
        ("expire = 7d", "line 1: `expire=7d` must follow a key"),
        ("alice = expire=7d", "line 1: `expire=7d` must follow a key"),
    ],
)
def test_a_term_that_makes_no_sense_is_named(tmp_path: Path, line: str, said: str) -> None:
    write(tmp_path / "keys", line)
    with pytest.raises(ConfigError) as caught:
        Keys((), tmp_path / "keys")
    assert said in str(caught.value)
