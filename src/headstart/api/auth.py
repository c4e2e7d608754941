"""Keys: which API keys open the server, and whose they are.

A file of keys has one a line: `key`, or `name = key` (with blanks around the sign, as keys may end with it). What follows a
`#` at the beginning of a line or after a blank is a comment. `expire=7d` behind a key says how long what comes with it, and
with all keys of its name, may be kept. It is read again when it changes, so a key can be revoked without a restart; while it
cannot be read, or makes no sense, the keys that were read last stay.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from headstart.chat.tenancy import OPEN, tenant_of
from headstart.errors import ConfigError
from headstart.observe import redaction
from headstart.units import parse_time

OPERATOR = "operator"
"""Name of the keys that may read what is told of all tenants."""

_COMMENT = re.compile(r"(^|\s)#.*$")
_LINE = re.compile(r"(?:(?P<name>\S+)\s+=\s+)?(?P<key>\S+)(?:\s+expire=(?P<expire>\S+))?")


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `tenant` is the same for all keys of one name, so that a key can be replaced and the cache stays.

    Attributes:
        spelled: the bytes that clients send for it: beyond ASCII some write UTF-8 and others Latin-1.
        expire: seconds for which what comes with it may be kept; None for as long as anybody's.
    """

    spelled: tuple[bytes, ...]
    tenant: str
    operator: bool = False
    expire: float | None = None

    @classmethod
    def of(cls, key: str, name: str = "", expire: float | None = None) -> Key:
        redaction.hide([key])
        spelled = [key.encode("utf-8", "surrogateescape")]
        with suppress(UnicodeEncodeError):
            spelled.append(key.encode("latin-1"))
        tenant = tenant_of("name", name) if name else tenant_of("key", key)
        return cls(tuple(spelled), tenant, name == OPERATOR, expire)


_ANYBODY = Key((), OPEN, operator=True)


class Keys:
    """All keys of a server; without any it is open to everybody.

    Args:
        given: on the command line.
        file: of keys.

    Raises:
        ConfigError: the file cannot be read, has no keys, or a line of it is none; or a given key is empty.
    """

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        if not all(key.strip() for key in given):
            raise ConfigError("--api-key must not be empty; is the variable that it comes from set?")
        self._given = tuple(Key.of(key) for key in given)
        self._file: KeySource = NoKeyFile() if file is None else KeyFile(file)
        self.closed = bool(given) or file is not None
        self.several = len(given) > 1 or file is not None

    @property
    def version(self) -> int:
        """How often the file has been read."""
        return self._file.version

    def all(self) -> Sequence[Key]:
        """All keys as they are now."""
        return *self._given, *self._file.keys()

    def find(self, candidates: Iterable[bytes]) -> Key | None:
        """The key that one of `candidates` is; None if none is any. The time says nothing about which came close."""
        if not self.closed:
            return _ANYBODY
        offered = list(candidates)
        found: Key | None = None
        for key in self.all():
            matches = [hmac.compare_digest(one, spelled) for one in offered for spelled in key.spelled]
            if any(matches):
                found = key
        return found


class KeySource(Protocol):
    """Where keys come from that may change. `version`: how often they have been read."""

    version: int

    def keys(self) -> Sequence[Key]:
        """The keys as they are now."""


class NoKeyFile:
    """A `KeySource` without keys."""

    version = 0

    def keys(self) -> Sequence[Key]:
        return ()


class KeyFile:
    """A file of keys: a `KeySource`. Raises ConfigError at first; later faults are logged, once each."""

    def __init__(self, path: Path) -> None:
        self.version = 0
        self._path = path
        self._log = structlog.get_logger("headstart.api")
        self._seen = self._state()
        self._keys = self._read()
        if not self._keys:
            raise ConfigError(f"--api-key-file {path} has no keys; write one a line.")

    def keys(self) -> Sequence[Key]:
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._keys = self._read()
                self.version += 1
                self._log.info("keys read again", file=str(self._path), keys=len(self._keys))
            except ConfigError as error:
                self._log.error("the keys that were read last stay", error=str(error))
        return self._keys

    def _state(self) -> tuple[int, ...]:
        """What changes with the file."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[Key, ...]:
        lines, mode = read(self._path)
        if os.name == "posix" and mode & 0o077:
            self._log.warning("others than its owner may read the keys; chmod 600 mends that", file=str(self._path))
        terms: dict[str, float] = {}
        for line in lines:
            if line.expire is not None:
                terms[line.whose] = min(line.expire, terms.get(line.whose, line.expire))
        return tuple(Key.of(line.key, line.name, terms.get(line.whose)) for line in lines)


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A line of a file of keys. `name`: "" if it has none. `expire`: seconds; None if it says nothing of that."""

    key: str
    name: str
    expire: float | None = None

    @property
    def whose(self) -> str:
        """The same for all keys of one tenant."""
        return self.name or f" {self.key}"


def read(path: Path) -> tuple[list[KeyLine], int]:
    """The keys of a file, and its mode.

    Raises:
        ConfigError: it cannot be read, or a line makes no sense.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read --api-key-file {path}: {getattr(error, 'strerror', error)}.") from error
    keys: dict[str, KeyLine] = {}
    for number, line in enumerate(text.splitlines(), 1):
        said = _COMMENT.sub("", line).strip()
        if not said:
            continue
        found = _LINE.fullmatch(said)
        if found is None:
            raise ConfigError(
                f"{path}, line {number}: write `key` or `name = key`; neither has blanks in it. `expire=7d` may be behind it."
            )
        if found["key"].startswith("expire=") or found["name"] == "expire":  # it would open the server
            raise ConfigError(f"{path}, line {number}: `expire=7d` has its place behind a key; for all there is --expire.")
        if found["key"] in keys:
            raise ConfigError(f"{path}, line {number}: this key is there already.")
        try:
            expire = None if found["expire"] is None else parse_time(found["expire"])
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: expire={error}.") from error
        keys[found["key"]] = KeyLine(found["key"], found["name"] or "", expire)
    return list(keys.values()), mode
