"""Channel: what the front and the process of a model say to each other, over one pair of sockets.

front ──▶ process   the set-up, once; then lines: `+` with a connection (a file descriptor), `stop SECONDS`, `unload SECONDS`
process ──▶ front   lines of JSON: `{"progress": 0.4}`, then `{"ready": {…}}` or `{"failed": "…"}`; after `unload` a last line
                    `{"handover": {…}}`, and the bytes that it announces

When one side ends, the other one reads the end of the stream. Nothing of it has a name in the file system, so nobody else can
connect, and nothing stays behind.
"""

from __future__ import annotations

import json
import math
import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headstart.api.openai_responses.handover import Handover, PackedConversation
from headstart.api.served_models import ServedModel
from headstart.config import Settings
from headstart.interfaces.sampling import Sampling
from headstart.interfaces.traits import EngineProof, Traits
from headstart.models.passed import PassedKey
from headstart.observe.logs import LogFormat

_LENGTH = struct.Struct(">Q")
CONNECTION = b"+\n"
STOP, UNLOAD = b"stop", b"unload"
"""Both end the process. After `unload`, what a later process of the model needs is handed over."""


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
        together, proofs: as in `EngineOptions`.
        handed: what the last process of this model has handed over.
    """

    settings: Settings
    names: tuple[str, ...]
    tag: str
    isolate: str
    keep_noise: tuple[str, ...] = ()
    known: tuple[PassedKey, ...] = field(default=(), repr=False)
    log_format: LogFormat = "console"
    together: tuple[int, ...] = ()
    proofs: tuple[EngineProof, ...] = ()
    handed: Handover = field(default_factory=Handover, repr=False)


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """What a process says of its model when it is ready.

    Attributes:
        need: bytes that the model, its slots and its stored conversations may use.
        served: the model in lists of models.
        proofs: of its engine.
    """

    need: int
    served: ServedModel
    proofs: tuple[EngineProof, ...] = ()

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> ReadyReport:
        given = value["served"]
        lists = {"aliases": tuple(given["aliases"]), "sampling": Sampling(**given["sampling"])}
        proofs = [
            EngineProof(proof["key"], Traits(**{**proof["traits"], "notes": tuple(proof["traits"]["notes"])}), proof["slots"])
            for proof in value["proofs"]
        ]
        return cls(value["need"], ServedModel(**{**given, **lists}), tuple(proofs))


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


def handover_lines(handed: Handover) -> bytes:
    """A handover, as a process sends it."""
    sizes = [(None if one.ends == math.inf else one.ends, len(one.data)) for one in handed.conversations]
    head = line(handover={"deletions": handed.deletions, "conversations": sizes})
    return b"".join([head, *(one.data for one in handed.conversations)])


class Sayings:
    """Puts together again what a process says.

    Attributes:
        handed: what it has handed over; empty if it did not.
    """

    def __init__(self) -> None:
        self.handed = Handover()
        self._rest = bytearray()
        self._head: dict[str, Any] | None = None

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """The lines that are complete, without a handover."""
        self._rest += data
        found: list[dict[str, Any]] = []
        while self._head is None and (end := self._rest.find(b"\n")) >= 0:
            said = json.loads(self._rest[:end])
            del self._rest[: end + 1]
            self._head = said.get("handover")
            if self._head is None:
                found.append(said)
        if self._head is not None and len(self._rest) >= sum(size for _, size in self._head["conversations"]):
            self.handed = self._handover(self._head)
        return found

    def _handover(self, head: dict[str, Any]) -> Handover:
        conversations, begin = [], 0
        for ends, size in head["conversations"]:
            data = bytes(memoryview(self._rest)[begin : begin + size])
            conversations.append(PackedConversation(math.inf if ends is None else ends, data))
            begin += size
        self._rest.clear()
        deletions = head["deletions"]
        return Handover(None if deletions is None else (float(deletions[0]), int(deletions[1])), tuple(conversations))


class Commands:
    """Puts the lines of the front and the file descriptors beside them together again."""

    def __init__(self) -> None:
        self._rest = b""
        self._files: list[int] = []

    def take(self, data: bytes, files: Sequence[int]) -> list[tuple[str, Any]]:
        """The commands that are complete: `("connection", descriptor)`, `("stop", seconds)` or `("unload", seconds)`."""
        self._files += files
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: list[tuple[str, Any]] = []
        for text in lines:
            word, _, rest = text.partition(b" ")
            if word + b"\n" == CONNECTION:
                found.append(("connection", self._files.pop(0)))
            elif word in (STOP, UNLOAD):
                found.append((word.decode(), float(rest)))
        return found
