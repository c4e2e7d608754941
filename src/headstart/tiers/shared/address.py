"""Addresses: which store a URL means, and what it needs (`--shared`, `--shared-key-file`).

valkey://[user@]host[:port][/database]      valkeys:// with TLS; redis:// and rediss:// mean the same
s3://bucket[/prefix][?endpoint=URL&region=NAME]
file:///path/of/a/folder
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from headstart.errors import ConfigError
from headstart.names import option
from headstart.tiers.shared.keys import FleetKeys, OwnerKeys, TagKeys
from headstart.tiers.shared.store import SharedStore

PASSWORD = "HEADSTART_SHARED_PASSWORD"
"""Environment variable with the password of Valkey."""
PASSWORD_FILE = "HEADSTART_SHARED_PASSWORD_FILE"
"""Environment variable with the path of a file that holds it."""
_FORMS = "valkey://HOST:6379, valkeys://HOST:6379, s3://BUCKET/PREFIX or file:///PATH"
_VALKEY = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}


def open_store(url: str, timeout: float | None = None, environ: Mapping[str, str] = os.environ) -> SharedStore:
    """The store at a URL. It need not be there yet: calls fail until it is.

    Args:
        timeout: seconds of every call without progress; by default what suits the kind of store.

    Raises:
        ConfigError: the URL means no store, contains a password, or needs a library that is not installed.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"that is no address of a shared store; write it like {_FORMS}") from None
    if parts.password is not None:
        raise ConfigError(
            "the address of the shared store contains a password, which the process list shows to everybody; instead, "
            + (f"set {PASSWORD}" if parts.scheme in _VALKEY else "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        )
    given = {} if timeout is None else {"timeout": timeout}
    try:
        if parts.scheme in _VALKEY:
            return _valkey(parts, 6379 if port is None else port, environ, given)
        if parts.scheme == "s3":
            return _s3(parts, given)
        if parts.scheme == "file":
            return _folder(parts, given)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{parts.scheme}:// needs the package '{error.name}'; run: pip install 'headstart[shared]'") from None
    raise ConfigError(f"that is no address of a shared store; write it like {_FORMS}")


def _valkey(parts: SplitResult, port: int, environ: Mapping[str, str], given: dict[str, float]) -> SharedStore:
    from headstart.tiers.shared.valkey import ValkeyStore

    database = parts.path.strip("/")
    if not parts.hostname or parts.query or parts.fragment or (database and not database.isdecimal()):
        raise ConfigError("that is no address of Valkey; write it like valkey://HOST:6379 or valkey://HOST:6379/0")
    user = unquote(parts.username) if parts.username else None
    secret = _password(environ)
    if user and secret is None:
        raise ConfigError(f"the address of the shared store names a user without a password; set {PASSWORD} or {PASSWORD_FILE}")
    tls = _VALKEY[parts.scheme]
    return ValkeyStore(parts.hostname, port, int(database or 0), user=user, password=secret, tls=tls, **given)


def _password(environ: Mapping[str, str]) -> str | None:
    """The password in the environment, or in the file that it names. Raises ConfigError if that cannot be read."""
    if path := environ.get(PASSWORD_FILE):
        try:
            return Path(path).read_text("utf-8").strip()
        except (OSError, ValueError):
            raise ConfigError(f"cannot read the file that {PASSWORD_FILE} names") from None
    return environ.get(PASSWORD)


def secrets(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The secrets of stores in the environment, which no log line may contain. Raises what `open_store` raises."""
    found = (_password(environ), environ.get("AWS_SECRET_ACCESS_KEY"), environ.get("AWS_SESSION_TOKEN"))
    return [secret for secret in found if secret]


def _s3(parts: SplitResult, given: dict[str, float]) -> SharedStore:
    from headstart.tiers.shared.s3 import S3SharedStore

    options = dict(parse_qsl(parts.query))
    if not parts.netloc or "@" in parts.netloc or parts.fragment or not options.keys() <= {"endpoint", "region"}:
        raise ConfigError("that is no address in S3; write it like s3://BUCKET/PREFIX?endpoint=URL&region=NAME")
    if "@" in urlsplit(options.get("endpoint", "")).netloc:
        raise ConfigError(
            "the endpoint of the shared store contains a user or password, which the process list shows to everybody; instead, "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return S3SharedStore(parts.netloc, parts.path.strip("/"), options, **given)


def _folder(parts: SplitResult, given: dict[str, Any]) -> SharedStore:
    from headstart.tiers.shared.folder import FolderStore

    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not path.is_absolute() or path == Path("/") or parts.query or parts.fragment:
        raise ConfigError("that is no address of a folder; write it like file:///mnt/nfs/headstart")
    return FolderStore(path, **given)


def owner_keys(store: SharedStore, fleet: FleetKeys, *, encrypt: bool) -> OwnerKeys:
    """The keys of all owners: derived from the fleet keys, or (with `encrypt`) data keys in the store.

    Raises:
        ConfigError: a library is missing.
    """
    if not encrypt:
        return TagKeys(fleet)
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("encryption needs the package 'cryptography'; run: pip install 'headstart[shared]'") from None
    from headstart.tiers.shared.data_keys import DataKeys

    return DataKeys(store, fleet)


def fleet_keys(path: Path | None) -> FleetKeys:
    """The keys of the fleet. A shared store needs them: without, whoever can write there could change what models say.

    Raises:
        ConfigError: no key file is named, or it cannot be used.
    """
    if path is None:
        raise ConfigError(
            "a shared store needs a key file, the same on every server of the fleet; make one with"
            f" 'headstart fleet keygen fleet.key', and give {option('shared_key_file')}"
        )
    return FleetKeys.load(path)
