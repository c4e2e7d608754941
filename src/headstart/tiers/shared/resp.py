"""RESP, the protocol of Valkey, for large values: a parser and a packer for the connections of the library `valkey`.

The library's parsers copy a value two or three times. This parser receives a value where it belongs: in memory of its own, or
where the caller wants its payload. docs/decisions/2026-11-24-own-resp-parser.md has the measurements.
"""

from __future__ import annotations

import select
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from valkey.connection import DefaultParser
from valkey.exceptions import ConnectionError as Broken
from valkey.exceptions import InvalidResponse
from valkey.exceptions import TimeoutError as NoAnswer

from headstart.tiers.shared.store import BEHIND, MOST, SLOWEST, Blob, Placed, room

BIG = 1 << 16
"""Bytes from which a value gets memory of its own. Smaller ones are `bytes`."""
LARGEST = 512 << 20
"""Bytes of the largest value that Valkey stores."""
STEP = 1 << 20
"""Most bytes that are sent within one time limit."""
_AHEAD = 1 << 14  # bytes that are read beside a value; they are copied once more


class PlacingParser:
    """Reads answers in RESP 2. It has the methods that a connection of the library calls, which closes itself after an error.

    The time limit holds for all answers to a call together, and longer by the time that they take at `SLOWEST`: a server that
    sends a byte now and then must not hold whoever waits. The library asks `can_read` before each call.

    Args:
        received: called whenever some bytes have arrived.

    Attributes:
        places: for the next answers, where the bytes of a value from a position on go: such an answer is a `Placed`, or None.
    """

    def __init__(self, socket_read_size: int = 0, received: Callable[[], None] = lambda: None) -> None:
        self.places: deque[tuple[Blob, int]] = deque()
        self._arrived = received
        self._data = bytearray(_AHEAD)
        self._view = memoryview(self._data)
        self._start = self._end = 0  # of what was read ahead

    def on_connect(self, connection: Any) -> None:
        connection.parser = self
        self._socket = connection._sock  # as the library's own parsers do
        self._limit: float = connection.socket_timeout
        self._late: float | None = None  # when the answers to this call come too slowly; None before the first
        self._start = self._end = 0
        self.places.clear()

    def on_disconnect(self) -> None:
        """Nothing: a thread that still reads finds the socket closed."""

    def can_read(self, timeout: float) -> bool:
        """Whether there is something to read, or the connection was closed. A call begins."""
        self._late = None
        if self._start < self._end or getattr(self._socket, "pending", int)():
            return True
        return self._has_data(timeout) and not (isinstance(self._socket, ssl.SSLSocket) and self._only_tickets())

    def _has_data(self, timeout: float = 0.0) -> bool:
        poll = select.poll()  # `select` refuses sockets with numbers above 1,023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout))

    def _only_tickets(self) -> bool:
        """Whether what has come over TLS has no content: after the handshake, a server sends session tickets."""
        before = self._socket.gettimeout()
        self._socket.settimeout(0.0)
        try:
            self._start, self._end = 0, self._socket.recv_into(self._view)
            return False
        except ssl.SSLWantReadError:
            return True
        finally:
            self._socket.settimeout(before)

    def read_response(self, disable_decoding: bool = False) -> Any:
        """The next answer: bytes, a Blob, a number, a list, None, an error, or a `Placed`."""
        place = self.places.popleft() if self.places else None
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return None if rest == b"-1" else self._bulk(int(rest), place)
        if kind == b"*":
            return None if rest == b"-1" else [self.read_response() for _ in range(int(rest))]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind != b"-":
            raise InvalidResponse("not an answer in RESP")
        parse: Any = DefaultParser.parse_error  # the library's hints are incomplete
        error = parse(rest.decode("utf-8", "replace"))
        if isinstance(error, Broken):
            raise error
        return error  # among the answers to several commands; the others follow

    def _line(self) -> bytes:
        while (found := self._data.find(b"\r\n", self._start, self._end)) < 0:
            self._more()
        line = bytes(self._view[self._start : found])
        self._start = found + 2
        return line

    def _bulk(self, size: int, place: tuple[Blob, int] | None) -> bytes | Blob | Placed:
        if size > LARGEST:
            raise InvalidResponse("a value that is too large")
        if place is None or size <= place[1] + len(place[0]):
            whole = self._filled(room(size if place is not None else min(size, MOST)))
            self._skip(size + 2 - len(whole))
            if place is None:
                return whole if size >= BIG else bytes(whole)
            return Placed(whole, memoryview(b""))
        out, at = place
        head = self._filled(room(at))
        self._filled(out)
        tail = self._filled(room(min(size - at - len(out), BEHIND)))
        self._skip(size + 2 - at - len(out) - len(tail))
        return Placed(head, tail)

    def _skip(self, count: int) -> None:
        """Reads over `count` bytes."""
        waste, late = room(min(count, BIG)), self._late
        while count:
            count -= len(self._filled(waste[: min(count, len(waste))]))
            self._late = late  # nobody waits for these

    def _filled(self, out: Blob) -> Blob:
        """Fills `out` with what was read ahead, and what comes."""
        done = min(len(out), self._end - self._start)
        out[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(out):
            if len(out) - done >= _AHEAD:
                done += self._receive(out[done:])
            else:
                self._more()
                step = min(len(out) - done, self._end - self._start)
                out[done : done + step] = self._view[self._start : self._start + step]
                self._start += step
                done += step
        return out

    def _more(self) -> None:
        """Reads ahead at least one byte."""
        left = self._end - self._start
        if left == _AHEAD:
            raise InvalidResponse("a line without end")
        self._view[:left] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, left
        self._end += self._receive(self._view[left:])

    def _receive(self, out: Blob) -> int:
        """Receives at least one byte."""
        now = time.monotonic()
        if self._late is None:
            self._late = now + self._limit
        elif now > self._late and not self._has_data():  # if it has, this process was slow, not the server
            raise NoAnswer("the answer comes too slowly")
        count: int = self._socket.recv_into(out)
        if not count:
            raise Broken("the server closed the connection")
        self._late += count / SLOWEST
        self._arrived()
        return count


class SteppedPacker:
    """Packs commands in RESP. Large values are sent as they are, in steps: the time limit holds for each step."""

    def pack(self, *args: str | bytes | memoryview | int) -> list[bytes | memoryview]:
        packed: list[bytes | memoryview] = []
        small = b"*%d\r\n" % len(args)
        for arg in args:
            if isinstance(arg, memoryview):
                packed += [small + b"$%d\r\n" % len(arg), *_steps(arg)]
                small = b"\r\n"
            else:
                data = arg if isinstance(arg, bytes) else str(arg).encode()
                small += b"$%d\r\n%b\r\n" % (len(data), data)
        return [*packed, small]


def _steps(data: memoryview) -> Iterator[memoryview]:
    return (data[at : at + STEP] for at in range(0, len(data), STEP))
