"""A server's events, written by a test: for the screens of `headstart top`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, get_args

from headstart.cli.top.feed import Update
from headstart.cli.top.state import TopState
from headstart.cli.top.stream import ReadBatch


def words_of(literal: Any) -> set[str]:
    """The words that a type of literals allows."""
    found: set[str] = set()
    for one in get_args(literal):
        found |= words_of(one) if get_args(one) else {one}
    return found


def identity(number: int) -> str:
    return number.to_bytes(32, "big").hex()


def entry(number: int, parent: int | None = None, *, tiers: str = "memory", **more: Any) -> dict[str, Any]:
    """An entry as an event describes it. The first block of a prompt has no parent."""
    above = None if parent is None else identity(parent)
    known = {"id": identity(number), "owner": "", "parent": above, "start": 0 if parent is None else 64 * number, "tokens": 64}
    return {**known, "tiers": dict.fromkeys(tiers.split(), True), "pinned": False, "seconds_ago": 1.0, **more}


def soon(number: int, why: str = "least_value") -> dict[str, str]:
    """An entry that is evicted next."""
    return {"id": identity(number), "why": why}


def request(number: int, state: str = "stop", **more: Any) -> dict[str, Any]:
    """A request whose prompt of 1,000 tokens was cached, except for 100."""
    known = {"number": number, "id": f"req_{number}", "owner": "", "choice": 0, "state": state, "at": 1e9 + number}
    known["prompt"] = 1000
    if state in ("queued", "cancelled", "failed"):
        return {**known, **more}
    if state == "prefill":
        return {**known, "slot": 0, "cached": 900, "tiers": {"disk": 300}, "reused": None, **more}
    seconds = {"queued": 0.01, "prefill": 0.2, "ttft": 0.21, "decode": 1.5}
    figures = {"cached": 900, "live": 500, "tiers": {"memory": 300, "disk": 100}, "computed": 100, "completion": 31}
    return {**known, **figures, "cause": None, "recomputed": 0, "seconds": seconds, **more}


def batch(*events: tuple[str, Any], time: float = 1e9 + 60) -> ReadBatch:
    return ReadBatch(events, "x-1", time)


def encoded(*batches: ReadBatch) -> bytes:
    """The bytes of a stream."""
    found = b""
    for number, one in enumerate(batches):
        for name, value in one.events:
            found += f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()
        found += f'id: x-{number}\nevent: mark\ndata: {{"time":{one.time}}}\n\n'.encode()
    return found


class Script:
    """A source of updates that a test writes."""

    def __init__(self, *updates: Update) -> None:
        self._first = updates
        self._emit: Callable[[Update], None] | None = None
        self._ready = threading.Event()
        self.stopped = threading.Event()

    def run(self, emit: Callable[[Update], None], stopped: threading.Event) -> None:
        for update in self._first:
            emit(update)
        self._emit = emit
        self._ready.set()
        stopped.wait()
        self.stopped.set()

    def send(self, update: Update) -> None:
        assert self._ready.wait(60)
        assert self._emit is not None
        self._emit(update)


def state(*events: tuple[str, Any]) -> TopState:
    return TopState().then(batch(("snapshot", {}), *events))


def chat(count: int, first: int = 0, parent: int | None = None, **more: Any) -> Sequence[dict[str, Any]]:
    """Entries that continue each other."""
    numbers = range(first, first + count)
    return [entry(number, parent if number == first else number - 1, **more) for number in numbers]
