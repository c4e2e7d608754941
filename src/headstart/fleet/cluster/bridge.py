"""Bridge: carries one HTTP call over a stream of Python objects, between the process that has the client and the app.

The caller has read the whole body. What the app sends comes back in batches: all that is there at one time is one batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope

CARRIED = (
    *("type", "asgi", "http_version", "method", "scheme"),
    *("path", "raw_path", "query_string", "headers", "client", "server"),
)
"""The parts of a scope that cross the bridge. Others belong to the process that has the client."""


def carried(scope: Scope) -> dict[str, Any]:
    """The scope as it crosses the bridge. `buffered`: what is sent waits in memory, however much, until the client takes it."""
    return {name: scope[name] for name in CARRIED if name in scope} | {"root_path": "", "buffered": True}


async def call(app: ASGIApp, scope: Mapping[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
    """Calls an app, and yields what it sends. If the generator is closed early, the app sees that its client has gone."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(dict(scope), receive, send)
        finally:
            sent.put_nowait(None)

    task = asyncio.ensure_future(run())
    over = False
    try:
        while not over:
            batch = [await sent.get()]
            while not sent.empty():
                batch.append(sent.get_nowait())
            over = batch[-1] is None
            if messages := [message for message in batch if message is not None]:
                yield messages
        await task
    finally:
        gone.set()
        with suppress(Exception):
            await asyncio.shield(task)
