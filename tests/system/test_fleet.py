"""Real fleets on Ray Serve: routing, streams, keys, and processes that are killed. The engine is fake, all else is real."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

from fleets import RunningFleet, running
from harness import system, user
from live import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE = {"slots": 2, "ctx": 2048, "block_size": 8}
SLOW = {**ENGINE, "delay": 0.05}
KEY = "sk-of-the-fleet-0123456789"
RULES = "You answer in the words of the house, and never in others. " * 8


@pytest.fixture(scope="module", params=["handle", "direct"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with running(folder, replicas=2, engine=SLOW, keys=[KEY], direct=request.param == "direct") as found:
        yield found
        assert KEY not in found.log.read_text("utf-8", "replace"), "a key in the log"
        assert "words of the house" not in found.log.read_text("utf-8", "replace"), "a prompt in the log"


def conversation(name: str) -> list[dict[str, Any]]:
    return [system(f"{name}: {RULES}"), user("Begin.")]


def test_a_conversation_stays_where_its_cache_is(fleet: RunningFleet) -> None:
    for name in ("first", "second"):
        chat, served = conversation(name), []
        for turn in range(4):
            answer, tag = fleet.served(lambda chat=chat: fleet.chat(chat))
            served.append(tag)
            if turn:
                assert answer["headstart"]["computed"] < 64, "the conversation moved, or was not known"
            chat += [answer["choices"][0]["message"], user(f"Question {turn}.")]
        assert len(set(served)) == 1


def test_a_crowd_of_new_conversations_spreads(fleet: RunningFleet) -> None:
    before = fleet.replicas()
    threads = [threading.Thread(target=fleet.chat, args=[conversation(f"crowd {number}")]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    after = fleet.replicas()
    assert all(after[tag]["computed"] > one["computed"] for tag, one in before.items())


def test_every_dialect_and_route(fleet: RunningFleet) -> None:
    prompt = {"max_tokens": 8, "temperature": 0}
    chat = fleet.http.post("/v1/chat/completions", json={"messages": [user("Hi")], **prompt}).json()
    text = chat["choices"][0]["message"]["content"]
    messages = fleet.http.post("/v1/messages", json={"messages": [user("Hi")], "model": "demo", **prompt}).json()
    assert messages["content"][0]["text"] == text
    responses = fleet.http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 16, "temperature": 0}).json()
    assert responses["output"][0]["content"][0]["text"].startswith(text)
    plain = fleet.http.post("/v1/completions", json={"prompt": "Hi", **prompt}).json()
    assert len(plain["choices"][0]["text"]) > 0
    assert fleet.http.post("/completion", json={"prompt": "Hi", "n_predict": 8, "temperature": 0}).json()["content"]
    assert fleet.http.get("/v1/models").json()["data"]
    assert fleet.http.get("/health").status_code == 200
    assert fleet.http.get("/nowhere").status_code == 404
    assert fleet.http.post("/v1/chat/completions", content=b"{").status_code == 400


def test_a_response_is_continued_where_it_is_known(fleet: RunningFleet) -> None:
    for number in range(6):
        body = {"input": f"{number}: {RULES}", "max_output_tokens": 16, "temperature": 0}
        first = fleet.http.post("/v1/responses", json=body).json()
        again = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 16}
        assert fleet.http.post("/v1/responses", json=again).status_code == 200
        if not fleet.direct:  # there nobody tells the front the path
            assert fleet.http.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]


def test_a_request_is_explained_whichever_replica_served_it(fleet: RunningFleet) -> None:
    for number in range(4):
        chosen = {"x-request-id": f"own-{number}"} if number % 2 else {}
        body = {"messages": conversation(f"explained {number}"), "max_tokens": 2}
        answer = fleet.http.post("/v1/chat/completions", json=body, headers=chosen)
        id = answer.headers["x-request-id"]
        assert answer.headers.get_list("x-request-id") == answer.headers.get_list("request-id")
        assert not chosen or [id] == [*chosen.values()]
        for _ in range(3):
            assert fleet.http.get(f"/headstart/explain/{id}").json()["id"] == id
            assert fleet.http.get("/headstart/explain").json()["id"] == id


def test_streams_arrive_token_by_token(fleet: RunningFleet) -> None:
    body = {"messages": conversation("stream"), "max_tokens": 20, "ignore_eos": True, "stream": True}
    with fleet.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        chunks = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert chunks[-1] == "data: [DONE]"
    assert len(chunks) > 10


def test_keys(fleet: RunningFleet) -> None:
    url = f"http://127.0.0.1:{fleet.port}"
    body = {"messages": [user("Hi")], "max_tokens": 2}
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False).status_code == 401
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": KEY}, trust_env=False).status_code == 200
    assert httpx.get(f"{url}/headstart/fleet", trust_env=False).status_code == 401


def test_a_client_that_hangs_up_frees_its_slot(fleet: RunningFleet) -> None:
    body = {"messages": conversation("hang up"), "max_tokens": 1000, "temperature": 0, "stream": True, "ignore_eos": True}
    with fleet.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_until(lambda: sum(one["running"] for one in fleet.replicas().values()) == 1, 20)
        lines.close()  # which hangs up
    wait_until(lambda: sum(one["running"] for one in fleet.replicas().values()) == 0, 20)


def test_a_replica_that_is_killed_is_replaced(fleet: RunningFleet) -> None:
    """Its stream breaks, all other requests are answered, and a new replica comes."""
    chat = conversation("killed")
    _, tag = fleet.served(lambda: fleet.chat(chat))
    begun, broken = threading.Event(), threading.Event()

    def stream() -> None:
        body = {"messages": chat, "max_tokens": 1000, "temperature": 0, "stream": True, "ignore_eos": True}
        try:
            with fleet.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = []
                for line in answer.iter_lines():
                    begun.set()
                    lines.append(line)
            if not any("[DONE]" in line for line in lines):
                broken.set()
        except httpx.HTTPError:
            broken.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(20)
    assert fleet.replicas()[tag]["running"] == 1
    fleet.kill(tag)
    answers = [fleet.http.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 2}) for _ in range(30)]
    statuses = [answer.status_code for answer in answers]
    if not fleet.direct:  # there HAProxy has to notice it first
        assert {*statuses} == {200}
    assert statuses[-10:] == [200] * 10
    thread.join(60)
    assert not thread.is_alive(), "a stream hangs"
    assert broken.is_set(), "the reply was not complete, and its client was not told"
    wait_until(lambda: fleet.ready(2), 120)
    assert tag not in fleet.replicas()


def test_a_replica_that_hangs_does_not_hide_the_others(fleet: RunningFleet) -> None:
    hung, other = fleet.replicas().values()
    os.kill(hung["pid"], signal.SIGSTOP)
    try:

        def named() -> bool:
            try:
                found = fleet.http.get("/headstart/fleet", timeout=5).json()
                page = fleet.http.get("/headstart/fleet/metrics", timeout=5).text
            except httpx.HTTPError:  # it went to the one that hangs
                return False
            shown = [one["tag"] for one in found["replicas"]]
            up = f'headstart:replica_up{{replica="{other["tag"]}"}} 1.0' in page
            down = f'headstart:replica_up{{replica="{hung["tag"]}"}} 0.0' in page
            return found["silent"]["replicas"] == [hung["tag"]] and shown == [other["tag"]] and up and down

        wait_until(named, 60)
    finally:
        os.kill(hung["pid"], signal.SIGCONT)
    wait_until(lambda: fleet.ready(2), 120)


@pytest.mark.parametrize("name", ["ServeReplica:headstart:Front", "ServeController"])
def test_ray_processes_that_are_killed_come_back(fleet: RunningFleet, name: str) -> None:
    killed = fleet.processes(name)
    assert killed
    for process in killed:
        process.send_signal(signal.SIGKILL)
    chat = conversation(name)

    def answered() -> bool:
        try:
            return fleet.http.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 2}).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answered, 120)
    wait_until(lambda: fleet.ready(2), 120)
    _, first = fleet.served(lambda: fleet.chat(chat))
    answer, second = fleet.served(lambda: fleet.chat([*chat, user("And?")]))
    assert (first, answer["headstart"]["computed"] < 64) == (second, True), "the new front does not know what the replicas hold"
