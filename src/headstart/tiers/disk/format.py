"""Format of an object: the KV of one block or open tail, or one checkpoint, in a file. docs/format.md is the contract.

    ┌─ 0 ──────┬─ 8 ─────┬─ 12 ────────────┬─ 16 ─────────────┬─ 32 ────────┬───────────────┬─ multiple of 4096 ─┐
    │ magic    │ version │ size of the     │ XXH3-128 of the  │ description │ zeros         │ payload            │
    │ headstrt │ u32     │ description u32 │ description      │ JSON        │               │ KV, or state       │
    └──────────┴─────────┴─────────────────┴──────────────────┴─────────────┴───────────────┴────────────────────┘

The description names the entry and everything that must match before the payload may be used. It also has the payload's size
and checksum. So each byte of the file is either checked or zero.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import xxhash

from headstart.interfaces.tier import KV, EntryKind
from headstart.interfaces.tokens import Bytes

MAGIC = b"headstrt"
VERSION = 2
ALIGN = 4096
_KINDS: tuple[EntryKind, ...] = get_args(EntryKind)
_HEAD = struct.Struct("<8sII16s")
HeaderBytes = bytes | memoryview
"""A header, or an object that begins with one."""
_MOST = 1 << 20  # bytes of a description; a larger number is garbage


class FormatError(Exception):
    """An object that must not be used. `reason`: `foreign`, `newer`, `corrupt`, `truncated` or `other`."""

    quotes = False

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Label:
    """The description of an object. The disk tier compares labels and knows nothing else about the content.

    Attributes:
        key: id of the entry.
        parent: id of the entry before it; for a checkpoint, the block or open tail at whose end it is.
        fingerprint: the engine's fingerprint.
        start: position of the first token.
        tokens: the tokens.
        canonical: whether the payload is canonical.
        seconds: seconds of prefill that the entry saves, measured when it was computed.
        kind: what the payload is.
        written: when the tokens were stored first, in seconds since 1970; 0 for now.
        owner: the owner (`prefix_cache/quota`); empty if unknown.
    """

    key: bytes
    parent: bytes
    fingerprint: bytes
    start: int
    tokens: tuple[int, ...]
    canonical: bool
    seconds: float = 0.0
    kind: EntryKind = KV
    written: float = field(default=0.0, compare=False)
    owner: bytes = field(default=b"", compare=False)

    def serves(self, wanted: Label) -> bool:
        """Whether this object may be used in place of the wanted one. A canonical object may replace a derived one."""
        if self.canonical < wanted.canonical:
            return False
        named = (self.key, self.parent, self.fingerprint, self.start, self.tokens, self.kind)
        return named == (wanted.key, wanted.parent, wanted.fingerprint, wanted.start, wanted.tokens, wanted.kind)


@dataclass(frozen=True, slots=True)
class Header:
    """A label, with the position (`at`), `size` (bytes) and `checksum` of the payload."""

    label: Label
    at: int
    size: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """A complete object, ready to be written."""

    label: Label
    head: bytes
    payload: Bytes

    @property
    def size(self) -> int:
        return len(self.head) + len(self.payload)


def checksum(data: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


def describe(label: Label, size: int) -> dict[str, Any]:
    """The fields of the description of a label, and of a payload of `size` bytes."""
    return {
        "kind": label.kind,
        "key": label.key.hex(),
        "parent": label.parent.hex(),
        "fingerprint": label.fingerprint.hex(),
        "start": label.start,
        "tokens": label.tokens,
        "canonical": label.canonical,
        "seconds": label.seconds,
        "written": label.written,
        "owner": label.owner.hex(),
        "size": size,
    }


def pack_head(description: dict[str, Any], align: int = ALIGN) -> bytes:
    """The bytes before the payload, which begins at a multiple of `align`."""
    packed = json.dumps(description, separators=(",", ":")).encode()
    head = _HEAD.pack(MAGIC, VERSION, len(packed), xxhash.xxh3_128_digest(packed)) + packed
    return head.ljust(-(-len(head) // align) * align, b"\0")


def encode(label: Label, payload: Bytes) -> bytes:
    """The bytes before the payload, with the payload's checksum."""
    return pack_head({**describe(label, len(payload)), "checksum": checksum(payload).hex()})


def header_size(head: HeaderBytes, align: int = ALIGN) -> int:
    """Bytes of a header, from its first 32.

    Raises:
        FormatError: it is no object, or one of a later version.
    """
    if len(head) < _HEAD.size:
        raise FormatError("truncated", f"{len(head)} bytes")
    magic, version, size, _ = _HEAD.unpack_from(head)
    if magic != MAGIC:
        raise FormatError("foreign", "not an object of headstart")
    if not 1 <= version <= VERSION:
        raise FormatError("newer", f"version {version}, and this headstart reads up to version {VERSION}")
    if size > _MOST:
        raise FormatError("corrupt", f"a description of {size} bytes")
    whole: int = -(-(_HEAD.size + size) // align) * align
    return whole


def unpack_head(head: HeaderBytes, align: int = ALIGN) -> tuple[dict[str, Any], Label]:
    """Reads the description in a header of which nothing is missing. Returns its fields, and the label among them.

    Raises:
        FormatError: something in it is not as it was written.
    """
    at = header_size(head, align)
    if len(head) < at:
        raise FormatError("truncated", f"{len(head)} of {at} bytes")
    _, _, size, digest = _HEAD.unpack_from(head)
    end = _HEAD.size + size
    packed = head[_HEAD.size : end]
    if xxhash.xxh3_128_digest(packed) != digest or head[end:at] != bytes(at - end):
        raise FormatError("corrupt", "its header is not what was written")
    with _sensible():
        description = json.loads(bytes(packed).decode())
        label = Label(
            bytes.fromhex(description["key"]),
            bytes.fromhex(description["parent"]),
            bytes.fromhex(description["fingerprint"]),
            int(description["start"]),
            tuple(map(int, description["tokens"])),
            bool(description["canonical"]),
            float(description["seconds"]),
            _KINDS[_KINDS.index(description.get("kind", KV))],  # version 1 has only KV
            _time(description.get("written", 0.0)),
            bytes.fromhex(description.get("owner", "")),
        )
    return description, label


def decode(head: bytes, file_size: int) -> Header:
    """Reads a header of which nothing is missing, in a file of `file_size` bytes.

    Raises:
        FormatError: something in it is not as it was written.
    """
    description, label = unpack_head(head)
    with _sensible():
        found = Header(label, header_size(head), int(description["size"]), bytes.fromhex(description["checksum"]))
    if file_size != found.at + found.size:
        raise FormatError("truncated", f"{file_size} of {found.at + found.size} bytes")
    return found


@contextmanager
def _sensible() -> Iterator[None]:
    """Turns errors of a description that makes no sense into a FormatError."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError("corrupt", f"its description makes no sense ({type(error).__name__})") from None


def _time(value: Any) -> float:
    """A time in seconds since 1970. Raises ValueError if it is negative or not finite."""
    found = float(value)
    if not 0 <= found < math.inf:
        raise ValueError("not a time")
    return found
