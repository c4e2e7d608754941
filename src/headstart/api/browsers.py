"""Browsers: refuses requests that a page of another site makes a browser send.

Such a page can reach this server in two ways. It sends requests across origins, and cannot read the answers. Or its name
resolves to the address of this server after it was loaded (DNS rebinding), and the browser takes the server for the site of the
page. The first kind has a foreign `Origin`, the second one a foreign `Host`. Programs send no `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers

from headstart.api.errors import Forbidden, UnsupportedMediaType
from headstart.errors import ConfigError, RequestError

ALL = "*"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""
_OWN_SITE = frozenset({"same-origin", "none"})
"""Values of `Sec-Fetch-Site` for requests of the server's own pages, and of the user."""
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/@]+?)\.?(?::(?P<port>\d*))?")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_PORTS = {"http": "80", "https": "443"}
_JSON = re.compile(r"application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)


class ForeignHost(Forbidden):
    code = "host_not_allowed"


class ForeignOrigin(Forbidden):
    code = "origin_not_allowed"


class BrowserGuard:
    """Which requests may come from a browser.

    Args:
        hosts: names of the server beside its addresses and `localhost`; `*.example.com` for all names below one, `*` for any.
        origins: origins of pages that may send requests, beside the server's own; `*` for all.

    Raises:
        ConfigError: an entry has another form.
    """

    def __init__(self, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        if (wrong := next((host for host in hosts if not (_NAME.fullmatch(host) or _is_address(host))), None)) is not None:
            raise ConfigError(f"--allow-host must be a name like llm.example.com, *.example.com or *, not {wrong!r:.100}.")
        if (wrong := next((origin for origin in origins if not _ORIGIN.fullmatch(origin)), None)) is not None:
            raise ConfigError(f"--cors must be an origin like http://localhost:3000, or *, not {wrong!r:.100}.")
        self._any_host = ALL in hosts
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._above = tuple(host[1:].lower() for host in hosts if host.startswith("*."))
        self._any_origin = ALL in origins
        self._origins = frozenset(origins)

    def refusal(self, method: str, headers: Headers) -> RequestError | None:
        """The error of a request that must not be served, or None."""
        hosts = headers.getlist("host")  # a browser sends one; without any it is no browser
        if not self._any_host and (foreign := next((host for host in hosts if not self._is_ours(host)), None)) is not None:
            return ForeignHost(
                f"The host '{foreign:.200}' is not a name of this server. If it should be, start the server with "
                f"--allow-host {_host_of(foreign) or 'NAME'}; a proxy before the server may also send another Host."
            )
        origins = headers.getlist("origin")
        if not origins and headers.get("sec-fetch-site", "none") not in _OWN_SITE:
            origins = ["null"]  # something in the browser hides it
        if method in _SAFE or not origins:
            return None
        if (foreign := next((origin for origin in origins if not self._may_send(origin, hosts)), None)) is not None:
            which = "of an unknown origin" if foreign == "null" else f"of '{foreign:.200}'"
            allowed = ALL if foreign == "null" else f"{foreign:.200}"
            return ForeignOrigin(
                f"Pages {which} may not send requests to this server. If they should, start it with --cors {allowed}; a proxy "
                "before the server must pass the client's Host on."
            )
        if _has_body(headers) and not _JSON.fullmatch(headers.get("content-type", "")):
            return UnsupportedMediaType("A request of a web page needs the header 'content-type: application/json'.")
        return None

    def _is_ours(self, authority: str) -> bool:
        host = _host_of(authority)
        return host in self._hosts or _is_address(host) or (bool(self._above) and host.endswith(self._above))

    def _may_send(self, origin: str, hosts: Iterable[str]) -> bool:
        return self._any_origin or origin in self._origins or any(_is_same(origin, host) for host in hosts)


def _host_of(authority: str) -> str:
    """The host of `host:port`, in lower case; "" if it is none."""
    found = _AUTHORITY.fullmatch(authority)
    return "" if found is None else found["host"].lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_same(origin: str, authority: str) -> bool:
    """Whether a page of `origin` has its server at `authority`. The scheme is not compared: a proxy may end TLS."""
    scheme, _, rest = origin.partition("://")
    page, server = _AUTHORITY.fullmatch(rest), _AUTHORITY.fullmatch(authority)
    if page is None or server is None:
        return False
    default = _PORTS.get(scheme, "")
    ports = [found["port"] or default for found in (page, server)]
    return page["host"].lower() == server["host"].lower() and ports[0] == ports[1]


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
