"""Upstream: HTTP/1.1 to the process of a model, as the front speaks it. One request at a time on a connection.

The answer is passed on as it arrives. A client that reads slowly makes the process wait, as it would without the front.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import cast

import httptools

from headstart.errors import HeadstartError

FULL = 256 << 10
"""Bytes of an answer that wait for the client before the process must wait."""

HeaderPair = tuple[bytes, bytes]


class UpstreamGone(HeadstartError):
    """The process has closed the connection before its answer was complete."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The beginning of an answer: its status, and its headers with names in lower case."""

    status: int
    headers: tuple[HeaderPair, ...]


def request_head(method: str, target: bytes, headers: Iterable[HeaderPair]) -> bytes:
    """The first bytes of a request."""
    lines = [b"%s %s HTTP/1.1" % (method.encode("ascii"), target), *(b"%s: %s" % header for header in headers)]
    return b"\r\n".join([*lines, b"", b""])


class UpstreamConnection(asyncio.Protocol):
    """A connection to a process.

    Attributes:
        free: whether another request may be sent on it.
    """

    def __init__(self) -> None:
        self.free = True
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[HeaderPair] = []
        self._head: AnswerHead | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._over = False
        self._gone = False
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def open(self) -> bool:
        return not self._gone and self._transport is not None

    async def ask(self, head: bytes, body: bytes) -> AnswerHead:
        """Sends a request. Returns the beginning of its answer.

        Raises:
            UpstreamGone: the process has ended.
        """
        assert self.free
        self.free, self._head, self._over = False, None, False
        self._parser = httptools.HttpResponseParser(self)
        if self._gone or self._transport is None:
            raise UpstreamGone("The connection is closed.")
        self._transport.write(head + body)
        while self._head is None:
            if self._gone:
                raise UpstreamGone("The process ended before it answered.")
            await self._event()
        return self._head

    async def parts(self) -> AsyncIterator[bytes]:
        """The body of the answer, as it arrives. All that is there is one part.

        Raises:
            UpstreamGone: the process has ended before the body was complete.
        """
        while True:
            if self._parts:
                data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._size = 0
                self._flow()
                yield data
            elif self._over:
                self.free = not self._gone
                return
            elif self._gone:
                raise UpstreamGone("The process ended before its answer was complete.")
            else:
                await self._event()

    def close(self) -> None:
        """The process then ends the request that it answers here. Idempotent."""
        self.free = False
        if self._transport is not None:
            self._transport.abort()

    async def _event(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _flow(self) -> None:
        wants = self._size > FULL
        if self._transport is not None and wants != self._paused and not self._gone:
            self._paused = wants
            (self._transport.pause_reading if wants else self._transport.resume_reading)()

    # ── of asyncio ───────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone, self.free = True, False
        self._wake()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        self._flow()
        self._wake()

    # ── of the parser ────────────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if (status := self._parser.get_status_code()) >= 200:
            self._head = AnswerHead(status, tuple(self._headers))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._over = True
            if not self._parser.should_keep_alive():
                self.close()
