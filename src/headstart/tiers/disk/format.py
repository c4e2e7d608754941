"""Format of an object: the rows of one block, or one checkpoint, in a file of its own. docs/format.md is its contract.

    ┌─ 0 ──────┬─ 8 ─────┬─ 12 ────────────┬─ 16 ─────────────┬─ 32 ────────┬───────────────┬─ multiple of 4096 ─┐
    │ magic    │ version │ size of the     │ XXH3-128 of the  │ description │ zeros         │ payload            │
    │ headstrt │ u32     │ description u32 │ description      │ JSON        │               │ rows, or state     │
    └──────────┴─────────┴─────────────────┴──────────────────┴─────────────┴───────────────┴────────────────────┘

The description names the block and everything that must match before the payload may be used, and holds the payload's size
and checksum: each byte of the file is either checked or zero.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from typing import Any, get_args

import xxhash

from headstart.interfaces.tier import EntryKind
from headstart.interfaces.tokens import Bytes

MAGIC = b"headstrt"
VERSION = 2
ALIGN = 4096
_KINDS: tuple[EntryKind, ...] = get_args(EntryKind)
_HEAD = struct.Struct("<8sII16s")
_MOST = 1 << 20  # bytes of a description; a larger number is garbage


class FormatError(Exception):
    """An object that must not be used. `reason`: `foreign`, `newer`, `corrupt`, `truncated` or `other`."""

    quotes = False

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Label:
    """What is written on the outside of an object. Stores compare it, and know nothing else of it.

    Attributes:
        key: id of the block, or of the checkpoint.
        parent: id that it hangs on; that of a checkpoint is the block at whose end it is.
        fingerprint: what makes its numbers comparable.
        start: position of the block's first token.
        tokens: the block's tokens.
        canonical: whether the payload is.
        seconds: of prefill that having it saves, as measured when it was made.
        kind: what the payload is.
        written: when the tokens were first kept, in seconds since 1970; 0 for now.
        owner: whose it is (`prefix_cache/quota`); empty if nobody knows.
    """

    key: bytes
    parent: bytes
    fingerprint: bytes
    start: int
    tokens: tuple[int, ...]
    canonical: bool
    seconds: float = 0.0
    kind: EntryKind = "rows"
    written: float = field(default=0.0, compare=False)
    owner: bytes = field(default=b"", compare=False)

    def serves(self, wanted: Label) -> bool:
        """Whether its object may be used for the one that is wanted: canonical may take the place of derived."""
        if self.canonical < wanted.canonical:
            return False
        named = (self.key, self.parent, self.fingerprint, self.start, self.tokens, self.kind)
        return named == (wanted.key, wanted.parent, wanted.fingerprint, wanted.start, wanted.tokens, wanted.kind)


@dataclass(frozen=True, slots=True)
class Header:
    """A label, and where the payload lies: `at`, `size` in bytes, with its `checksum`."""

    label: Label
    at: int
    size: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """An object that is about to be written, as it will be."""

    label: Label
    head: bytes
    payload: Bytes

    @property
    def size(self) -> int:
        return len(self.head) + len(self.payload)


def checksum(data: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


def encode(label: Label, payload: Bytes) -> bytes:
    """All that comes before the payload."""
    description = json.dumps(
        {
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
            "size": len(payload),
            "checksum": checksum(payload).hex(),
        },
        separators=(",", ":"),
    ).encode()
    head = _HEAD.pack(MAGIC, VERSION, len(description), xxhash.xxh3_128_digest(description)) + description
    return head.ljust(_payload_at(len(description)), b"\0")


def header_size(head: bytes) -> int:
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
    return _payload_at(size)


def decode(head: bytes, file_size: int) -> Header:
    """Reads a header of which nothing is missing, in a file of `file_size` bytes.

    Raises:
        FormatError: something in it is not as it was written.
    """
    at = header_size(head)
    if len(head) < at:
        raise FormatError("truncated", f"{len(head)} of {at} bytes")
    _, _, size, digest = _HEAD.unpack_from(head)
    end = _HEAD.size + size
    description = head[_HEAD.size : end]
    if xxhash.xxh3_128_digest(description) != digest or head[end:at] != bytes(at - end):
        raise FormatError("corrupt", "its header is not what was written")
    try:
        said = json.loads(description.decode())
        label = Label(
            bytes.fromhex(said["key"]),
            bytes.fromhex(said["parent"]),
            bytes.fromhex(said["fingerprint"]),
            int(said["start"]),
            tuple(map(int, said["tokens"])),
            bool(said["canonical"]),
            float(said["seconds"]),
            _KINDS[_KINDS.index(said.get("kind", "rows"))],  # version 1 has only rows
            _time(said.get("written", 0.0)),
            bytes.fromhex(said.get("owner", "")),
        )
        found = Header(label, at, int(said["size"]), bytes.fromhex(said["checksum"]))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError("corrupt", f"its description makes no sense ({type(error).__name__})") from None
    if file_size != at + found.size:
        raise FormatError("truncated", f"{file_size} of {at + found.size} bytes")
    return found


def _time(said: Any) -> float:
    """Raises ValueError if it is none: nobody could tell when that is over."""
    found = float(said)
    if not 0 <= found < math.inf:
        raise ValueError("not a time")
    return found


def _payload_at(description: int) -> int:
    return -(-(_HEAD.size + description) // ALIGN) * ALIGN
