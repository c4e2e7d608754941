"""Valkey (or Redis) as a shared store, over the library `valkey`.

The library connects, authenticates and keeps the connections; `resp` reads and writes what goes through them.
"""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from valkey import Valkey, exceptions
from valkey.connection import BlockingConnectionPool, Connection, SSLConnection

from headstart.tiers.shared.resp import PlacingParser, SteppedPacker
from headstart.tiers.shared.store import MOST, TIMEOUT, Blob, Placed, Reason, SharedStore, Stored, StoreError

CONNECTIONS = 16
"""Most connections of one server."""
WINDOW = 8
"""Most objects that are asked for at once. Valkey holds the answers in its memory until they are read."""
_LIST = 500

_REASONS: tuple[tuple[type[Exception], Reason, str], ...] = (
    (exceptions.TimeoutError, "timeout", "no answer in time"),
    (exceptions.AuthenticationError, "auth", "user or password is wrong; HEADSTART_SHARED_PASSWORD sets the password"),
    (exceptions.NoPermissionError, "auth", "this user may not do that; docs/shared.md lists the commands that headstart needs"),
    (exceptions.OutOfMemoryError, "full", "its memory is full, and it evicts nothing"),
    (exceptions.ConnectionError, "refused", "nobody answers there, or the connection broke"),
    (exceptions.ReadOnlyError, "other", "this is a replica, which cannot be written"),
    (exceptions.ValkeyError, "other", "an answer that headstart does not expect"),
    (OSError, "refused", "the connection broke"),
)
"""What an error of the library means; the first row that fits counts."""


class ValkeyStore(SharedStore):
    """Objects in one database of a Valkey server. Nothing is sent before the first call.

    Args:
        tls: whether the connection is encrypted, and the server's certificate checked (against the system's authorities, or
            the file that SSL_CERT_FILE names).
        timeout: seconds.
    """

    expires = True

    def __init__(
        self,
        host: str,
        port: int,
        database: int = 0,
        *,
        user: str | None = None,
        password: str | None = None,
        tls: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        where = f"[{host}]" if ":" in host else host
        self.url = f"valkey{'s' if tls else ''}://{where}:{port}/{database}"
        self._plain = not tls and host not in ("localhost", "127.0.0.1", "::1")
        encrypted: dict[str, Any] = {"ssl_cert_reqs": "required", "ssl_check_hostname": True} if tls else {}
        pool: Any = BlockingConnectionPool  # the library's hints are incomplete
        self._pool = pool(
            CONNECTIONS,
            timeout,
            SSLConnection if tls else Connection,
            host=host,
            port=port,
            db=database,
            username=user,
            password=password,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            parser_class=partial(PlacingParser, received=self._moved),
            command_packer=SteppedPacker(),
            lib_name=None,
            lib_version=None,
            **encrypted,
        )
        self._client = Valkey(connection_pool=self._pool)
        self._closed = False

    def _moved(self) -> None:
        self.received += 1

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Turns the library's errors into StoreError. Their texts are left out: they can quote what was sent."""
        if self._closed:
            raise StoreError("closed", "the store was closed")
        try:
            yield
        except Exception as error:
            if self._closed:  # meanwhile, in another thread
                raise StoreError("closed", "the store was closed") from None
            if not isinstance(error, exceptions.ValkeyError | OSError):
                raise
            if isinstance(error, exceptions.ReadOnlyError):
                self._pool.disconnect()  # after a failover, the address leads to another server
            if isinstance(error.__context__, ssl.SSLError):
                raise StoreError("auth", f"{self.url} does not speak TLS, or its certificate is not trusted") from None
            _, reason, detail = next(row for row in _REASONS if isinstance(error, row[0]))
            raise StoreError(reason, f"{self.url}: {detail}") from None

    def _all(self, commands: Sequence[tuple[str | Blob, ...]]) -> list[Any]:
        """The answers to several commands, in one round trip."""
        pipeline: Any
        with self._calling(), self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute())

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, names: Sequence[str], most: int = MOST) -> list[Blob | None]:
        found: list[Blob | None] = []
        for some in _batches(names, WINDOW):
            found += [None if value is None else memoryview(value) for value in self._all([("GET", name) for name in some])]
        return found

    def get_into(self, wanted: Sequence[tuple[str, Blob]], at: int) -> list[Placed | None]:
        found: list[Placed | None] = []
        for some in _batches(wanted, WINDOW):
            with self._calling():
                found += self._placed(some, at)
        return found

    def _placed(self, wanted: Sequence[tuple[str, Blob]], at: int) -> list[Placed | None]:
        connection: Any = self._pool.get_connection("GET")
        try:
            connection.send_packed_command(connection.pack_commands([("GET", name) for name, _ in wanted]))
            connection.parser.places.extend((out, at) for _, out in wanted)
            return [connection.read_response() for _ in wanted]
        except BaseException:
            connection.disconnect()  # answers may still come
            raise
        finally:
            self._pool.release(connection)

    def have(self, names: Sequence[str]) -> list[bool]:
        return [bool(count) for count in self._all([("EXISTS", name) for name in names])] if names else []

    def objects(self, prefix: str = "") -> Iterator[Stored]:
        match, at = re.sub(r"([*?\[\]\\^])", r"\\\1", prefix) + "*", "0"
        while True:
            ((cursor, keys),) = self._all([("SCAN", at, "MATCH", match, "COUNT", str(_LIST))])
            names = [key.decode("utf-8", "replace") for key in keys]
            if names:
                for name, size in zip(names, self._all([("STRLEN", name) for name in names]), strict=True):
                    yield Stored(name, size, None)
            at = cursor.decode() if isinstance(cursor, bytes) else str(cursor)
            if at == "0":
                return

    def warnings(self, term: float = math.inf) -> list[str]:
        said = []
        if self._plain:
            said.append(f"The connection to {self.url} is not encrypted. Use valkeys:// unless the network is trusted.")
        try:
            ((info),) = self._all([("INFO", "memory")])
        except StoreError as error:
            if error.reason != "auth":
                raise
            unseen = "This user may not see how Valkey evicts (INFO)."
            return [*said, f"{unseen} Make sure that maxmemory is set, and that maxmemory-policy is allkeys-lfu."]
        facts = info if isinstance(info, dict) else _facts(info)
        policy = str(facts.get("maxmemory_policy", ""))
        if not int(facts.get("maxmemory", 0)):
            said.append("Valkey has no maxmemory, so it grows until the machine has no memory. Set maxmemory.")
        elif policy == "noeviction":
            said.append("Valkey evicts nothing (noeviction), so it refuses writes when full. Set maxmemory-policy allkeys-lfu.")
        elif policy.startswith("volatile") and term == math.inf:
            said.append(f"Valkey evicts only what expires ({policy}). Set maxmemory-policy allkeys-lfu, or let objects expire.")
        return said

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        return self._set(name, data, life)

    def put_new(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        return self._set(name, data, life, "NX")

    def _set(self, name: str, data: Blob, life: float, *condition: str) -> bool:
        if life <= 0:
            return False
        expiry = () if life == math.inf else ("PX", str(max(1, _milliseconds(life))))
        ((answer),) = self._all([("SET", name, data, *expiry, *condition)])
        return answer is not None

    def touch(self, names: Sequence[str]) -> None:
        if names:
            self._all([("TOUCH", *names)])

    def limit(self, lives: Sequence[tuple[str, float]]) -> None:
        for some in _batches(lives, _LIST):
            self._all([("PEXPIRE", name, str(_milliseconds(life)), "LT") for name, life in some if life < math.inf])

    def delete(self, names: Sequence[str]) -> None:
        for some in _batches(names, _LIST):
            self._all([("UNLINK", *some)])

    def clean(self, prefix: str = "") -> None:
        pass  # a write leaves nothing of itself

    def close(self) -> None:
        self._closed = True
        self._pool.disconnect()


def _batches(all: Any, size: int) -> Iterator[Any]:
    """Parts of a sequence, of at most `size` elements."""
    return (all[at : at + size] for at in range(0, len(all), size))


def _milliseconds(life: float) -> int:
    return max(0, int(life * 1000))


def _facts(info: bytes) -> dict[str, str]:
    """The answer to INFO, as a table."""
    pairs = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {key: value for key, colon, value in pairs if colon}
