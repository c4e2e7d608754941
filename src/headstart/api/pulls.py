"""Pulls: who may fetch models over HTTP, and how many at the same time. A model fills the disk, so not everybody may.

With keys it is the operator. Without keys it is who reaches the server from its own machine, unless the operator allows more.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from starlette.types import Scope

from headstart.api.auth import OPERATOR, Keys
from headstart.api.errors import Forbidden
from headstart.errors import Overloaded

Pullers = Literal["operator", "local", "all"]
"""Who may fetch models: the operator, where there are keys; without keys also callers on this machine; or also all others."""

MOST = 2
"""Most downloads at the same time."""
AGAIN = 30.0
"""Seconds after which a refused caller may try again."""
_FORWARDED = frozenset({b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via"})
"""Headers of requests that came through a proxy. Such a request may be from anywhere."""


class Pulls:
    """The downloads of a server. Thread-safe.

    Args:
        keys: of the server.
        pullers: who may fetch models.
        most: downloads at the same time.
    """

    def __init__(self, keys: Keys, pullers: Pullers = "local", most: int = MOST) -> None:
        self._keys = keys
        self._pullers = pullers
        self._most = most
        self._running = 0
        self._lock = threading.Lock()

    def check(self, scope: Scope) -> None:
        """Raises Forbidden if the caller may not fetch models, and Overloaded if too many are being fetched."""
        if not scope["operator"]:
            raise Forbidden(f"Fetching a model needs the key named '{OPERATOR}' in --api-key-file.")
        if not self._keys.closed and self._pullers != "all" and (self._pullers == "operator" or not _is_local(scope)):
            raise Forbidden(
                "Fetching a model over the network needs a key: this server has none, so only programs on its own machine may "
                "fetch. Its operator can give --api-key, or --allow-pull."
            )
        if self._running >= self._most:
            raise self._overloaded()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a download. Raises Overloaded if too many run."""
        with self._lock:
            if self._running >= self._most:
                raise self._overloaded()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def _overloaded(self) -> Overloaded:
        return Overloaded(f"{self._most} models are being fetched already; try again later.", retry_after=AGAIN)


def _is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine, and through no proxy."""
    if any(name in _FORWARDED for name, _ in scope["headers"]):
        return False
    client = scope.get("client")
    if client is None or not client[0]:
        return True  # a Unix socket, whose mode says who may connect
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
