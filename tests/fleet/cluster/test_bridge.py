"""The bridge: an HTTP call that crosses a stream of objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from headstart.fleet.cluster import bridge

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}


async def collected(stream: AsyncIterator[list[Message]]) -> list[list[Message]]:
    return [batch async for batch in stream]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (message["body"], b"!"):
        await send({"type": "http.response.body", "body": part, "more_body": part != b"!"})
        await asyncio.sleep(0)


def test_an_answer_arrives_whole_and_in_order() -> None:
    batches = asyncio.run(collected(bridge.call(echo, SCOPE, b"hello")))
    messages = [message for batch in batches for message in batch]
    assert [message["type"] for message in messages] == ["http.response.start"] + 2 * ["http.response.body"]
    assert b"".join(message.get("body", b"") for message in messages) == b"hello!"


def test_what_is_there_at_one_time_crosses_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for number in range(100):
            await send({"type": "http.response.body", "body": bytes([number]), "more_body": True})

    assert [len(batch) for batch in asyncio.run(collected(bridge.call(app, SCOPE, b"")))] == [100]


def test_an_app_without_an_answer_ends_the_stream() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        return

    assert asyncio.run(collected(bridge.call(app, SCOPE, b""))) == []


def test_an_error_of_the_app_is_an_error_of_the_stream() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("broken")

    async def run() -> None:
        stream = bridge.call(app, SCOPE, b"")
        assert len(await anext(stream)) == 1
        await anext(stream)

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())


def test_an_app_learns_that_its_client_has_gone() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])

    async def run() -> None:
        stream = bridge.call(app, SCOPE, b"")
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    assert seen == ["http.disconnect"]


def test_what_belongs_to_one_process_stays_there() -> None:
    scope = {**SCOPE, "state": object(), "extensions": {"x": object()}, "client": ("127.0.0.1", 1)}
    assert bridge.carried(scope) == {**SCOPE, "client": ("127.0.0.1", 1), "root_path": "", "buffered": True}
