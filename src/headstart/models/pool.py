"""Pool: the models of a server, which of them are loaded, and the requests that wait for them.

A request takes a lease of its model. If the model is not loaded it waits, while others give way (`plan`), are drained and
unloaded, and the model is loaded. Requests for other models go on. All methods are called on the event loop.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog

from headstart.api.openai_responses.handover import Handover
from headstart.api.served_models import ServedModel
from headstart.errors import ConfigError, HeadstartError, Overloaded, RequestError, Unavailable
from headstart.interfaces.traits import EngineProof
from headstart.models.channel import ProcessSetup, ReadyReport
from headstart.models.naming import ModelNames, NamedModel
from headstart.models.plan import Holder, MemoryShares, ModelUse, place, value_of
from headstart.models.process import LoadFailed
from headstart.models.state import Lifecycle, Phase
from headstart.models.upstream import UpstreamConnection
from headstart.names import option
from headstart.units import show_size

PATIENCE = 2.0
"""Seconds that a request waits for an idle model to give way. Then a busy one must take no more requests."""
LONGEST = 86_400.0
"""Most seconds until the next look at what is due."""
UNLOAD = 30.0
"""Most seconds in which a model is settled, saved and freed, so that another one can be loaded."""

log = structlog.get_logger("headstart.models")


class ModelGone(RequestError):
    """The process of a model has ended while it answered."""

    quotes = False
    status = 502
    type = "server_error"
    code = "model_process_ended"


class Backend(Protocol):
    """The process of a model: see `process.ModelProcess`."""

    progress: float
    cause: str

    @property
    def pid(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    def when_ended(self, call: Callable[[], None]) -> None: ...

    async def load(self, setup: ProcessSetup) -> ReadyReport: ...

    async def connection(self) -> UpstreamConnection: ...

    def put_back(self, connection: UpstreamConnection) -> None: ...

    @property
    def handed(self) -> Handover: ...

    async def stop(self, seconds: float, *, hand_over: bool = False) -> None: ...

    def kill(self) -> None: ...


@dataclass(eq=False, slots=True)
class PooledModel:
    """A model of the pool.

    Attributes:
        need: bytes that it takes: measured when it was loaded last, before that its share.
        load_seconds: of the last load; 1 before.
        since: when its last request ended, or it was loaded.
        loaded_at: when it was loaded last, in seconds since 1970.
        served: what its last process said of it; None before.
        dismissed: whether it is drained because the operator wants it unloaded.
        handed: what its last process has handed over, until the next one has it.
        proofs: of the engine of its last process.
        keep: seconds without a request after which it is unloaded, by the latest request that said so; None for the pool's.
        alone: whether it was loaded for other shares of a GPU than those of now, so that nothing may be loaded beside it.
    """

    model: NamedModel
    need: int
    state: Lifecycle = field(default_factory=Lifecycle)
    process: Backend | None = None
    waiting: deque[Lease] = field(default_factory=deque)
    use: ModelUse = field(default_factory=ModelUse)
    load_seconds: float = 1.0
    since: float = 0.0
    loaded_at: float = 0.0
    served: ServedModel | None = None
    dismissed: bool = False
    handed: Handover = field(default_factory=Handover)
    proofs: tuple[EngineProof, ...] = ()
    keep: float | None = None
    alone: bool = False


class Lease:
    """A request's claim on a model, from its arrival to the end of its answer. `release` must be called.

    Attributes:
        granted: done when the model is ready, or with the error that ends the request.
        keep: seconds without a request after which the model is unloaded then, at most the pool's; None to leave that.
    """

    def __init__(self, pool: ModelPool, pooled: PooledModel, now: float, keep: float | None = None) -> None:
        self.pooled = pooled
        self.arrived = now
        self.granted: asyncio.Future[Backend] = asyncio.get_running_loop().create_future()
        self.run = 0
        self.keep = keep
        self._pool = pool
        self._released = False

    @property
    def running(self) -> bool:
        """Whether the model has been ready for it."""
        return self.run > 0

    @property
    def progress(self) -> str:
        """What the request waits for, in a few words."""
        return self._pool.progress(self.pooled)

    def fail(self, error: HeadstartError) -> None:
        """Ends the wait. Without effect if the model was ready, or the wait has ended."""
        if not self.granted.done():
            self.granted.set_exception(error)
            self.granted.exception()  # so that asyncio does not report it if nobody waits

    def release(self) -> None:
        """The request is over. Idempotent."""
        if not self._released:
            self._released = True
            self._pool.release(self)


class ModelPool:
    """The models of a server.

    Args:
        names: the models.
        shares: of the memory.
        start: starts a process.
        setup: the set-up of a model, for so many bytes of memory. The pool adds what its last process has handed over.
        queue: requests that may wait for one model.
        idle_unload: seconds without a request after which a model is unloaded; None to keep it.
        clock: a monotonic clock, in seconds.
        exists: whether a path is there.
    """

    def __init__(
        self,
        names: ModelNames,
        shares: MemoryShares,
        *,
        start: Callable[[], Coroutine[Any, Any, Backend]],
        setup: Callable[[NamedModel, int], ProcessSetup],
        queue: int,
        idle_unload: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        exists: Callable[[str], bool] = os.path.exists,
    ) -> None:
        self._names = names
        self.shares = shares
        self.loads = self.failures = self.deaths = 0
        self._start = start
        self._setup = setup
        self._queue = queue
        self._idle_unload = math.inf if idle_unload is None else idle_unload
        self._clock = clock
        self._exists = exists
        self._models = {model.name: PooledModel(model, shares.of_model(model.size)) for model in names.models}
        self._spare: asyncio.Task[Backend] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def of(self, model: NamedModel) -> PooledModel:
        return self._models[model.name]

    @property
    def models(self) -> Iterable[PooledModel]:
        return self._models.values()

    @property
    def names(self) -> ModelNames:
        """The models by name. A fetched one is forgotten when its file was removed, if it is not loaded."""
        gone = [one.model for one in self.models if one.model.fetched and not one.waiting and self.is_removed(one.model)]
        if gone and (left := self._names.without(gone)).models != self._names.models:
            self._serve(left)
        return self._names

    def is_removed(self, model: NamedModel) -> bool:
        """Whether the file of a model that is not loaded is not there any more."""
        return not self.of(model).state.holds and not self._exists(model.file)

    def add(self, model: NamedModel) -> None:
        """Serves one more model. Those that are loaded stay so; their part of the memory changes when they are loaded again.

        Raises:
            ConfigError: its name is taken.
        """
        self._serve(self.names.added(model))

    def _serve(self, names: ModelNames) -> None:
        self._names, before = names, self.shares
        with suppress(ConfigError):  # none of those that are left fits
            self.shares = before.shared_by([model.size for model in names.models])
        self._models = {
            model.name: self._models.get(model.name) or PooledModel(model, self.shares.of_model(model.size))
            for model in names.models
        }
        for pooled in self.models:
            pooled.alone = pooled.alone or (pooled.state.holds and self.shares.together != before.together)

    def lease(self, model: NamedModel, keep: float | None = None) -> Lease:
        """A lease of a model, which is loaded if it is not. `keep`: as in `Lease`.

        Raises:
            Overloaded: too many requests wait for it.
            Unavailable: its last load failed a moment ago, it can never be loaded, or the server stops.
        """
        pooled, now = self.of(model), self._clock()
        if self._closed:
            raise Unavailable("The server is stopping.")
        if not self.shares.holds(model.size):
            raise Unavailable(
                f"The model '{model.name}' has {show_size(model.size)} of weights, more than the "
                f"{show_size(self.shares.total)} for all models: give more {option('memory')}."
            )
        if pooled.state.phase is Phase.FAILED and now < pooled.state.due:
            raise _not_loaded(pooled, pooled.state.due - now)
        if len(pooled.waiting) >= self._queue:
            wait = max(1.0, pooled.load_seconds)
            raise Overloaded(
                f"{len(pooled.waiting)} requests wait for the model '{model.name}' already; try again in {wait:.0f} s.",
                retry_after=wait,
            )
        pooled.use = pooled.use.used(now)
        lease = Lease(self, pooled, now, keep)
        pooled.waiting.append(lease)
        self._step()
        return lease

    def peek(self, model: NamedModel) -> Lease:
        """A lease of a model for a request that only looks at it. It neither loads the model nor counts as use.

        Raises:
            Unavailable: the model is not loaded.
        """
        pooled = self.of(model)
        if pooled.state.phase not in (Phase.READY, Phase.DRAINING) or pooled.process is None:
            raise Unavailable(f"The model '{model.name}' is not loaded; a request to it loads it.")
        lease = Lease(self, pooled, self._clock())
        lease.granted.set_result(pooled.process)
        return lease

    def release(self, lease: Lease) -> None:
        """Called by the lease."""
        pooled = lease.pooled
        if lease in pooled.waiting:
            pooled.waiting.remove(lease)
        if lease.run:
            pooled.state = pooled.state.finish(lease.run)
            pooled.since = self._clock()
        self._step()

    def progress(self, pooled: PooledModel) -> str:
        name, process = pooled.model.name, pooled.process
        if pooled.state.phase is Phase.LOADING and process is not None:
            return f"loading {name} {100 * process.progress:.0f} %"
        if pooled.state.phase in (Phase.DRAINING, Phase.UNLOADING):
            return f"unloading {name}, then loading it again"
        leaving = [other.model.name for other in self.models if other.state.phase in (Phase.DRAINING, Phase.UNLOADING)]
        return f"unloading {', '.join(leaving)}, then loading {name}" if leaving else f"waiting to load {name}"

    def _kept_for(self, pooled: PooledModel) -> float:
        """Seconds without a request after which a model is unloaded: what a request asked for, within the operator's limit."""
        return min(self._idle_unload, math.inf if pooled.keep is None else pooled.keep)

    def expires(self, model: NamedModel) -> float | None:
        """When a loaded model is unloaded if nobody uses it, in seconds since 1970; None for never."""
        pooled = self.of(model)
        if pooled.state.phase is not Phase.READY or (kept := self._kept_for(pooled)) == math.inf:
            return None
        return time.time() + kept - (self._clock() - pooled.since if pooled.state.idle else 0.0)

    def unload(self, model: NamedModel) -> bool:
        """Unloads a model when its running requests are over. Returns at once; false if it is not loaded."""
        pooled = self.of(model)
        if pooled.state.phase is not Phase.READY:
            return False
        if pooled.state.idle:
            self._unload(pooled)
        else:
            pooled.state, pooled.dismissed = pooled.state.drain(), True
        return True

    async def close(self, seconds: float) -> None:
        """Ends all processes, each as `Backend.stop` does."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for pooled in self.models:
            for lease in pooled.waiting:
                lease.fail(Unavailable("The server is stopping."))
        spare = await self._take_spare() if self._spare is not None else None
        if spare is not None:
            spare.kill()
        held = [pooled.process for pooled in self.models if pooled.process is not None]
        await asyncio.gather(*(process.stop(seconds) for process in held))
        for task in list(self._tasks):
            await task

    # ── what happens next ────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        """Grants, unloads and loads what can be. Called after each change."""
        if self._closed:
            return
        now = self._clock()
        for pooled in self.models:
            self._grant(pooled)
            if pooled.state.phase is Phase.DRAINING and not pooled.state.running:
                self._unload(pooled)
        wanted = [pooled for pooled in self.models if pooled.waiting and not pooled.state.holds]
        wanted.sort(key=lambda pooled: pooled.waiting[0].arrived)
        wakes = math.inf
        for pooled in wanted:
            if not self._place(pooled, now):
                urgent = pooled.waiting[0].arrived + PATIENCE
                wakes = min(wakes, urgent) if now < urgent else wakes
                break  # a smaller model must not overtake it for ever
        if not wanted:
            for pooled in self.models:
                if pooled.state.phase is Phase.DRAINING and not pooled.dismissed:
                    pooled.state = pooled.state.resume()
                    self._grant(pooled)
        for pooled in self.models:
            if pooled.state.idle and (ends := pooled.since + self._kept_for(pooled)) < math.inf:
                if now >= ends:
                    log.info("unloading", model=pooled.model.name, idle_seconds=round(now - pooled.since))
                    self._unload(pooled)
                else:
                    wakes = min(wakes, ends)
        wall = time.time()
        for pooled in self.models:
            if pooled.handed.ends <= wall:  # what must be deleted by now
                pooled.handed = pooled.handed.without(wall)
            wakes = min(wakes, now + pooled.handed.ends - wall)
        self._wake_at(wakes, now)

    def _wake_at(self, when: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when != math.inf:
            self._timer = asyncio.get_running_loop().call_later(min(max(0.0, when - now), LONGEST) + 0.001, self._step)

    def _grant(self, pooled: PooledModel) -> None:
        """Lets the waiting requests of a ready model begin."""
        while pooled.waiting and pooled.state.phase is Phase.READY and pooled.process is not None:
            lease = pooled.waiting.popleft()
            if not lease.granted.done():
                pooled.state = pooled.state.begin()
                lease.run = pooled.state.run
                pooled.keep = pooled.keep if lease.keep is None else lease.keep
                lease.granted.set_result(pooled.process)

    def _place(self, pooled: PooledModel, now: float) -> bool:
        """Begins to load a model, or makes others give way. Whether the load has begun."""
        holders = [self._holder(other, now) for other in self.models if other.state.holds]
        urgent = now >= pooled.waiting[0].arrived + PATIENCE
        need = min(pooled.need, self.shares.of_model(pooled.model.size))
        chosen = place(need, holders, self.shares.total, self.shares.keep, urgent=urgent)
        if chosen.fits:
            self._load(pooled, now)
        for name in chosen.unload:
            self._unload(self._models[name])
        for name in chosen.drain:
            self._models[name].state = self._models[name].state.drain()
        return chosen.fits

    def _holder(self, pooled: PooledModel, now: float) -> Holder:
        state = pooled.state
        return Holder(
            pooled.model.name,
            self.shares.total if pooled.alone else pooled.need,
            value_of(pooled.use.rate(now), pooled.load_seconds, pooled.need),
            leaving=state.phase in (Phase.DRAINING, Phase.UNLOADING),
            idle=state.idle,
            ready=state.phase is Phase.READY,
        )

    def _load(self, pooled: PooledModel, now: float) -> None:
        pooled.state, pooled.dismissed, pooled.alone, pooled.keep = pooled.state.load(now), False, False, None
        pooled.need = self.shares.of_model(pooled.model.size)
        self._run(self._loading(pooled, pooled.state.run, now))

    async def _loading(self, pooled: PooledModel, run: int, begun: float) -> None:
        name = pooled.model.name
        try:
            process = pooled.process = await self._take_spare()
            if self._closed:
                process.kill()
            process.when_ended(lambda: self._ended(pooled, run))
            setup = self._setup(pooled.model, pooled.need)
            card = await process.load(replace(setup, proofs=pooled.proofs, handed=pooled.handed))
        except (LoadFailed, OSError) as error:
            cause = error.with_flags if isinstance(error, HeadstartError) else f"no process could be started: {error.strerror}"
            if pooled.process is not None:
                pooled.process.cause = pooled.process.cause or cause
                pooled.process.kill()  # `_ended` follows
            else:
                self._failed(pooled, cause)
            return
        if pooled.state.phase is not Phase.LOADING or pooled.state.run != run:  # it has ended since
            return
        now = self._clock()
        self.loads += 1
        pooled.load_seconds, pooled.since, pooled.loaded_at = now - begun, now, time.time()
        pooled.need, pooled.served, pooled.proofs = min(card.need, pooled.need), card.served, card.proofs
        pooled.handed = Handover()
        pooled.state = pooled.state.loaded()
        log.info("loaded", model=name, seconds=round(pooled.load_seconds, 3), memory=show_size(pooled.need))
        self._begin_spare()
        self._step()

    def _unload(self, pooled: PooledModel) -> None:
        pooled.state = pooled.state.unload()
        assert pooled.process is not None
        self._run(self._unloading(pooled, pooled.process))

    async def _unloading(self, pooled: PooledModel, process: Backend) -> None:
        begun = self._clock()
        await process.stop(UNLOAD, hand_over=True)
        log.info("unloaded", model=pooled.model.name, seconds=round(self._clock() - begun, 3))

    def _ended(self, pooled: PooledModel, run: int) -> None:
        """The process of a run has ended."""
        if pooled.state.run != run or not pooled.state.holds:
            return
        cause = ""
        if pooled.process is not None:
            cause = pooled.process.cause
            if pooled.state.phase is Phase.UNLOADING:
                pooled.handed = pooled.process.handed
        pooled.process = None
        if pooled.state.phase is Phase.LOADING:
            self._failed(pooled, cause)
            return
        if pooled.state.phase is not Phase.UNLOADING and not self._closed:
            self.deaths += 1
            log.error("the process of a model has ended", model=pooled.model.name, cause=cause)
        pooled.state = pooled.state.ended(cause, self._clock())
        self._step()

    def _failed(self, pooled: PooledModel, cause: str) -> None:
        now = self._clock()
        pooled.state = pooled.state.ended(cause, now)
        if self._closed:
            return
        self.failures += 1
        again = round(pooled.state.due - now, 1)
        log.error("a model could not be loaded", model=pooled.model.name, cause=pooled.state.cause, again_in_seconds=again)
        for lease in pooled.waiting:
            lease.fail(_not_loaded(pooled, pooled.state.due - now))
        pooled.waiting.clear()
        self._step()

    # ── a spare process ──────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_spare(self) -> None:
        """Starts the process of the next load ahead of it: its imports take longer than loading a model from memory."""
        if self._spare is None and not self._closed and len(self._models) > 1:
            self._spare = asyncio.create_task(self._start())

    async def _take_spare(self) -> Backend:
        task, self._spare = self._spare, None
        if task is not None:
            try:
                process = await task
            except OSError:
                process = None
            if process is not None and not process.ended:
                return process
        return await self._start()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _not_loaded(pooled: PooledModel, seconds: float) -> LoadRefused:
    return LoadRefused(pooled.model.name, pooled.state.cause, max(1.0, seconds))


class LoadRefused(Unavailable):
    """A model could not be loaded a moment ago.

    Attributes:
        reason: the cause. It may contain paths of files, which only the operator may see.
    """

    code = "model_not_loaded"

    def __init__(self, name: str, reason: str, retry_after: float, *, shown: bool = False) -> None:
        why = f": {reason}" if shown else "; the server's log says why."
        super().__init__(f"The model '{name}' could not be loaded{why}", retry_after=retry_after)
        self.name, self.reason = name, reason

    @property
    def for_operator(self) -> LoadRefused:
        return LoadRefused(self.name, self.reason, self.retry_after, shown=True)
