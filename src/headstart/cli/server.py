"""Server: a running one, as commands find it by the options and variables that `serve` reads, and ask it."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.errors import ConfigError

if TYPE_CHECKING:
    from http.client import HTTPConnection
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
ServerHost = Annotated[
    str | None,
    typer.Option(
        envvar="HEADSTART_HOST",
        metavar="ADDRESS",
        rich_help_panel=WHERE,
        help="The same as for `serve`; 0.0.0.0 means this machine.",
        show_default="127.0.0.1",
    ),
]
ServerPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, envvar="HEADSTART_PORT", metavar="N", rich_help_panel=WHERE, help="The same.", show_default="8000"
    ),
]
ServerSocket = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_UNIX_SOCKET", metavar="PATH", rich_help_panel=WHERE, help="The same, instead of --host and --port."
    ),
]
ServerCert = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_TLS_CERT",
        metavar="FILE",
        rich_help_panel=WHERE,
        help="The same: the command then uses HTTPS, and accepts only this certificate.",
        show_default="none: plain HTTP, or from --url",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="HEADSTART_API_KEY", metavar="KEY", rich_help_panel=WHERE, help="Key of the server, if it needs one."),
]
ClientKeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_API_KEY_FILE",
        metavar="FILE",
        rich_help_panel=WHERE,
        help="The same as for `serve`: without --api-key its first key is used.",
    ),
]

TIMEOUT = 60.0
"""Seconds to wait for an answer: two large bodies are rendered and tokenised for it."""

_PEM = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def typed(context: typer.Context, names: Collection[str]) -> set[str]:
    """Which options are on the command line, rather than in the environment or nowhere."""
    return {name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is, and how it is asked.

    Attributes:
        url: scheme and authority.
        unix_socket: what leads there, whatever host the URL names.
        certificate: PEM file whose first certificate is the server's own; without one the system's authorities vouch for it.
        key: that opens it; "" for none.
    """

    url: str
    unix_socket: Path | None = None
    certificate: Path | None = None
    key: str = ""

    @classmethod
    def found(cls, given: Mapping[str, Any], typed: Collection[str]) -> ServerAddress:
        """The server that options name.

        Args:
            given: all options above, by their names; None for what is neither typed nor in the environment.
            typed: those that are on the command line, which go before the environment.

        Raises:
            ConfigError: they contradict each other, name no server, or the file of keys cannot be read.
        """
        key = _key(given)
        by_address = {"host", "port"} & {*typed}
        if by_address and {"url", "unix_socket"} & {*typed}:
            raise ConfigError("--url and --unix-socket take the place of --host and --port: leave these out.")
        if "url" in typed or (given["url"] and not by_address and "unix_socket" not in typed):
            via, certificate = (given[name] if name in typed else None for name in ("unix_socket", "tls_cert"))
            url = given["url"].rstrip("/").removesuffix("/v1")
            return cls(url if "://" in url else f"http://{url}", via, certificate, key)
        certificate = given["tls_cert"]
        scheme = "http" if certificate is None else "https"
        via = None if by_address else given["unix_socket"]
        if via is not None:
            return cls(f"{scheme}://localhost", via, certificate, key)
        if given["port"] == 0:
            raise ConfigError("Port 0 was any free one: the server's log says which; give it with --port.")
        return cls(f"{scheme}://{_reachable(given['host'] or '127.0.0.1')}:{given['port'] or 8000}", None, certificate, key)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a GET, or to a POST of a body.

        Raises:
            ConfigError: nobody answers, or the answer is a refusal or no JSON object.
        """
        import urllib.error
        import urllib.request

        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        if self.key:
            key = self.key.encode("utf-8", "surrogateescape").decode("latin-1")  # as bytes, which is how it is sent
            request.add_header("authorization", f"Bearer {key}")
        # A proxy knows no local server.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), self._handler())
        try:
            with opener.open(request, timeout=TIMEOUT) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise ConfigError(self._refusal(error.code, error.read())) from None
        except (OSError, ValueError) as error:
            where = self.url if self.unix_socket is None else f"the socket {self.unix_socket}"
            raise ConfigError(
                f"No headstart server answers at {where} ({getattr(error, 'reason', error)}): start one with "
                "`headstart serve MODEL`, or give --url or --unix-socket."
            ) from None
        if not isinstance(answer, dict):
            raise ConfigError(f"What answers at {self.url} is no headstart server; give --url.")
        return answer

    def _refusal(self, status: int, body: bytes) -> str:
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {status}"
        return f"{self.url} says: {message}"

    def _handler(self) -> BaseHandler:
        """Opens connections to the server, whatever leads there, and makes sure that it is the one that is meant."""
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
                self.sock.connect(os.fsencode(where.unix_socket.expanduser()))

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
    """The connection with TLS. Raises OSError if the server is not the one that is meant."""
    context = ssl.create_default_context()
    if certificate is None:
        return context.wrap_socket(connection.sock, server_hostname=connection.host)
    wanted = _own(certificate)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is compared as a whole: nobody need vouch for it
    secured = context.wrap_socket(connection.sock, server_hostname=connection.host)
    if secured.getpeercert(binary_form=True) != wanted:
        secured.close()
        raise ssl.SSLError(f"its certificate is not the one in {certificate}")
    return secured


def _own(certificate: Path) -> bytes:
    """The first certificate of a PEM file: a server's own. Raises ConfigError."""
    try:
        found = _PEM.search(certificate.expanduser().read_text("ascii", "replace"))
    except OSError as error:
        raise ConfigError(f"Cannot read --tls-cert {certificate}: {error.strerror}; give --url instead.") from error
    if found is None:
        raise ConfigError(f"--tls-cert {certificate} holds no certificate in PEM; give the server's, or --url.")
    return ssl.PEM_cert_to_DER_cert(found[0])


def _reachable(host: str) -> str:
    """A host as it stands in a URL; this machine in place of all addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"


def _key(given: Mapping[str, Any]) -> str:
    if keys := (given["api_key"] or "").split():
        return str(keys[0])
    if given["api_key_file"] is None:
        return ""
    from headstart.api.auth import read

    lines, _ = read(given["api_key_file"])
    return lines[0].key if lines else ""
