"""The parser reads any answers, however the network cuts them, from a real socket."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from valkey import exceptions

from headstart.tiers.shared.resp import BIG, PlacingParser
from headstart.tiers.shared.store import BEHIND, Placed

SMALL = st.one_of(
    st.none(), st.integers(-(1 << 62), 1 << 62), st.binary(max_size=50), st.integers(0, 3 * BIG).map(lambda size: blob(size))
)
ANSWERS = st.lists(st.one_of(SMALL, st.lists(SMALL, max_size=4)), max_size=6)


def blob(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()


def packed(answer: Any) -> bytes:
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, bytes):
        return b"$%d\r\n%b\r\n" % (len(answer), answer)
    return b"*%d\r\n%b" % (len(answer), b"".join(map(packed, answer)))


def plain(answer: Any) -> Any:
    if isinstance(answer, memoryview):
        assert len(answer) >= BIG
        return bytes(answer)
    return [plain(one) for one in answer] if isinstance(answer, list) else answer


class Connected:
    """A parser at one end of a socket; the other end sends what it is told to, in parts."""

    def __init__(self, data: bytes, cuts: list[int], timeout: float = 10.0, pause: float = 0.0005) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.ours.settimeout(timeout)
        self.parser = PlacingParser()
        self.parser.on_connect(SimpleNamespace(_sock=self.ours, socket_timeout=timeout))
        self._pause = pause
        self._thread = threading.Thread(target=self._send, args=(data, cuts))
        self._thread.start()

    def _send(self, data: bytes, cuts: list[int]) -> None:
        places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
        for start, end in pairwise(places):
            with contextlib.suppress(ConnectionError):
                self._theirs.sendall(data[start:end])
                time.sleep(self._pause)
        self._theirs.close()

    def __enter__(self) -> PlacingParser:
        return self.parser

    def __exit__(self, *_: object) -> None:
        self.ours.close()  # nobody waits for the rest
        self._thread.join()


@given(ANSWERS, st.lists(st.integers(0, 4 * BIG), max_size=6))
def test_answers_are_read_however_they_are_cut(answers: list[Any], cuts: list[int]) -> None:
    with Connected(b"".join(map(packed, answers)), cuts) as parser:
        for answer in answers:
            assert plain(parser.read_response()) == answer
        with pytest.raises(exceptions.ConnectionError, match="closed"):
            parser.read_response()


@given(
    st.lists(st.tuples(st.integers(0, 2 * BIG), st.integers(0, 2 * BIG)), max_size=4),
    st.integers(0, 100),
    st.lists(st.integers(0, 4 * BIG), max_size=6),
)
def test_values_go_where_they_are_wanted(all: list[tuple[int, int]], at: int, cuts: list[int]) -> None:
    outs = [np.zeros(space, np.uint8) for _, space in all]
    with Connected(b"".join(packed(blob(size)) for size, _ in all) + b"+OK\r\n", cuts) as parser:
        parser.places.extend((out.data, at) for out in outs)
        for (size, space), out in zip(all, outs, strict=True):
            placed = parser.read_response()
            assert isinstance(placed, Placed)
            longer = size > at + space
            middle, whole = out.tobytes() if longer else b"", blob(size)
            assert bytes(placed.head) + middle + bytes(placed.tail) == (whole[: at + space + BEHIND] if longer else whole)
        assert parser.read_response() == b"OK"
        assert not parser.can_read(0) or parser.can_read(5)


def test_errors_among_answers_are_returned_and_the_rest_follows() -> None:
    with Connected(b"-OOM command not allowed\r\n-WRONGTYPE no\r\n+OK\r\n", []) as parser:
        parser.places.append((memoryview(bytearray(5)), 0))
        assert isinstance(parser.read_response(), exceptions.OutOfMemoryError)
        assert type(parser.read_response()) is exceptions.ResponseError
        assert parser.read_response() == b"OK"


@pytest.mark.parametrize("data", [b"hello\r\n", b"HTTP/1.1 400 Bad Request\r\n", b"x" * 40_000])
def test_other_protocols_are_refused(data: bytes) -> None:
    with Connected(data, []) as parser, pytest.raises(exceptions.InvalidResponse):
        parser.read_response()


def test_a_value_that_ends_early_is_an_error() -> None:
    with Connected(packed(blob(100_000))[:-5], []) as parser, pytest.raises(exceptions.ConnectionError):
        parser.read_response()


def test_a_silent_socket_costs_the_time_limit() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    parser = PlacingParser()
    parser.on_connect(SimpleNamespace(_sock=ours, socket_timeout=0.05))
    theirs.sendall(b"$100000\r\nabc")
    assert parser.can_read(1)
    with pytest.raises(TimeoutError):
        parser.read_response()
    ours.close()
    theirs.close()


def test_a_trickle_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.tiers.shared.resp.SLOWEST", 1 << 40)
    cuts = list(range(1000, 100_000, 1000))
    connected = Connected(packed(blob(100_000)), cuts, timeout=0.2, pause=0.005)
    with connected as parser, pytest.raises(exceptions.TimeoutError, match="slowly"):
        parser.read_response()


@pytest.mark.parametrize(
    ("data", "at_once"),
    [
        (b":" + b"0" * 400 + b"\r\n", 0),
        (b"*1\r\n*1\r\n*100\r\n" + b":0\r\n" * 100, 0),
        (b":0\r\n" * 100, 0),
        (b"$400\r\n" + b"x" * 400 + b"\r\n", 0),
        (packed(b"x" * (BEHIND + 10_000)), BEHIND + 9000),
    ],
    ids=["one line", "a list", "many answers to one call", "a value", "what is read over"],
)
def test_bytes_that_drip_are_no_progress(data: bytes, at_once: int) -> None:
    """Fault: a byte now and then held a request for as long as the server liked."""
    began = time.monotonic()
    cuts = list(range(at_once, len(data)))
    with Connected(data, cuts, timeout=0.1, pause=0.01) as parser:
        parser.places.append((memoryview(bytearray(10)), 0))
        with pytest.raises(exceptions.TimeoutError, match="slowly"):
            [parser.read_response() for _ in range(100)]
    assert time.monotonic() - began < 2, "all of it takes 4 s or more"


def test_a_size_that_no_value_has_is_refused() -> None:
    with Connected(b"$1000000000000\r\nabc", []) as parser, pytest.raises(exceptions.InvalidResponse):
        parser.read_response()


def test_a_process_with_many_open_files_can_read() -> None:
    """`select` takes no socket with a number above 1,023."""
    one, other = socket.socketpair()
    number = fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1100)
    with one, other, socket.socket(fileno=number) as ours:
        parser = PlacingParser()
        parser.on_connect(SimpleNamespace(_sock=ours, socket_timeout=10.0))
        assert not parser.can_read(0)
        other.sendall(b":1\r\n")
        assert parser.can_read(10)
        assert parser.read_response() == 1
