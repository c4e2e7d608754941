"""Names of objects in a shared store: `hs1/<owner>/<kind>/<digest>`.

The owner and the digest are keyed hashes: 16 and 32 bytes as hexadecimal digits, of the owner and of the id. So one owner's
objects can be listed and deleted together, and who can list the names learns nothing: without the key nobody can compute the
name of a tenant, or of a prompt whose text is guessed.

The key for names is not replaced when fleet keys are rotated: objects stay where they are found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from blake3 import blake3

from headstart.interfaces.tier import KV, STATE, EntryKind

VERSION: Final = "hs1"
ObjectKind = Literal["kv", "state", "note", "key"]
"""KV of a block, a checkpoint's state, a note of reply tokens, or an owner's wrapped data key."""
KIND_OF: Final[dict[EntryKind, ObjectKind]] = {KV: "kv", STATE: "state"}
_OWNER, _DIGEST = 16, 32


@dataclass(frozen=True, slots=True)
class ParsedName:
    """The parts of a name, as hexadecimal digits where they are hashes."""

    owner: str
    kind: ObjectKind
    digest: str


class ObjectNames:
    """The names of one fleet's objects.

    Args:
        key: 32 bytes that the fleet's servers share.
        encrypted: whether the objects are encrypted. Tagged and encrypted objects have different names, so no server finds one
            that it cannot or must not read.
    """

    def __init__(self, key: bytes, encrypted: bool = False) -> None:
        self._key = blake3(b"encrypted" if encrypted else b"tagged", key=key).digest()

    def of(self, owner: bytes, kind: ObjectKind, id: bytes) -> str:
        """The name of the object `id` of an owner (`prefix_cache/quota`)."""
        digest = blake3(b"%d %b %b %b" % (len(owner), owner, kind.encode(), id), key=self._key).hexdigest(_DIGEST)
        return f"{self.prefix(owner)}{kind}/{digest}"

    def prefix(self, owner: bytes) -> str:
        """What the names of all objects of an owner begin with."""
        return f"{VERSION}/{blake3(b'owner ' + owner, key=self._key).hexdigest(_OWNER)}/"


def parse(name: str) -> ParsedName | None:
    """The parts of a name; None if it is none of headstart."""
    version, *parts = name.split("/")
    if version != VERSION or len(parts) != 3:
        return None
    owner, kind, digest = parts
    if kind not in get_args(ObjectKind) or not (_is_hex(owner, _OWNER) and _is_hex(digest, _DIGEST)):
        return None
    return ParsedName(owner, kind, digest)  # type: ignore[arg-type]


def _is_hex(text: str, size: int) -> bool:
    return len(text) == 2 * size and not text.strip("0123456789abcdef")
