"""A server that stops: whoever is being served, waits or comes late gets an answer in the words of its own API."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from headstart.api.server import Server as Stoppable
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import END, FakeEngine
from live import Server, events, raw, serving, wait_until

HI: Any = [{"role": "user", "content": "hi"}]
LONG = 1900
"""Tokens of a reply that outlasts any drain here."""


@contextmanager
def slow(drain: float = 0.3, **options: Any) -> Iterator[Server]:
    """One slot, 20 ms a token, and a model that never ends a reply by itself."""
    engine = FakeEngine(slots=1, ctx=2048, delay=0.02)
    engine._likes[END.id] = 0
    with (
        Runtime(lambda: engine, Settings(memory_budget=32 << 20)) as runtime,
        serving(runtime, drain=drain, model_id="fake", **options) as server,
    ):
        yield server


def running(server: Server) -> bool:
    assert server.runtime is not None
    return bool(server.runtime.snapshot()["running"])


def waiting(server: Server, count: int) -> bool:
    assert server.runtime is not None
    return bool(server.runtime.snapshot()["waiting"] == count)


def chat(server: Server, **options: Any) -> Any:
    return server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=LONG, **options)


def respond(server: Server, **options: Any) -> Any:
    return server.openai.responses.create(model="fake", input="hi", max_output_tokens=LONG, **options)


def message(server: Server, **options: Any) -> Any:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        made = client.messages.create(model="claude", messages=HI, max_tokens=LONG, **options)
        return list(made) if options.get("stream") else made


VENDORS: list[tuple[Callable[..., Any], type[Exception], int]] = [
    (chat, openai.InternalServerError, 503),
    (respond, openai.InternalServerError, 503),
    (message, anthropic.InternalServerError, 529),
]


@pytest.mark.parametrize(("ask", "fault", "status"), VENDORS, ids=["chat", "responses", "messages"])
def test_an_sdk_is_told_of_a_reply_that_was_ended_and_of_one_that_never_began(
    ask: Callable[..., Any], fault: type[Exception], status: int
) -> None:
    with slow() as server, ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask, server)
        wait_until(lambda: running(server))
        second = pool.submit(ask, server)
        third = pool.submit(ask, server, stream=True)
        wait_until(lambda: waiting(server, 2))
        server.stop()
        for ended in (second, third, first):
            error: Any = ended.exception(30)
            assert isinstance(error, fault), repr(error)
            assert error.status_code == status  # type: ignore[attr-defined]
            assert "stopping" in str(error)
            assert int(error.response.headers["retry-after"]) >= 1  # type: ignore[attr-defined]


def test_a_chat_stream_has_what_was_said_an_error_and_its_end() -> None:
    with slow() as server:
        body = {"messages": HI, "max_tokens": LONG, "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            found = list(events(lines))
        assert len(found) > 5
        assert found[-1]["error"]["code"] == "unavailable"
        assert all(one["choices"][0]["delta"] for one in found[:-1])
    with slow() as server:
        stream = chat(server, stream=True)
        next(stream)
        server.stop()
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)


def test_a_response_stream_fails_with_what_was_said_in_it() -> None:
    with slow() as server:
        told = []
        for event in respond(server, stream=True):
            told.append(event)
            if len(told) == 1:
                server.stop()
        said = "".join(event.delta for event in told if event.type == "response.output_text.delta")
        assert told[-1].type == "response.failed"
        response = told[-1].response
        assert response.status == "failed"
        assert "stopping" in response.error.message
        assert len(said) > 5
        assert response.output[0].content[0].text == said
        assert response.output[0].status == "incomplete"
        assert [event.sequence_number for event in told] == list(range(len(told)))


def test_a_message_stream_ends_with_an_overloaded_error() -> None:
    with slow() as server:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            stream = client.messages.create(model="claude", messages=HI, max_tokens=LONG, stream=True)
            assert next(stream).type == "message_start"
            server.stop()
            said: list[Any] = []
            with pytest.raises(anthropic.APIStatusError) as caught:
                said.extend(stream)
        assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
        assert sum(event.type == "content_block_delta" for event in said) >= 1


def test_what_ends_in_time_is_complete_and_whoever_comes_meanwhile_is_refused() -> None:
    with slow(drain=30) as server, ThreadPoolExecutor(1) as pool:
        body = {"messages": HI, "max_tokens": 60}
        whole: Future[httpx.Response] = pool.submit(server.http.post, "/v1/chat/completions", json=body)
        wait_until(lambda: running(server))
        server.stop()
        wait_until(lambda: server.http.get("/health").status_code == 503)
        health = server.http.get("/health")
        assert health.json()["error"]["message"] == "The server is stopping"
        late = server.http.post("/v1/chat/completions", json=body)
        for answer in (health, late):
            assert answer.status_code == 503
            assert answer.headers["connection"] == "close"
            assert int(answer.headers["retry-after"]) >= 1
        assert not whole.done()
        assert len(whole.result(30).json()["choices"][0]["message"]["content"]) == 60


def test_who_connects_in_the_last_moment_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connected in the kernel's queue, which is reset when the socket is closed, and not taken in yet."""
    close, late = Stoppable._close, list[socket.socket]()

    async def closing(self: Stoppable) -> bool:
        done = await close(self)
        late.extend(raw(server, "/v1/chat/completions", {"messages": HI}) for _ in range(60))
        return done

    monkeypatch.setattr(Stoppable, "_close", closing)
    with slow() as server:
        server.stop()
        wait_until(lambda: len(late) == 60)
        for one in late:
            with one, one.makefile("rb") as answer:
                assert answer.readline().split()[1] == b"503"


def test_a_body_that_is_still_coming_in_is_not_waited_for() -> None:
    with slow(drain=30) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as line:
            line.settimeout(20)
            line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
            wait_until(lambda: server.metric("vllm:num_requests_waiting") == 0)
            server.stop()
            answer = b""
            while part := line.recv(4096):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5" in head
        assert json.loads(body)["error"]["code"] == "unavailable"


def test_neither_an_idle_connection_nor_a_client_that_does_not_read_holds_the_end() -> None:
    """That the server ends by itself is what `serving` asserts."""
    with slow(drain=0.2) as server:
        idle = httpx.Client(base_url=server.url)
        assert idle.get("/health").status_code == 200
        body = {"messages": HI, "max_tokens": LONG, "stream": True, "logprobs": True, "top_logprobs": 20}
        with raw(server, "/v1/chat/completions", body) as line:
            wait_until(lambda: running(server))
            server.stop()
            wait_until(lambda: not _listens(server), 20)
            line.settimeout(20)
        idle.close()


def _listens(server: Server) -> bool:
    try:
        httpx.get(f"{server.url}/health")
    except httpx.TransportError:
        return False
    return True


def test_a_stop_while_a_body_is_understood_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar can take seconds to compile, and nobody waits for it."""
    begun, go = threading.Event(), threading.Event()
    with slow(drain=30) as server, ThreadPoolExecutor(1) as pool:
        assert server.runtime is not None
        inner = server.runtime.submit

        def submit(*args: Any) -> Any:
            begun.set()
            assert go.wait(30)
            return inner(*args)

        monkeypatch.setattr(server.runtime, "submit", submit)
        answer = pool.submit(server.http.post, "/v1/chat/completions", json={"messages": HI, "max_tokens": 2})
        assert begun.wait(30)
        server.stop()
        assert answer.result(30).status_code == 503
        go.set()
        wait_until(server.idle)
