"""Keys of a fleet: a file with secrets that every server of a fleet has, and the keys that follow from them.

    names 7c…    32 bytes: the key for names; a rotation keeps it
    key a1…      32 bytes: the newest fleet key, which seals new objects
    key 90…      32 bytes: the one before, which still opens older objects

Each owner has keys of its own, derived from a fleet key and the owner. What is sealed for one owner opens for no other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from blake3 import blake3

from headstart.errors import ConfigError
from headstart.lru import Lru
from headstart.tiers.shared.names import ObjectNames

KEY = 32
"""Bytes of every secret."""
KEY_ID = 8
"""Bytes that name a key. They are part of every sealed object, and say nothing about the key."""
FLEET_KEYS = 2
"""Most fleet keys of a file."""

Cipher = Literal["blake3", "aes-256-gcm"]
"""How a key seals: a keyed BLAKE3 tag beside readable bytes, or AES-GCM, which hides them too."""


@dataclass(frozen=True, slots=True)
class SealKey:
    """A key for the objects of one owner. Its text form does not show the secret."""

    id: bytes
    secret: bytes = field(repr=False)
    cipher: Cipher


class OwnerKeys(Protocol):
    """The keys of each owner. Thread-safe."""

    names: ObjectNames

    def of(self, owner: bytes) -> Sequence[SealKey]:
        """The keys that open the owner's objects, the newest first; none if there are none. Raises StoreError."""

    def newest(self, owner: bytes) -> SealKey:
        """The key that seals the owner's objects. Raises StoreError."""

    def refresh(self, *, writes: bool = True) -> None:
        """Forgets keys that were destroyed meanwhile. To be called from time to time. Raises StoreError.

        Args:
            writes: whether keys that are still needed may be renewed in the store.
        """


@dataclass(frozen=True, slots=True)
class FleetKeys:
    """The secrets in a key file: the key for names, and fleet keys, the newest first. Its text form does not show them."""

    name_key: bytes = field(repr=False)
    secrets: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def generate(cls) -> FleetKeys:
        return cls(secrets.token_bytes(KEY), (secrets.token_bytes(KEY),))

    def rotated(self) -> FleetKeys:
        """The same with a new newest key. The oldest one beyond `FLEET_KEYS` goes: what it sealed is a miss from now on."""
        return FleetKeys(self.name_key, (secrets.token_bytes(KEY), *self.secrets)[:FLEET_KEYS])

    def derived(self, purpose: str, owner: bytes, cipher: Cipher) -> tuple[SealKey, ...]:
        """Keys of an owner for one purpose, the newest first."""
        return tuple(seal_key(_derive(f"headstart shared {purpose} 1", one + owner), cipher) for one in self.secrets)

    @property
    def ids(self) -> tuple[str, ...]:
        """What names the fleet keys for people, the newest first."""
        return tuple(_derive("headstart shared fleet key id 1", one)[:KEY_ID].hex() for one in self.secrets)

    @classmethod
    def load(cls, path: Path) -> FleetKeys:
        """Reads a key file. Raises ConfigError if it is missing, readable by others, or no key file."""
        try:
            with open(path, "rb") as file:
                if os.name == "posix" and (mode := stat.S_IMODE(os.fstat(file.fileno()).st_mode)) & 0o077:
                    raise ConfigError(f"others can read the key file {path} (mode {mode:04o}); run: chmod 600 {path}")
                return cls._parse(file.read(1 << 16).decode())
        except FileNotFoundError:
            raise ConfigError(f"there is no key file {path}; make one: headstart fleet keygen {path}") from None
        except OSError as error:
            raise ConfigError(f"cannot read the key file {path}: {os.strerror(error.errno or 0)}") from None
        except ValueError:
            raise ConfigError(f"{path} is no key file; make one: headstart fleet keygen FILE") from None

    @classmethod
    def _parse(cls, text: str) -> FleetKeys:
        lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        found = [(word, bytes.fromhex(value)) for word, value in lines]
        if [word for word, _ in found] != ["names", *["key"] * (len(found) - 1)] or {len(value) for _, value in found} != {KEY}:
            raise ValueError("no key file")
        if not 1 <= len(found) - 1 <= FLEET_KEYS:
            raise ValueError("no key file")
        return cls(found[0][1], tuple(value for _, value in found[1:]))

    def save(self, path: Path, *, replace: bool = False) -> None:
        """Writes a key file that only its owner can read. Raises ConfigError if it exists (without `replace`), or cannot be."""
        text = "# The keys of a headstart fleet. Whoever has this file can read and forge what the fleet stores.\n"
        text += f"names {self.name_key.hex()}\n" + "".join(f"key {one.hex()}\n" for one in self.secrets)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            try:
                file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
                with open(file, "w") as out:
                    out.write(text)
                    out.flush()
                    os.fsync(file)
                if replace:
                    os.replace(temporary, path)
                else:
                    os.link(temporary, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
        except FileExistsError:
            raise ConfigError(f"{path} exists already; to add a new key to it: headstart fleet rotate {path}") from None
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {os.strerror(error.errno or 0)}") from None


class TagKeys:
    """Keys for tagged objects, derived from the fleet keys. They need no store."""

    def __init__(self, fleet: FleetKeys) -> None:
        self.names = ObjectNames(fleet.name_key)
        self._fleet = fleet
        self._known: Lru[bytes, tuple[SealKey, ...]] = Lru(1024)

    def of(self, owner: bytes) -> Sequence[SealKey]:
        found = self._known.get(owner)
        if found is None:
            found = self._fleet.derived("tag", owner, "blake3")
            self._known.put(owner, found)
        return found

    def newest(self, owner: bytes) -> SealKey:
        return self.of(owner)[0]

    def refresh(self, *, writes: bool = True) -> None:
        pass


def seal_key(secret: bytes, cipher: Cipher) -> SealKey:
    """A key with the id that follows from it."""
    return SealKey(_derive("headstart shared key id 1", secret)[:KEY_ID], secret, cipher)


def _derive(context: str, material: bytes) -> bytes:
    return blake3(material, derive_key_context=context).digest(KEY)
