"""Server: finds a running server by the options and variables that `serve` reads, and asks it."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from headstart.cli.look import plain
from headstart.cli.network import ApiKeyFile, Host, PortOption, TlsCert, UnixSocketOption
from headstart.cli.options import again, cli_option, replaced, typed
from headstart.errors import ConfigError
from headstart.paths import expanded

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse
    from urllib.request import BaseHandler

WHERE = "The server"

Url = Annotated[
    str | None,
    typer.Option(
        envvar="HEADSTART_URL",
        metavar="URL",
        rich_help_panel=WHERE,
        help="Address of the server, instead of the following options.",
        show_default="http://127.0.0.1:8000, or from the variables of `serve`",
    ),
]
ServerHost = Annotated[str | None, again(Host, WHERE, "Address that the server listens on; 0.0.0.0 means this machine.")]
ServerPort = Annotated[int | None, again(PortOption, WHERE, "Port of the server.")]
ServerSocket = Annotated[
    Path | None, again(UnixSocketOption, WHERE, "Unix socket of the server, instead of --host and --port.")
]
ServerCert = Annotated[
    Path | None,
    again(
        TlsCert,
        WHERE,
        "Certificate of the server, in PEM. The command then uses HTTPS, and accepts only this certificate.",
        show_default="none: plain HTTP, or from --url",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="HEADSTART_API_KEY", metavar="KEY", rich_help_panel=WHERE, help="Key of the server, if it needs one."),
]
ClientKeyFile = Annotated[
    Path | None, again(ApiKeyFile, WHERE, "File of keys, as for `serve`. Without --api-key its first key is used.")
]

TIMEOUT = 60.0
"""Seconds to wait for an answer. The server may have to render and tokenise two large bodies for it."""

_PEM = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


OPTIONS = {
    "url": Url,
    "host": ServerHost,
    "port": ServerPort,
    "unix_socket": ServerSocket,
    "tls_cert": ServerCert,
    "api_key": ApiKey,
    "api_key_file": ClientKeyFile,
}


def asks_server(command: Callable[..., None]) -> Callable[..., None]:
    """A decorator: the command gets the options above in place of its parameter `server`, which receives the address."""
    options = [cli_option(name, kind) for name, kind in OPTIONS.items()]
    return replaced("server", [cli_option("context", typer.Context), *options], _found)(command)


def _found(given: dict[str, Any]) -> ServerAddress:
    context: typer.Context = given.pop("context")
    return ServerAddress.found(given, typed(context))


class ServerRefusal(ConfigError):
    """The server has answered with an error, of this HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server, and how to connect to it.

    Attributes:
        url: scheme and authority.
        unix_socket: the socket to connect to, whatever host the URL names; None for TCP.
        certificate: PEM file whose first certificate must be the server's; None to trust the system's authorities.
        key: API key; "" for none.
    """

    url: str
    unix_socket: Path | None = None
    certificate: Path | None = None
    key: str = ""

    @classmethod
    def found(cls, given: Mapping[str, Any], typed: Collection[str]) -> ServerAddress:
        """The server that options name.

        Args:
            given: all options above by name; None for options that are neither typed nor in the environment.
            typed: the options on the command line. They override the environment.

        Raises:
            ConfigError: they contradict each other, name no server, or the key file cannot be read.
        """
        key = _key(given, typed)
        by_address = {"host", "port"} & {*typed}
        if by_address and {"url", "unix_socket"} & {*typed}:
            raise ConfigError("--url and --unix-socket replace --host and --port: leave these out.")
        if "url" in typed or (given["url"] and not by_address and "unix_socket" not in typed):
            via, certificate = (given[name] if name in typed else None for name in ("unix_socket", "tls_cert"))
            url = given["url"].rstrip("/").removesuffix("/v1")
            url = url if "://" in url else f"{_scheme(certificate)}://{url}"
            if certificate is not None and not url.casefold().startswith("https://"):
                raise ConfigError(f"--tls-cert is for HTTPS, and {url} is not: give --url https://….")
            return cls(url, via, certificate, key)
        certificate = given["tls_cert"]
        scheme = _scheme(certificate)
        via = None if by_address else given["unix_socket"]
        if via is not None:
            return cls(f"{scheme}://localhost", via, certificate, key)
        if given["port"] == 0:
            raise ConfigError("Port 0 means any free port: the server's log says which one; give it with --port.")
        return cls(f"{scheme}://{_reachable(given['host'] or '127.0.0.1')}:{given['port'] or 8000}", None, certificate, key)

    def check(self) -> None:
        """Raises ConfigError if the certificate cannot be read. `open` does so too, but only when the server has answered."""
        if self.certificate is not None:
            _own(self.certificate)

    def open(self, path: str, body: dict[str, Any] | None = None, *, timeout: float = TIMEOUT, **headers: str) -> HTTPResponse:
        """The beginning of the answer to a GET, or to a POST of a body.

        Args:
            timeout: most seconds between two parts of the answer.
            headers: with `_` in place of `-`; empty ones are left out.

        Raises:
            ServerRefusal: the answer is an error.
            ConfigError: the certificate cannot be read.
            OSError, http.client.HTTPException, ValueError: there is no answer.
        """
        import urllib.error
        import urllib.request

        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        if self.key:
            key = self.key.encode("utf-8", "surrogateescape").decode("latin-1")  # urllib sends headers as Latin-1
            request.add_header("authorization", f"Bearer {key}")
        for name, value in headers.items():
            if value:
                request.add_header(name.replace("_", "-"), value)

        class NoRedirects(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, *_: object) -> None:
                """Follows no redirect: the other server would get the key."""

        # No proxy: it could not reach a local server.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects, self._handler())
        try:
            return cast("HTTPResponse", opener.open(request, timeout=timeout))
        except urllib.error.HTTPError as error:
            with error:
                moved = error.headers.get("location") if 300 <= error.code < 400 else None
                message = self._refusal(error.code, error.read()) if moved is None else self._redirect(path, moved)
                raise ServerRefusal(error.code, message) from None

    def ask(self, path: str, body: dict[str, Any] | None = None, *, start: str = "headstart serve MODEL") -> dict[str, Any]:
        """The answer to a GET, or to a POST of a body.

        Args:
            start: the command that starts such a server, for messages.

        Raises:
            ConfigError: there is no answer, or it is an error or not a JSON object.
        """
        from http.client import HTTPException

        try:
            with self.open(path, body) as response:
                answer = json.load(response)
        except (OSError, ValueError, HTTPException) as error:
            raise ConfigError(
                f"No headstart server answers at {self.place} ({getattr(error, 'reason', error)}): start one with "
                f"`{start}`, or give --url or --unix-socket."
            ) from None
        if not isinstance(answer, dict):
            raise ConfigError(f"The server at {self.url} is not headstart; give --url.")
        return answer

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return self.url if self.unix_socket is None else f"the socket {self.unix_socket}"

    def _refusal(self, status: int, body: bytes) -> str:
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {status}"
        return f"{self.url} says: {plain(str(message))}"

    def _redirect(self, path: str, moved: str) -> str:
        """The refusal of a redirect. `moved`: the new address of what was asked for, perhaps a relative one."""
        from urllib.parse import urljoin

        moved, advice = urljoin(self.url + path, moved), "Redirects are not followed"
        address = moved.rstrip("/")
        if address.endswith(path) and address != self.url + path:
            moved, advice = address.removesuffix(path), f"{advice}; give that address with --url"
        return f"{self.url} redirects to {plain(moved)}. {advice}."

    def _handler(self) -> BaseHandler:
        """Opens connections over TCP or the Unix socket, and checks the server's certificate."""
        import http.client
        import socket
        import urllib.request

        where = self

        class Plain(http.client.HTTPConnection):
            def connect(self) -> None:
                if where.unix_socket is None:
                    super().connect()
                    return
                self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.sock.settimeout(TIMEOUT)
                self.sock.connect(os.fsencode(expanded(where.unix_socket)))

        class Secured(Plain):
            default_port = http.client.HTTPS_PORT

            def connect(self) -> None:
                super().connect()
                self.sock = _secured(self, where.certificate)

        class Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
            def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Plain, request)

            def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Secured, request)

        return Handler()


def _secured(connection: HTTPConnection, certificate: Path | None) -> ssl.SSLSocket:
    """The connection with TLS. Raises OSError if the server's certificate is wrong."""
    context = ssl.create_default_context()
    if certificate is None:
        return context.wrap_socket(connection.sock, server_hostname=connection.host)
    wanted = _own(certificate)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate itself is compared below
    secured = context.wrap_socket(connection.sock, server_hostname=connection.host)
    if secured.getpeercert(binary_form=True) != wanted:
        secured.close()
        raise ssl.SSLError(f"its certificate is not the one in {certificate}")
    return secured


def _own(certificate: Path) -> bytes:
    """The first certificate of a PEM file, which is the server's. Raises ConfigError."""
    try:
        found = _PEM.search(expanded(certificate).read_text("ascii", "replace"))
    except OSError as error:
        raise ConfigError(f"Cannot read --tls-cert {certificate}: {error.strerror}; give --url instead.") from error
    if found is None:
        raise ConfigError(f"--tls-cert {certificate} has no certificate in PEM; give the server's, or --url.")
    return ssl.PEM_cert_to_DER_cert(found[0])


def _scheme(certificate: Path | None) -> str:
    """That of a server with or without a certificate."""
    return "http" if certificate is None else "https"


def _reachable(host: str) -> str:
    """A host in the form of URLs. The address for all addresses becomes this machine's."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"


def _key(given: Mapping[str, Any], typed: Collection[str]) -> str:
    by_file = "api_key_file" in typed and "api_key" not in typed
    if not by_file and (keys := (given["api_key"] or "").split()):
        return str(keys[0])
    if given["api_key_file"] is None:
        return ""
    from headstart.api.auth import read

    lines, _ = read(expanded(given["api_key_file"]))
    return lines[0].key if lines else ""
