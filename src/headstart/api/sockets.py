"""Sockets: a server listens on a TCP port or on a Unix socket."""

from __future__ import annotations

import errno
import ipaddress
import os
import shlex
import socket
import stat
from contextlib import suppress
from pathlib import Path

from headstart.errors import ConfigError
from headstart.paths import expanded

LIMIT = 0.5
"""Seconds to wait for a server that may already listen on a Unix socket."""
OWNER_ONLY = 0o600
"""The default mode of a Unix socket."""


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port` (0: any free port).

    Raises:
        ConfigError: the port is in use or not allowed, or the host is not an address of this machine.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"{port} is not a port; choose one between 0 and 65535 with --port.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Cannot resolve the host '{host}'; give another with --host.") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        code = error.errno
        if code == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} on {host} is in use; choose another with --port.") from error
        if code in (errno.EACCES, errno.EPERM):
            raise ConfigError(f"You may not use port {port}; choose one above 1023 with --port.") from error
        if code == errno.EADDRNOTAVAIL:
            raise ConfigError(f"'{host}' is not an address of this machine; give another with --host.") from error
        raise ConfigError(f"Cannot listen on {host}:{port} ({error}); change --host or --port.") from error
    return bound


class Port:
    """A TCP port that is bound.

    Attributes:
        authority: host and port, as in a URL.
        is_local: whether only this machine can reach it.
        hints: further fields for the log, beside the URL.

    Raises:
        ConfigError: as `listen`.
    """

    def __init__(self, host: str, port: int) -> None:
        self.socket = listen(host, port)
        address, number, *_ = self.socket.getsockname()
        self.authority = f"{host if ':' not in host else f'[{host}]'}:{number}"
        self.is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback

    def hints(self, scheme: str) -> dict[str, str]:
        return {}

    def close(self) -> None:
        """Idempotent."""
        self.socket.close()


class UnixSocket(Port):
    """A Unix socket that is bound. `close` removes its file.

    Args:
        mode: the file mode of the socket, which decides who may connect.

    Raises:
        ConfigError: a server already listens there, another file is there, or the folder cannot be written.
    """

    def __init__(self, path: Path, mode: int = OWNER_ONLY) -> None:
        self._path = expanded(path).absolute()
        self.authority, self.is_local = "localhost", True
        _remove_stale(self._path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o777 & ~mode)  # set before `bind`, so that nobody else can connect even for a moment
        try:
            self.socket.bind(os.fsencode(self._path))
            self.socket.listen()  # a bound socket that does not listen looks stale to other servers
            found = self._path.lstat()
        except OSError as error:
            self.socket.close()
            why = error.strerror or error
            raise ConfigError(f"Cannot listen on --unix-socket {self._path} ({why}); give another path.") from error
        finally:
            os.umask(before)
        self._file = found.st_dev, found.st_ino

    def hints(self, scheme: str) -> dict[str, str]:
        path = str(self._path)
        return {"unix_socket": path, "curl": f"curl --unix-socket {shlex.quote(path)} {scheme}://localhost/v1/models"}

    def close(self) -> None:
        with suppress(OSError):
            found = self._path.lstat()
            if (found.st_dev, found.st_ino) == self._file:  # else another server has replaced it
                self._path.unlink()
        super().close()


def _remove_stale(path: Path) -> None:
    """Removes a socket that a server left behind. Raises ConfigError if it is in use, or not a socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"--unix-socket {path} exists and is not a socket; give another path.")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(LIMIT)
            caller.connect(os.fsencode(path))
    except ConnectionRefusedError:  # nobody listens
        with suppress(FileNotFoundError):
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        if not isinstance(error, TimeoutError | BlockingIOError):
            raise ConfigError(f"Cannot use --unix-socket {path} ({error.strerror or error}); give another path.") from error
        raise ConfigError(_in_use(path)) from error
    else:
        raise ConfigError(_in_use(path))


def _in_use(path: Path) -> str:
    return f"Another server listens on --unix-socket {path}; stop it, or give another path."
