"""TLS: a server's certificate and private key, read again when they are renewed."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path
from typing import Any, Protocol

import structlog

from headstart.errors import ConfigError

_BOTH = "--tls-cert and --tls-key belong together: give both, or neither."


class Transport(Protocol):
    """How connections are encrypted, if they are."""

    @property
    def scheme(self) -> str:
        """Of its URLs."""

    def context(self) -> ssl.SSLContext | None:
        """For a server's connections."""


class NoTls:
    """Plain HTTP: a `Transport` without encryption."""

    scheme = "http"

    def context(self) -> ssl.SSLContext | None:
        return None


class Tls:
    """A `Transport` of TLS 1.2 or later with the certificate and the key of two PEM files.

    New files are taken at the next handshake; while they do not fit together, those that were read last stay.

    Args:
        cert: the certificate, and behind it those between it and the authority's.

    Raises:
        ConfigError: a file cannot be read or is no PEM, the key has a passphrase, or they do not belong together.
    """

    scheme = "https"

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert.expanduser(), key.expanduser()
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
                self._log.error("the certificate that was read last stays", error=str(error))
        connection.context = self._current

    def _state(self) -> tuple[int, ...]:
        """What changes with the files."""
        try:
            found = (self._cert.stat(), self._key.stat())
        except OSError:
            return ()
        return tuple(number for one in found for number in (one.st_mtime_ns, one.st_size, one.st_ino))

    def _read(self) -> ssl.SSLContext:
        _check(self._cert, "--tls-cert", "CERTIFICATE")
        if _check(self._key, "--tls-key", "PRIVATE KEY") & 0o007:
            self._log.warning("everybody here may read the private key; chmod 600 mends that", file=str(self._key))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert, self._key, password=self._encrypted)  # without it OpenSSL asks the terminal
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                why = f"--tls-key {self._key} is not the key of --tls-cert {self._cert}"
            else:
                said = (error.reason or str(error)).replace("_", " ").lower()
                why = f"--tls-cert {self._cert} and --tls-key {self._key} cannot be used: {said}"
            raise ConfigError(f"{why}. Give a certificate in PEM, and its own key.") from error
        return context

    def _encrypted(self) -> str:
        raise ConfigError(
            f"--tls-key {self._key} has a passphrase, and nobody is there to type it; "
            "`openssl pkey -in KEY -out NEW` writes one without."
        )


def tls(cert: Path | None, key: Path | None) -> Transport:
    """Raises ConfigError as `Tls`, or if one is given without the other."""
    if cert is None and key is None:
        return NoTls()
    if cert is None or key is None:
        raise ConfigError(_BOTH)
    return Tls(cert, key)


def _check(path: Path, option: str, kind: str) -> int:
    """The mode of a PEM file. Raises ConfigError if it cannot be read, or holds nothing of the `kind`."""
    try:
        text, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"Cannot read {option} {path}: {error.strerror}.") from error
    if b"-----BEGIN " not in text or f"{kind}-----".encode() not in text:
        raise ConfigError(f"{option} {path} holds no {kind.lower()} in PEM: a line -----BEGIN {kind}----- begins it.")
    return stat.S_IMODE(mode)
