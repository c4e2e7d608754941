"""TLS: the server's certificate and private key, which are read again when they change."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path
from typing import Any, Protocol

import structlog

from headstart.errors import ConfigError
from headstart.paths import expanded

_BOTH = "--tls-cert and --tls-key belong together: give both, or neither."


class Transport(Protocol):
    """Whether and how connections are encrypted."""

    @property
    def scheme(self) -> str:
        """The scheme of its URLs."""

    def context(self) -> ssl.SSLContext | None:
        """The TLS context of the server's connections; None without TLS."""


class NoTls:
    """Plain HTTP: a `Transport` without encryption."""

    scheme = "http"

    def context(self) -> ssl.SSLContext | None:
        return None


class Tls:
    """A `Transport` of TLS 1.2 or later with the certificate and the key of two PEM files.

    Changed files are read at the next handshake. Until key and certificate fit together, the previous pair stays in use.

    Args:
        cert: the certificate, followed by the intermediate certificates.

    Raises:
        ConfigError: a file cannot be read or is not PEM, the key has a passphrase, or it does not fit the certificate.
    """

    scheme = "https"

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = expanded(cert), expanded(key)
        self._log = structlog.get_logger("headstart.api")
        self._seen = self._state()
        self._current = self._read()
        self._current.sni_callback = self._renew

    def context(self) -> ssl.SSLContext:
        return self._current

    def _renew(self, connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Called at each handshake, with a name or without."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._current = self._read()
                self._log.info("certificate read again", file=str(self._cert))
            except ConfigError as error:
                self._log.error("the certificate could not be read again; the previous one stays", error=str(error))
        connection.context = self._current

    def _state(self) -> tuple[int, ...]:
        """What changes with the files."""
        try:
            found = (self._cert.stat(), self._key.stat())
        except OSError:
            return ()
        return tuple(number for file in found for number in (file.st_mtime_ns, file.st_size, file.st_ino))

    def _read(self) -> ssl.SSLContext:
        _check(self._cert, "--tls-cert", "CERTIFICATE")
        if _check(self._key, "--tls-key", "PRIVATE KEY") & 0o007:
            self._log.warning("all users of this machine may read the private key; run chmod 600", file=str(self._key))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert, self._key, password=self._encrypted)  # else OpenSSL asks on the terminal
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                why = f"--tls-key {self._key} is not the key of --tls-cert {self._cert}"
            else:
                reason = (error.reason or str(error)).replace("_", " ").lower()
                why = f"--tls-cert {self._cert} and --tls-key {self._key} cannot be used: {reason}"
            raise ConfigError(f"{why}. Give a certificate in PEM, and its own key.") from error
        return context

    def _encrypted(self) -> str:
        raise ConfigError(
            f"--tls-key {self._key} has a passphrase, and a server cannot ask for it; "
            "`openssl pkey -in KEY -out NEW` writes a key without one."
        )


def tls(cert: Path | None, key: Path | None) -> Transport:
    """The transport for these files; plain HTTP without them. Raises ConfigError as `Tls`, or if only one is given."""
    if cert is None and key is None:
        return NoTls()
    if cert is None or key is None:
        raise ConfigError(_BOTH)
    return Tls(cert, key)


def _check(path: Path, option: str, kind: str) -> int:
    """The mode of a PEM file. Raises ConfigError if it cannot be read, or does not contain the `kind`."""
    try:
        text, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"Cannot read {option} {path}: {error.strerror}.") from error
    if b"-----BEGIN " not in text or f"{kind}-----".encode() not in text:
        raise ConfigError(f"{option} {path} holds no {kind.lower()} in PEM, which begins with -----BEGIN {kind}-----.")
    return stat.S_IMODE(mode)
