"""Envelopes: how an object is sealed for a shared store, so that a wrong one is a miss and never an answer.

    bytes   what
    0       magic `headseal`
    8       version (u16), cipher (u8), a zero
    12      size of all (u64), size of the payload (u64)
    28      key id, writer, subject: 8 bytes each
    52      nonce: 12 bytes
    64      payload, then header, then tag

The tag covers the object's name (so its owner, kind and id) and all bytes before it. It is a keyed BLAKE3 hash of 32 bytes. If
the key encrypts, it is the 16 bytes of AES-256-GCM, and payload and header are encrypted. The *subject* is a digest of the
name: it tells an object at a wrong place from a damaged one. The *writer* is the random id of the server that sealed it.

The header of an entry is that of `tiers/disk/format`, without padding and without a checksum. It stands behind the payload, so
that the payload stands at a known place. A note has no payload, and a header of its own: see `seal_note`.

Only canonical entries may be sealed: derived KV never leaves the machine.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from blake3 import blake3

from headstart.interfaces.tier import KV
from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import FormatError, Label, Note
from headstart.tiers.disk.format import describe, pack_head, unpack_head
from headstart.tiers.shared.keys import KEY_ID, Cipher, SealKey
from headstart.tiers.shared.store import Blob, Placed, room

MAGIC: Final = b"headseal"
VERSION: Final = 1
WRITER: Final = 8
"""Bytes that name the server that sealed an object: random, new at each start."""
_HEAD = struct.Struct("<8sHBxQQ8s8s8s12s")
PAYLOAD: Final = _HEAD.size
"""Where the payload begins."""
_NOTE = struct.Struct("<HH")
_CIPHERS: Final[dict[Cipher, tuple[int, int]]] = {"blake3": (1, 32), "aes-256-gcm": (2, 16)}
"""For each cipher its number, and the bytes of its tag."""

SealReason = Literal["foreign", "newer", "truncated", "swapped", "unknown_key", "tag", "corrupt", "other"]
"""Why an object was not opened: no object of headstart; a later version; not all of it is there; it belongs to another name;
sealed with a key that this server has not; something in it is not what was sealed; it contradicts itself; it is another entry
than the wanted one."""


class SealError(Exception):
    """An object that must not be used: a miss. The message shows nothing of its content.

    Attributes:
        writer: the server that sealed it, as hexadecimal digits; "" if unknown. Nobody vouches for it.
    """

    quotes = False

    def __init__(self, reason: SealReason, detail: str, writer: bytes = b"") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.writer = writer.hex()


@dataclass(frozen=True, slots=True)
class OpenedSeal:
    """What an object said about itself, after its tag was found right.

    Attributes:
        size: bytes of the payload.
        writer: the server that sealed it, as hexadecimal digits.
    """

    label: Label
    size: int
    writer: str


def seal(name: str, label: Label, payload: Bytes, key: SealKey, writer: bytes, make: Callable[[int], Blob] = room) -> Blob:
    """The sealed object of an entry.

    Args:
        name: where it will be stored.
        writer: this server, `WRITER` bytes.
        make: makes the memory of the object.

    Raises:
        ValueError: the entry is derived.
    """
    if not label.canonical:
        raise ValueError("derived KV never leaves the machine")
    return _seal(name, payload.data, pack_head(describe(label, len(payload)), align=1), key, writer, make)


def open_sealed(name: str, blob: Blob, wanted: Label, out: Bytes, keys: Sequence[SealKey]) -> OpenedSeal:
    """Checks a sealed object, and writes its payload into `out`. KV must fill `out`; a checkpoint may be smaller.

    Args:
        name: where it was found.
        wanted: the label that it must serve.
        keys: those that may open it.

    Raises:
        SealError: it must not be used; `out` is unchanged.
    """
    payload, header, writer = _open(name, blob, keys)
    opened = _entry(len(payload), header, wanted, len(out), writer)
    out[: len(payload)] = np.frombuffer(payload, np.uint8)
    return opened


def open_placed(name: str, placed: Placed, wanted: Label, out: Bytes, keys: Sequence[SealKey]) -> OpenedSeal:
    """Like `open_sealed`, for an object whose bytes from `PAYLOAD` on are in `out` already (`SharedStore.get_into`).

    Raises:
        SealError: it must not be used; `out` is then undefined.
    """
    if not placed.tail:
        return open_sealed(name, placed.head, wanted, out, keys)
    size = len(placed.head) + len(out) + len(placed.tail)
    head = _checked(name, placed.head, size, keys)
    tag = _CIPHERS[head.key.cipher][1]
    if head.key.cipher != "blake3" or head.payload != len(out) or len(placed.tail) < tag:
        whole = room(size)
        whole[: len(placed.head)] = placed.head
        whole[len(placed.head) : size - len(placed.tail)] = out.data
        whole[size - len(placed.tail) :] = placed.tail
        return open_sealed(name, whole, wanted, out, keys)
    header = placed.tail[:-tag]
    if not secrets.compare_digest(_tag(name, (placed.head, out.data, header), head.key), bytes(placed.tail[-tag:])):
        raise SealError("tag", "it is not what was sealed", head.writer)
    return _entry(len(out), header, wanted, len(out), head.writer)


def _entry(size: int, header: Blob, wanted: Label, space: int, writer: bytes) -> OpenedSeal:
    """What the header of an entry says, if it is the wanted one and its payload of `size` bytes fits. Raises SealError."""
    try:
        description, label = unpack_head(header, align=1)
    except FormatError as error:
        raise SealError("corrupt", str(error), writer) from None
    if description.get("size") != size:
        raise SealError("corrupt", "its payload is not as long as it says", writer)
    if not label.canonical or not label.serves(wanted):
        raise SealError("other", "it is another entry than the wanted one", writer)
    if size > space or (size < space and label.kind == KV):
        raise SealError("other", f"{size} bytes, but {space} were expected", writer)
    return OpenedSeal(label, size, writer.hex())


def seal_note(name: str, note: Note, key: SealKey, writer: bytes) -> Blob:
    """The sealed object of a note: the sizes of its key and block (u16 each), key, block, value."""
    return seal_bytes(name, _NOTE.pack(len(note.key), len(note.block)) + note.key + note.block + note.value, key, writer)


def open_note(name: str, blob: Blob, key: bytes, keys: Sequence[SealKey]) -> Note:
    """The note in a sealed object; `key` is the note's own key. Raises SealError."""
    _, content, writer = _open(name, blob, keys)
    if len(content) < _NOTE.size:
        raise SealError("corrupt", "it is no note", writer)
    first, second = _NOTE.unpack_from(content)
    body = bytes(content[_NOTE.size :])
    note = Note(body[:first], body[first : first + second], body[first + second :])
    if len(body) < first + second or note.key != key:
        raise SealError("other", "it is another note than the wanted one", writer)
    return note


def seal_bytes(name: str, content: bytes, key: SealKey, writer: bytes) -> Blob:
    """A sealed object of any content."""
    return _seal(name, memoryview(b""), content, key, writer)


def open_bytes(name: str, blob: Blob, keys: Sequence[SealKey]) -> bytes:
    """The content of an object of `seal_bytes`. Raises SealError."""
    return bytes(_open(name, blob, keys)[1])


def sealed_with(blob: Blob) -> bytes:
    """The id of the key with which an object was sealed, of which a head is there."""
    id: bytes = _HEAD.unpack_from(blob)[5]
    return id


def written_by(blob: Blob) -> str:
    """The server that sealed an object, of which a head is there, as hexadecimal digits."""
    writer: bytes = _HEAD.unpack_from(blob)[6]
    return writer.hex()


def _seal(
    name: str, payload: memoryview, header: bytes, key: SealKey, writer: bytes, make: Callable[[int], Blob] = room
) -> Blob:
    number, tag = _CIPHERS[key.cipher]
    size = _HEAD.size + len(payload) + len(header) + tag
    nonce = bytes(12) if key.cipher == "blake3" else secrets.token_bytes(12)
    sealed = make(size)
    sealed[: _HEAD.size] = _HEAD.pack(MAGIC, VERSION, number, size, len(payload), key.id, writer, _subject(name), nonce)
    plain = sealed[_HEAD.size : -tag] if key.cipher == "blake3" else room(size - tag - _HEAD.size)
    plain[: len(payload)] = payload
    plain[len(payload) :] = header
    if key.cipher == "blake3":
        sealed[-tag:] = _tag(name, (sealed[:-tag],), key)
    else:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        AESGCM(key.secret).encrypt_into(nonce, plain, _bound(name, sealed), sealed[_HEAD.size :])
    return sealed


def _open(name: str, blob: Blob, keys: Sequence[SealKey]) -> tuple[Blob, Blob, bytes]:
    """Payload, header and writer of an object whose tag is right. Raises SealError."""
    head = _checked(name, blob, len(blob), keys)
    key, split, writer = head.key, head.payload, head.writer
    tag = _CIPHERS[key.cipher][1]
    if key.cipher == "blake3":
        if not secrets.compare_digest(_tag(name, (blob[:-tag],), key), bytes(blob[-tag:])):
            raise SealError("tag", "it is not what was sealed", writer)
        plain = blob[_HEAD.size : -tag]
        return plain[:split], plain[split:], writer

    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    plain = room(len(blob) - tag - _HEAD.size)
    try:
        AESGCM(key.secret).decrypt_into(head.nonce, blob[_HEAD.size :], _bound(name, blob), plain)
    except InvalidTag:
        raise SealError("tag", "it is not what was sealed", writer) from None
    return plain[:split], plain[split:], writer


@dataclass(frozen=True, slots=True)
class _CheckedHead:
    """The head of an envelope that may be opened with `key`, if its tag is right. `payload` is in bytes."""

    key: SealKey
    payload: int
    writer: bytes
    nonce: bytes


def _checked(name: str, head: Blob, all: int, keys: Sequence[SealKey]) -> _CheckedHead:
    """Checks the head of an object of `all` bytes. Raises SealError."""
    if all < _HEAD.size or len(head) < _HEAD.size:
        raise SealError("truncated", f"{all} bytes")
    magic, version, number, size, payload, id, writer, subject, nonce = _HEAD.unpack_from(head)
    if magic != MAGIC:
        raise SealError("foreign", "not an object of headstart")
    if version != VERSION:
        raise SealError("newer", f"version {version}, and this headstart reads version {VERSION}", writer)
    if subject != _subject(name):
        raise SealError("swapped", "it belongs to another name", writer)
    if size != all:
        raise SealError("truncated", f"{all} of {size} bytes", writer)
    key = next((key for key in keys if key.id == id), None)
    if key is None:
        raise SealError("unknown_key", f"sealed with key {id.hex()}", writer)
    expected, tag = _CIPHERS[key.cipher]
    if number != expected or size < _HEAD.size + tag:
        raise SealError("tag", "not sealed as its key seals", writer)
    return _CheckedHead(key, payload, writer, nonce)


def _bound(name: str, sealed: Blob) -> bytes:
    """What the tag covers beside the content: the name and the envelope's head."""
    return name.encode() + b"\0" + bytes(sealed[: _HEAD.size])


def _tag(name: str, parts: Sequence[Blob], key: SealKey) -> bytes:
    """The tag over the name and all parts."""
    hasher = blake3(name.encode() + b"\0", key=key.secret)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _subject(name: str) -> bytes:
    return blake3(name.encode()).digest(8)


assert len(_subject("")) == KEY_ID == WRITER == 8
