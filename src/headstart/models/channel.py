"""Channel: what the front and the process of a model say to each other, over one pair of sockets.

front ──▶ process   the set-up, once; then lines: `+` with a connection (a file descriptor), `stop SECONDS`
process ──▶ front   lines of JSON: `{"progress": 0.4}`, then `{"ready": {…}}` or `{"failed": "…"}`

When one side ends, the other one reads the end of the stream. Nothing of it has a name in the file system, so nobody else can
connect, and nothing stays behind.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headstart.api.served_models import ServedModel
from headstart.config import Settings
from headstart.interfaces.engine import Sampling
from headstart.models.passed import PassedKey
from headstart.observe.logs import LogFormat

_LENGTH = struct.Struct(">Q")
CONNECTION = b"+\n"
STOP = b"stop"


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What the process of a model must know.

    Attributes:
        settings: of the model, with the memory that it may use.
        names: of the model; the first one is in answers.
        tag: the digits that the ids of its responses begin with.
        isolate: name of a policy in `tenancy.POLICIES`.
        keep_noise: names of rules in `normalize.RULES` to leave out.
        known: the keys whose tenants have a limit of their own for what is kept.
        log_format: of its log.
    """

    settings: Settings
    names: tuple[str, ...]
    tag: str
    isolate: str
    keep_noise: tuple[str, ...] = ()
    known: tuple[PassedKey, ...] = field(default=(), repr=False)
    log_format: LogFormat = "console"


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """What a process says of its model when it is ready.

    Attributes:
        need: bytes that the model, its slots and its stored conversations may use.
        served: the model in lists of models.
    """

    need: int
    served: ServedModel

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> ReadyReport:
        given = value["served"]
        lists = {"aliases": tuple(given["aliases"]), "sampling": Sampling(**given["sampling"])}
        return cls(value["need"], ServedModel(**{**given, **lists}))


def send_setup(to: socket.socket, setup: ProcessSetup) -> None:
    """Sends the set-up. Blocks."""
    data = pickle.dumps(setup)
    to.sendall(_LENGTH.pack(len(data)) + data)


def receive_setup(of: socket.socket) -> ProcessSetup | None:
    """The set-up; None if the front ends before it sends one. Blocks."""
    head = _exactly(of, _LENGTH.size)
    data = None if head is None else _exactly(of, _LENGTH.unpack(head)[0])
    if data is None:
        return None
    setup = pickle.loads(data)  # of the process that has started this one
    assert isinstance(setup, ProcessSetup)
    return setup


def _exactly(of: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = of.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def line(**said: Any) -> bytes:
    """A line that a process says."""
    return json.dumps(said).encode() + b"\n"


class Commands:
    """Puts the lines of the front and the file descriptors beside them together again."""

    def __init__(self) -> None:
        self._rest = b""
        self._files: list[int] = []

    def take(self, data: bytes, files: Sequence[int]) -> list[tuple[str, Any]]:
        """The commands that are complete: `("connection", descriptor)` or `("stop", seconds)`."""
        self._files += files
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: list[tuple[str, Any]] = []
        for text in lines:
            word, _, rest = text.partition(b" ")
            if word + b"\n" == CONNECTION:
                found.append(("connection", self._files.pop(0)))
            elif word == STOP:
                found.append(("stop", float(rest)))
        return found
