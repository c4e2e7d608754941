"""Auth: which API keys open the server, and which tenant each belongs to.

A key file has one key a line: `key`, or `name = key`. The blanks around `=` are needed, because a key may end with `=`. A `#`
at the beginning of a line or after a blank begins a comment. `expire=7d` after a key limits how long the data of its tenant is
kept. The file is read again when it changes, so a key can be revoked without a restart. If it then cannot be read or has an
error, the previous keys stay valid.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from headstart.chat.tenancy import OPEN, tenant_of
from headstart.errors import ConfigError
from headstart.observe import redaction
from headstart.units import parse_time

if TYPE_CHECKING:
    from starlette.datastructures import Headers

OPERATOR = "operator"
"""Name of the keys that may read server-wide data."""

_COMMENT = re.compile(r"(^|\s)#.*$")
_LINE = re.compile(r"(?:(?P<name>\S+)\s+=\s+)?(?P<key>\S+)(?:\s+expire=(?P<expire>\S+))?")


@dataclass(frozen=True, slots=True)
class Key:
    """One key. All keys with one name have the same `tenant`, so a key can be replaced and the cache stays.

    Attributes:
        encodings: the bytes that clients send for it. Beyond ASCII some clients use UTF-8 and others Latin-1.
        expire: seconds for which its tenant's data may be kept; None for the server's limit.
    """

    encodings: tuple[bytes, ...]
    tenant: str
    operator: bool = False
    expire: float | None = None

    @classmethod
    def of(cls, key: str, name: str = "", expire: float | None = None) -> Key:
        redaction.hide([key])
        encodings = [key.encode("utf-8", "surrogateescape")]
        with suppress(UnicodeEncodeError):
            encodings.append(key.encode("latin-1"))
        tenant = tenant_of("name", name) if name else tenant_of("key", key)
        return cls(tuple(encodings), tenant, name == OPERATOR, expire)


_ANYBODY = Key((), OPEN, operator=True)


class Keys:
    """All keys of a server. Without keys it is open to everybody.

    Args:
        given: keys from the command line.
        file: key file.

    Raises:
        ConfigError: a given key is empty, or the file cannot be read, has no keys or has a wrong line.
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
        """The key that equals one of `candidates`, or None. The time it takes does not depend on how similar they are."""
        if not self.closed:
            return _ANYBODY
        offered = list(candidates)
        found: Key | None = None
        for key in self.all():
            matches = [hmac.compare_digest(candidate, encoding) for candidate in offered for encoding in key.encodings]
            if any(matches):
                found = key
        return found


def offered_keys(headers: Headers) -> Iterator[bytes]:
    """The keys in a request's headers: OpenAI's and Anthropic's."""
    for name, value in headers.raw:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()


class KeySource(Protocol):
    """A source of keys that may change. `version`: how often they have been read again."""

    version: int

    def keys(self) -> Sequence[Key]:
        """The keys as they are now."""


class NoKeyFile:
    """A `KeySource` without keys."""

    version = 0

    def keys(self) -> Sequence[Key]:
        return ()


class KeyFile:
    """A key file: a `KeySource`. Only the first read raises ConfigError; later errors are logged, once for each change."""

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
                self._log.error("the keys could not be read again; the previous ones stay valid", error=str(error))
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
            self._log.warning("other users may read the keys; run chmod 600", file=str(self._path))
        terms: dict[str, float] = {}
        for line in lines:
            if line.expire is not None:
                terms[line.whose] = min(line.expire, terms.get(line.whose, line.expire))
        return tuple(Key.of(line.key, line.name, terms.get(line.whose)) for line in lines)


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A line of a key file. `name`: "" if there is none. `expire`: in seconds; None if the line has no `expire=`."""

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
        ConfigError: it cannot be read, or has a wrong line.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read --api-key-file {path}: {getattr(error, 'strerror', error)}.") from error
    keys: dict[str, KeyLine] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = _COMMENT.sub("", line).strip()
        if not content:
            continue
        found = _LINE.fullmatch(content)
        if found is None:
            raise ConfigError(
                f"{path}, line {number}: write `key` or `name = key`, neither with blanks; `expire=7d` may follow."
            )
        if found["key"].startswith("expire=") or found["name"] == "expire":  # it would open the server
            raise ConfigError(f"{path}, line {number}: `expire=7d` must follow a key; --expire sets it for all keys.")
        if found["key"] in keys:
            raise ConfigError(f"{path}, line {number}: this key occurs twice.")
        try:
            expire = None if found["expire"] is None else parse_time(found["expire"])
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: expire={error}.") from error
        keys[found["key"]] = KeyLine(found["key"], found["name"] or "", expire)
    return list(keys.values()), mode
