"""Wire: a report as bytes. Eight bytes a key, all numbers little-endian.

    "hsrr" | version | flags | epoch | sequence | replica | load | speed | arrived | done | removed | added

A text is its length (2 bytes) and UTF-8. A list is its length (4 bytes) and its members. The keys of a tier are the tier
(1 byte) and a list. `decode` accepts what `encode` writes, and nothing else.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence

import numpy as np

from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import Load, ReplicaReport, Speed, Tier, TierKeys

VERSION = 2
_MAGIC = b"hsrr"
_DUMP, _FETCH = 1, 2
_HEAD = struct.Struct("<4sBBQQ")
_LOAD = struct.Struct("<6d")
_SPEEDS = struct.Struct("<6d")
_COUNT, _LENGTH, _BYTE = struct.Struct("<I"), struct.Struct("<H"), struct.Struct("<B")


def encode(report: ReplicaReport) -> bytes:
    """The bytes of a report.

    Raises:
        ValueError: a name, number or tier that no replica reports.
    """
    load, speed = report.load, report.speed
    flags = _DUMP * report.dump | _FETCH * (speed.fetch is not None)
    try:
        head = _HEAD.pack(_MAGIC, VERSION, flags, report.epoch, report.sequence)
    except struct.error as error:
        raise ValueError(str(error)) from None
    loads = _LOAD.pack(*map(_finite, (load.queued, load.drag, load.hold, load.crowd, load.fetching, load.call)))
    curve = speed.prefill
    numbers = (curve.per_token, curve.per_depth, speed.memory, speed.disk, speed.fetch or 0.0, speed.round_trip)
    speeds = _SPEEDS.pack(*map(_finite, numbers))
    prefills = _COUNT.pack(len(load.prefills)) + struct.pack(f"<{len(load.prefills)}d", *map(_finite, load.prefills))
    return b"".join(
        (
            *(head, _text(report.replica), loads, prefills, speeds),
            *(_texts(report.arrived), _texts(report.done), *_keys(report.removed), *_keys(report.added)),
        )
    )


def _finite(number: float) -> float:
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"a report cannot say {number}")
    return number + 0.0  # no negative zero, so that one report has one form


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > 0xFFFF:
        raise ValueError("a name is too long")
    return _LENGTH.pack(len(data)) + data


def _texts(texts: Sequence[str]) -> bytes:
    return b"".join((_COUNT.pack(len(texts)), *map(_text, texts)))


def _keys(tiers: TierKeys) -> list[bytes]:
    if Tier.COMING in tiers:
        raise ValueError("only routers know what is coming")
    parts = [_BYTE.pack(len(tiers))]
    for tier in sorted(tiers):
        try:
            words = array("Q", tiers[tier])
        except (OverflowError, TypeError) as error:
            raise ValueError(f"not a key: {error}") from None
        parts += [_BYTE.pack(tier), _COUNT.pack(len(words)), np.frombuffer(words, np.uint64).astype("<u8").tobytes()]
    return parts


def decode(data: bytes) -> ReplicaReport:
    """The report in some bytes.

    Raises:
        ValueError: it is not a report of this version, to the last byte.
    """
    read = _Reader(data)
    magic, version, flags, epoch, sequence = read.unpack(_HEAD)
    if magic != _MAGIC:
        raise ValueError("not a report")
    if version != VERSION:
        raise ValueError(f"a report of version {version}, where {VERSION} was due")
    if flags & ~(_DUMP | _FETCH):
        raise ValueError(f"unknown flags {flags}")
    replica = read.text()
    queued, drag, hold, crowd, fetching, call = read.numbers(6)
    load = Load(tuple(read.numbers(read.count(8))), queued, drag, hold, crowd, fetching, call)
    per_token, per_depth, memory, disk, fetch, round_trip = read.numbers(6)
    if fetch and not flags & _FETCH:
        raise ValueError("a speed of fetching without a shared tier")
    speed = Speed(Curve(per_token, per_depth), memory, disk, fetch if flags & _FETCH else None, round_trip)
    arrived, done = read.texts(), read.texts()
    removed, added = read.keys(), read.keys()
    read.end()
    return ReplicaReport(replica, epoch, sequence, load, added, removed, bool(flags & _DUMP), arrived, done, speed)


class _Reader:
    """Reads from the beginning to the end. All methods raise ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, size: int) -> memoryview:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise ValueError("a report is cut off")
        self._at += size
        return found

    def unpack(self, form: struct.Struct) -> tuple[bytes, int, int, int, int]:
        magic, version, flags, epoch, sequence = form.unpack(self.take(form.size))
        return magic, version, flags, epoch, sequence

    def number(self, form: struct.Struct) -> int:
        (found,) = form.unpack(self.take(form.size))
        return int(found)

    def count(self, least: int) -> int:
        """The length of a list whose members have at least so many bytes."""
        count = self.number(_COUNT)
        if count * least > len(self._data) - self._at:
            raise ValueError("a report is cut off")
        return count

    def numbers(self, count: int) -> list[float]:
        found = struct.unpack(f"<{count}d", self.take(8 * count))
        if any(math.copysign(1.0, number) < 0 for number in found):
            raise ValueError("a negative number")
        return [_finite(number) for number in found]

    def text(self) -> str:
        return str(self.take(self.number(_LENGTH)), "utf-8")

    def texts(self) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(self.count(_LENGTH.size)))

    def keys(self) -> TierKeys:
        found: dict[Tier, Sequence[int]] = {}
        last = -1
        for _ in range(self.number(_BYTE)):
            tier = self.number(_BYTE)
            if tier <= last or tier == Tier.COMING:
                raise ValueError(f"tier {tier} is out of place")
            last, count = tier, self.count(8)
            found[Tier(tier)] = np.frombuffer(self.take(8 * count), "<u8").tolist()
        return found

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("something follows a report")
