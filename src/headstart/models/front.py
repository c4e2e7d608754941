"""Front: the state that the outer layers and the routes of a server of several models share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from starlette.requests import Request

from headstart.api.drain import Drain
from headstart.api.incoming import MAX_BODY, whole_body
from headstart.api.served import CallCounts, RecordsCalls
from headstart.api.served_models import SERVES_GIVEN, ModelState, ServedModel, ServedModels
from headstart.chat.tenancy import IsolationPolicy
from headstart.errors import ConfigError, HeadstartError, Unavailable
from headstart.models.gauges import PoolMetrics
from headstart.models.naming import ModelNames, NamedModel, claimed
from headstart.models.pool import ModelPool
from headstart.models.state import Phase


class ModelsFront(RecordsCalls):
    """What a server of several models serves.

    Args:
        seconds: how long the processes may take to end, if no signal has stopped the server.
        serves_pulled: whether models that callers fetch are served.
        close: called when all processes have ended.

    Attributes:
        models: for lists of models.
        created: when it was made, in seconds since 1970.
        keep_alive: most seconds of silence on a stream.
    """

    failure: HeadstartError | None = None
    loading = False
    saves = True

    def __init__(
        self,
        pool: ModelPool,
        policy: IsolationPolicy,
        *,
        seconds: float = 10.0,
        keep_alive: float = 5.0,
        serves_pulled: bool = False,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.keep_alive = keep_alive
        self.drain = Drain()
        self.metrics = PoolMetrics(pool)
        self.models: ServedModels = PoolModels(pool, serves_pulled)
        self.created = int(time.time())
        self._seconds = seconds
        self._close = close
        self._closing: asyncio.Future[None] | None = None

    @property
    def names(self) -> ModelNames:
        return self.pool.names

    def open(self) -> None:
        """Called when the event loop runs. A stopping server then ends the processes while it ends its own calls."""
        self.drain.calls.add(_EndOfModels(self))

    def stop(self) -> None:
        """Begins to end all processes: running requests go on there for a while. Idempotent."""
        if self._closing is None:
            left = self.drain.left
            self._closing = asyncio.ensure_future(self.pool.close(self._seconds if left is None else left))

    async def close(self) -> None:
        """Returns when all processes have ended."""
        self.stop()
        assert self._closing is not None
        await self._closing
        if self._close is not None:
            await self._close()

    def ready(self) -> None:
        """Raises Unavailable if the server is stopping."""
        self.drain.check()

    async def body(self, request: Request, most: int = MAX_BODY) -> bytes:
        """The whole body, of at most so many bytes. Raises TooLarge, and Unavailable when the server stops."""
        async with self.drain.body():
            return await whole_body(request, most)

    def new_id(self, prefix: str) -> str:
        return prefix + uuid.uuid4().hex

    def keep(self) -> None:
        """Each request brings the expiry of its key to the process of its model."""

    @property
    def counts(self) -> CallCounts:
        return self.metrics


STATES: dict[Phase, ModelState] = {
    Phase.ABSENT: "unloaded",
    Phase.LOADING: "loading",
    Phase.READY: "loaded",
    Phase.DRAINING: "loaded",
    Phase.UNLOADING: "unloaded",
    Phase.FAILED: "unloaded",
}
"""The states of models as lists show them."""


class PoolModels:
    """`ServedModels` of a pool. Of a model that was never loaded only its name and its file are known."""

    def __init__(self, pool: ModelPool, serves_pulled: bool) -> None:
        self._pool = pool
        self._serves_pulled = serves_pulled
        self._begun = time.time()

    def all(self) -> Sequence[ServedModel]:
        names = self._pool.names
        return self._served(names.default), *(self._served(model) for model in names.models if model is not names.default)

    def named(self, name: str) -> ServedModel | None:
        found = self._pool.names.named(name)
        return None if found is None or self._pool.is_removed(found) else self._served(found)

    def find(self, name: str | None) -> ServedModel:
        return self._served(self._pool.names.find(name))

    def fetched(self, names: Sequence[str], file: str, size: int) -> str:
        if any(model.file == file for model in self._pool.names.models):  # its file was removed, and is here again
            return ""
        if not self._serves_pulled:
            return SERVES_GIVEN
        name, *aliases = dict.fromkeys(names)
        try:
            self._pool.add(claimed(NamedModel(name, file, size, tuple(aliases))))
        except ConfigError:  # or has had it since
            return f"another model of this server has the name '{name}'"
        return ""

    def _served(self, model: NamedModel) -> ServedModel:
        pooled = self._pool.of(model)
        aliases = tuple(name for name in model.aliases if name != model.file)
        known = pooled.served or ServedModel(model.name, "unloaded", modified=self._begun, size=model.size)
        return replace(known, state=STATES[pooled.state.phase], aliases=aliases, expires=self._pool.expires(model))


class _EndOfModels:
    """A `drain.Ending` that is no call: it ends when the server begins to stop."""

    running = False

    def __init__(self, front: ModelsFront) -> None:
        self._front = front

    def end(self, error: Unavailable) -> None:
        self._front.stop()
