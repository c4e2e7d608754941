"""Service: the state that all routes share. Each app has one, in `app.state.service`."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest

from headstart.api.auth import Keys
from headstart.api.cache.actions import ChainAnswer, ChainRequest
from headstart.api.drain import Drain
from headstart.api.ignored import IgnoredLog
from headstart.api.incoming import MAX_BODY, whole_body
from headstart.api.openai_responses.handover import Handover, pack, restore
from headstart.api.openai_responses.store import Responses
from headstart.api.served import CallCounts, RecordsCalls
from headstart.api.served_models import OneModel, ServedModel, ServedModels
from headstart.chat import tenancy
from headstart.chat.chat_model import ChatModel
from headstart.chat.reply_memory import Moment
from headstart.errors import HeadstartError, Unavailable
from headstart.events.hub import Hub
from headstart.events.source import RuntimeSource
from headstart.observe import logs
from headstart.observe.logs import Caller
from headstart.observe.metrics import Metrics
from headstart.observe.report import Summary
from headstart.observe.stats import Stats, TenantStats
from headstart.serving.expiry import Erasure
from headstart.serving.runtime import Runtime


class Elsewhere(Protocol):
    """The servers of a fleet, this one included."""

    async def explain(self, tenant: str, salt: str, request_id: str | None) -> Sequence[dict[str, Any] | None]:
        """What they say about a tenant, a salt and the id of a request: `explain.routes.account`."""

    async def chain(self, asked: ChainRequest) -> Sequence[ChainAnswer]:
        """What they did with a chain: `cache.actions.answer`. One more answer stands for those that did not answer."""


class Nowhere:
    """`Elsewhere` of a server that is alone."""

    async def explain(self, tenant: str, salt: str, request_id: str | None) -> Sequence[None]:
        return ()

    async def chain(self, asked: ChainRequest) -> Sequence[ChainAnswer]:
        return ()


NOWHERE = Nowhere()


class Service(RecordsCalls):
    """A model that is loading, served or closed.

    Args:
        model_id: name of the model in the API; None for the engine's name.
        aliases: other names that callers may use.
        keep_alive: most seconds of silence on a stream.
        max_body: most bytes of a request's body.
        keep_noise: rules of `normalize` to leave out.
        policy: how requests are isolated from each other.
        keys: have the expiry of each tenant's data.
        replica_tag: the digits with which ids of stored things begin.
        elsewhere: the other servers of a fleet.
    """

    def __init__(
        self,
        model_id: str | None = None,
        aliases: Sequence[str] = (),
        *,
        keep_alive: float = 5.0,
        max_body: int = MAX_BODY,
        keep_noise: Sequence[str] = (),
        policy: tenancy.IsolationPolicy = tenancy.POLICIES["none"],
        keys: Keys | None = None,
        replica_tag: str = "",
        elsewhere: Elsewhere = NOWHERE,
    ) -> None:
        self.runtime: Runtime | None = None
        self.failure: HeadstartError | None = None
        self.models: ServedModels = OneModel(model_id, aliases, lambda: self.runtime)
        self.keep_alive = keep_alive
        self.max_body = max_body
        self._keep_noise = frozenset(keep_noise)
        self._chat: ChatModel | None = None
        self._hub: Hub | None = None
        self.policy = policy
        self._keys = Keys() if keys is None else keys
        self._replica_tag = replica_tag
        self.elsewhere = elsewhere
        self.responses = Responses()
        self.noted = IgnoredLog()
        self.drain = Drain()
        self.created = int(time.time())
        self._model_id = model_id
        self.metrics = Metrics(model_id or "", self.snapshot)
        self.stats = Stats()
        self.tenant_stats = TenantStats()

    def open(self, runtime: Runtime) -> None:
        """The model is ready."""
        if self._model_id is None:
            self._model_id = runtime.engine.facts.name
            self.metrics = Metrics(self._model_id, self.snapshot)
        self._chat = ChatModel(runtime, self._keep_noise)
        self._hub = Hub(RuntimeSource(runtime))
        runtime.on_erase(self._erase)
        self.runtime = runtime
        self.keep()

    @property
    def hub(self) -> Hub:
        """The events of the runtime. Raises Unavailable as `ready` does."""
        self.ready()
        assert self._hub is not None
        return self._hub

    def idle(self) -> bool:
        """Whether the runtime has no request and no turn to settle. May be called on any thread."""
        runtime = self.runtime
        return runtime is None or runtime.scheduler.idle

    def close(self) -> None:
        """Ends what listens to the runtime. Waits for the engine's current step."""
        if self._hub is not None:
            self._hub.close()

    def keep(self) -> None:
        """Applies the expiry of all keys."""
        if self.runtime is not None:
            for key in self._keys.all():
                self._keep(tenancy.salt(self.policy, key.tenant, None, None), key.expire)

    def _keep(self, salt: str, seconds: float | None) -> None:
        if self.runtime is not None and self.policy.isolates:
            self.runtime.keep(salt, seconds)
        elif self.runtime is not None and seconds is not None:  # without isolation data has no owner
            self.runtime.keep_all(seconds)

    def _erase(self, erasure: Erasure) -> None:
        stay = erasure.stay
        self.responses.forget(
            lambda salt, id, written: erasure.due(salt, written) or (stay is not None and (salt, id) not in stay),
            hints=erasure.hints,
        )

    def take_over(self, handed: Handover) -> int:
        """Takes the responses of an earlier process of this model. Returns how many. Waits for the engine's current step."""
        runtime = self.ready()
        return runtime.with_deletions(lambda deletions: restore(self.responses, handed, deletions, runtime.due))

    def hand_over(self) -> Handover:
        """The responses for a later process of this model. Waits for the engine's current step."""
        runtime = self.runtime
        if runtime is None:
            return Handover()
        return runtime.with_deletions(lambda deletions: pack(self.responses, deletions, runtime.ends))

    @property
    def chat(self) -> ChatModel:
        """The chat model. It is there while the server stops, because replies continue. Raises Unavailable while loading."""
        if self._chat is None:
            raise Unavailable("Loading model")
        return self._chat

    def must_forget(self, salt: str, since: Moment) -> bool:
        """Whether data that arrived at a moment must not be kept any more."""
        return self.runtime is None or self.chat.must_forget(salt, since)

    @property
    def loading(self) -> bool:
        """Whether there is no model yet, and may be one later."""
        return self.runtime is None and self.failure is None

    @property
    def saves(self) -> bool:
        """Whether the model's KV goes to a lower tier when the server stops."""
        return self.runtime is not None and (self.runtime.cache.disk.on or bool(self.runtime.cache.shared.saves))

    @property
    def model_id(self) -> str:
        return self._model_id or ""

    def ready(self) -> Runtime:
        """The runtime. Raises Unavailable while there is no model to serve, and when the server stops."""
        self.drain.check()
        if self.runtime is None:
            # The cause may contain paths of files, which only the operator may see.
            raise Unavailable("The model could not be loaded; the server's log says why." if self.failure else "Loading model")
        return self.runtime

    def new_id(self, prefix: str) -> str:
        """An id for something that this server keeps. In a fleet it names the replica. It always has the same length."""
        return prefix + self._replica_tag + uuid.uuid4().hex[len(self._replica_tag) :]

    def check_model(self, name: str | None) -> ServedModel:
        """The model that a request means by a name. Raises NotFound, as `ServedModels.find` does."""
        return self.models.find(name)

    def snapshot(self) -> dict[str, Any] | None:
        return self.runtime.snapshot() if self.runtime is not None else None

    def salt(self, request: HttpRequest, user: str | None = None, cache_salt: str | None = None) -> str:
        """The salt of a request, for all that is tokenised or computed for it. Thread-safe.

        Args:
            user: the user that the body names.
            cache_salt: from the body.
        """
        salt = tenancy.salt(self.policy, request.scope.get("tenant", tenancy.OPEN), user, cache_salt)
        self._keep(salt, request.scope.get("expire"))
        return salt

    def owner(self, request: HttpRequest, user: str = "", cache_salt: str = "") -> bytes:
        """The owner of what is stored for such a request."""
        return self.ready().owner(self.salt(request, user or None, cache_salt or None))

    def salting(self, request: HttpRequest) -> tenancy.Salting:
        """`salt` of one request."""
        return lambda user, cache_salt: self.salt(request, user, cache_salt)

    async def body(self, request: HttpRequest, most: int = sys.maxsize) -> bytes:
        """The whole body, of at most so many bytes. Raises TooLarge, and Unavailable when the server stops."""
        async with self.drain.body():
            return await whole_body(request, min(most, self.max_body))

    def finished(self, caller: Caller, summary: Summary, reasons: Sequence[str], seconds: float) -> None:
        """Records a finished call in metrics, stats and log."""
        self.metrics.record(summary, reasons, seconds)
        if self.runtime is not None:
            known = self.runtime.scheduler.pace is not None
            saved = self.runtime.scheduler.saved(summary.live, summary.restored) if known else None
            self.stats.record(summary, saved)
            if caller.tenant:
                self.tenant_stats.record(caller.tenant, summary, saved)
        logs.finished(caller, summary, reasons, seconds)
        self.drain.finished += self.drain.begun

    @property
    def counts(self) -> CallCounts:
        return self.metrics


def service_of(request: HttpRequest) -> Service:
    service: Service = request.app.state.service
    return service
