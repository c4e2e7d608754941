"""S3 as a shared store, over the library `obstore`: one request an object, several at a time.

S3 counts the age of an object from its upload, and cannot be told otherwise. So an object that must expire is not uploaded long
after its text was first stored (`LATE`): nothing outlives its term.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import S3Store

from headstart.tiers.shared.store import GROWS, MOST, SLOWEST, Blob, Reason, SharedStore, Stored, StoreError, room

TIMEOUT = 2.0
"""Seconds for a connection, and without progress for an answer: S3 needs longer than a store on the local network."""
THREADS = 8
"""Requests at a time for one call."""
LATE = 1 / 20
"""The part of its whole life after which an object is no longer uploaded. `expiry.sweep` deletes that much earlier."""
LARGEST = 64 << 20
"""Bytes of the largest object for which a request has time."""
STEP = 1 << 20
"""Bytes of one step of receiving."""
_DELETE = 1000

T = TypeVar("T")
A = TypeVar("A")


class S3SharedStore(SharedStore):
    """Objects in a bucket, under a prefix. Nothing is sent before the first call.

    Args:
        options: of obstore's S3Store, such as `endpoint` and `region`. What is missing comes from AWS's environment variables.
        timeout: seconds.
    """

    expires = False
    at_once = THREADS

    def __init__(
        self, bucket: str, prefix: str = "", options: Mapping[str, Any] | None = None, *, timeout: float = TIMEOUT
    ) -> None:
        options = dict(options or {})
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._store: Any = S3Store(
            bucket,
            prefix=prefix or None,
            virtual_hosted_style_request=False,
            client_options={
                "connect_timeout": timedelta(seconds=timeout),
                "read_timeout": timedelta(seconds=timeout),
                "timeout": timedelta(seconds=timeout + LARGEST / SLOWEST),
                "allow_http": str(options.get("endpoint", "")).startswith("http://"),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout)},
            **options,
        )
        self._pool = ThreadPoolExecutor(THREADS, "shared-s3")
        self._closed = False

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Turns the library's errors into StoreError, without their texts: they quote names and answers."""
        if self._closed:
            raise StoreError("closed", "the store was closed")
        try:
            yield
        except (exceptions.BaseError, OSError) as error:
            reason, detail = _meaning(error)
            raise StoreError(reason, f"{self.url}: {detail}") from None

    def _each(self, work: Callable[[A], T], all: Sequence[A]) -> list[T]:
        """`work` for each of them, several at a time. Raises the first error."""
        with self._calling():
            if len(all) == 1:
                return [work(all[0])]
            try:
                return [future.result() for future in [self._pool.submit(work, one) for one in all]]
            except RuntimeError:
                raise StoreError("closed", "the store was closed") from None

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, names: Sequence[str], most: int = MOST) -> list[Blob | None]:
        return self._each(partial(self._get, most), names)

    def _get(self, most: int, name: str) -> Blob | None:
        try:
            found = obstore.get(self._store, name)
        except FileNotFoundError:
            return None
        data, done = room(min(most, found.meta["size"])), 0
        for part in found.stream(min_chunk_size=STEP):
            self.received += 1
            taken = memoryview(part)[: len(data) - done]
            data[done : done + len(taken)] = taken
            done += len(taken)
            if done == len(data):
                break
        return data[:done]

    def have(self, names: Sequence[str]) -> list[bool]:
        return self._each(self._has, names)

    def _has(self, name: str) -> bool:
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        finally:
            self.received += 1
        return True

    def objects(self, prefix: str = "") -> Iterator[Stored]:
        now = time.time()
        with self._calling():
            for some in obstore.list(self._store, prefix.rpartition("/")[0] or None):
                for one in some:
                    if one["path"].startswith(prefix):
                        yield Stored(one["path"], one["size"], now - one["last_modified"].timestamp())

    def warnings(self, term: float = math.inf) -> list[str]:
        return [GROWS] if term == math.inf else []

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        return self._put(name, data, age, life, "overwrite")

    def put_new(self, name: str, data: Blob, *, age: float = 0.0, life: float = math.inf) -> bool:
        return self._put(name, data, age, life, "create")

    def _put(self, name: str, data: Blob, age: float, life: float, mode: str) -> bool:
        if age > (age + life) * LATE:
            return False
        store: Any = obstore
        with self._calling():
            try:
                store.put(self._store, name, data, mode=mode, use_multipart=False)
            except exceptions.AlreadyExistsError:
                return False
        return True

    def touch(self, names: Sequence[str]) -> None:
        pass  # S3 evicts nothing

    def limit(self, lives: Sequence[tuple[str, float]]) -> None:
        pass  # `expiry.sweep` deletes

    def delete(self, names: Sequence[str]) -> None:
        with self._calling():
            for at in range(0, len(names), _DELETE):
                obstore.delete(self._store, list(names[at : at + _DELETE]))

    def clean(self, prefix: str = "") -> None:
        pass  # a write leaves nothing of itself

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


def _meaning(error: Exception) -> tuple[Reason, str]:
    """The reason of an error of the library, and what to say of it. Only its type and a few words of it tell."""
    text = str(error).lower()
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or "credential" in text:
        return "auth", "access is denied; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the rights in the bucket"
    if "timed out" in text or "kind: timeout" in text:
        return "timeout", "no answer in time"
    if "insufficientstorage" in text or "507 insufficient" in text or "quotaexceeded" in text:
        return "full", "it has no room"
    if isinstance(error, FileNotFoundError):
        return "other", "there is no such bucket"
    if "kind: connect" in text or "error sending request" in text:
        return "refused", "nobody answers there, or the connection broke"
    return "other", f"an answer that headstart does not expect ({type(error).__name__})"
