"""App: all routes over one runtime, which may still be loading."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from headstart.api import docs, models
from headstart.api.anthropic import routes as anthropic
from headstart.api.auth import Keys
from headstart.api.browsers import BrowserGuard
from headstart.api.cache import routes as cache
from headstart.api.errors import on_error
from headstart.api.events import routes as events
from headstart.api.explain import routes as explain
from headstart.api.incoming import MAX_BODY
from headstart.api.llama_server import extras
from headstart.api.llama_server import routes as llama
from headstart.api.middleware import HeadAsGet, RequestMiddleware
from headstart.api.ollama import routes as ollama
from headstart.api.openai_chat import routes as openai
from headstart.api.openai_responses import routes as responses
from headstart.api.openapi import describe
from headstart.api.pulls import Pullers, Pulls
from headstart.api.served import Served
from headstart.api.service import NOWHERE, Elsewhere, Service
from headstart.api.stats import routes as stats
from headstart.chat.tenancy import policy_of
from headstart.errors import ConfigError, HeadstartError, for_log
from headstart.serving.runtime import Runtime
from headstart.version import __version__
from headstart.web import routes as web

log = structlog.get_logger("headstart.api")

ROUTERS: tuple[APIRouter, ...] = tuple(
    module.router
    for module in (openai, responses, anthropic, ollama, llama, models, extras, explain, cache, events, stats, docs)
)
"""All routes of a server of one model, but for the page."""

_UNKNOWN = "The model could not be loaded ({}); the log says where."
_TAG = re.compile(r"([0-9a-f]{8})?")


def create_app(
    load: Runtime | Callable[[], Runtime],
    *,
    api_keys: Keys | Sequence[str] = (),
    isolate: str | None = None,
    keep_noise: Sequence[str] = (),
    model_id: str | None = None,
    aliases: Sequence[str] = (),
    hosts: Sequence[str] = (),
    cors: Sequence[str] = (),
    keep_alive: float = 5.0,
    max_body: int = MAX_BODY,
    page: bool = True,
    pullers: Pullers = "local",
    replica_tag: str = "",
    elsewhere: Elsewhere = NOWHERE,
    settle_at_end: bool = False,
    on_ready: Callable[[], None] = lambda: None,
    on_failure: Callable[[HeadstartError], None] | None = None,
    before_close: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The HTTP server as an ASGI app.

    Args:
        load: a runtime, which the caller closes; or a function that makes one. The function runs in a thread, and all routes
            answer 503 until it returns. The app closes its runtime at shutdown.
        api_keys: requests need one of them, except for `/health`; without any the server is open.
        isolate: name of a policy in `tenancy.POLICIES`; None to choose by the number of keys.
        keep_noise: names of rules in `normalize.RULES` to leave out.
        model_id: name of the model in the API; None for the engine's name.
        aliases: other names that requests may use. Names ignore case.
        hosts: names of the server beside its addresses and `localhost`: see `BrowserGuard`.
        cors: origins of web pages that may send requests, like `http://localhost:3000`; `*` for all.
        keep_alive: most seconds of silence on a stream.
        max_body: most bytes of a body.
        page: whether there is a page for people at `/`.
        pullers: who may fetch models.
        replica_tag: 8 hexadecimal digits that name a replica of a fleet in the ids of its responses and requests; "" for none.
        elsewhere: the other servers of a fleet, for `/headstart/explain` and `/headstart/cache/…`.
        settle_at_end: whether the app settles finished turns before it closes its runtime (`Runtime.close`).
        on_ready: called on the event loop when requests are served, if `load` is a function.
        on_failure: called on the event loop if `load` raises.
        before_close: called in a thread before the app closes its runtime.

    Raises:
        ConfigError: no such policy or rule, or an entry of `hosts` or `cors` or `replica_tag` has another form.
    """
    if not _TAG.fullmatch(replica_tag):
        raise ConfigError(f"A replica's tag has 8 hexadecimal digits; {replica_tag!r:.100} has not.")
    guard = BrowserGuard(hosts, cors)
    keys = api_keys if isinstance(api_keys, Keys) else Keys(api_keys)
    policy = policy_of(isolate, several=keys.several)
    service = Service(
        *(model_id, aliases),
        keep_alive=keep_alive,
        max_body=max_body,
        keep_noise=keep_noise,
        policy=policy,
        keys=keys,
        replica_tag=replica_tag,
        elsewhere=elsewhere,
    )

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        if isinstance(load, Runtime):
            try:
                yield
            finally:
                await asyncio.to_thread(service.close)
            return
        loading = asyncio.create_task(_load(service, load, on_ready, on_failure))
        try:
            yield
        finally:
            # Loading a model cannot be interrupted: wait for it, then free it.
            await loading
            if service.runtime is not None:
                await asyncio.to_thread(before_close)
                runtime, service.runtime = service.runtime, None
                await asyncio.to_thread(service.close)
                try:
                    await asyncio.to_thread(runtime.close, service.drain.left, settle=settle_at_end)
                except Exception as error:  # Starlette would print it with its message
                    log.error("the model could not be closed", exc_info=error)

    app = assemble(service, ROUTERS, life, keys=keys, guard=guard, cors=cors, page=page, pullers=pullers)
    if isinstance(load, Runtime):
        service.open(load)
    return app


def assemble(
    service: Served,
    routers: Sequence[APIRouter],
    life: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    *,
    keys: Keys,
    guard: BrowserGuard,
    cors: Sequence[str],
    page: bool,
    pullers: Pullers,
    inside: Sequence[Middleware] = (),
) -> FastAPI:
    """An app with its outer layers: who may ask, request ids, errors, the page and the description of all routes.

    Args:
        service: what is served. It becomes `app.state.service`.
        routers: the routes. Of two with one path and method the first one answers.
        life: opens and closes what is served.
        keys, guard, cors, page, pullers: as in `create_app`.
        inside: layers between the routes and the check of who asks, from the inside.
    """
    app = FastAPI(
        title="headstart",
        version=__version__,
        description="A chat server for local LLMs that never computes the same prompt twice.",
        lifespan=life,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load their scripts from another host
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    app.state.pulls = Pulls(keys, pullers)
    for kind in (HeadstartError, HTTPException, RequestValidationError, ClientDisconnect):
        app.add_exception_handler(kind, on_error)
    routes = [route for router in routers for route in router.routes if isinstance(route, Route)]
    app.user_middleware[:0] = reversed(inside)
    app.add_middleware(HeadAsGet, own=frozenset(route.path for route in routes if "HEAD" in (route.methods or ())))
    app.add_middleware(RequestMiddleware, service=service, keys=keys, guard=guard)
    if cors:  # outside: a browser's preflight request has no key, and pages may read why a request was refused
        app.add_middleware(
            CORSMiddleware, allow_origins=[*cors], allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    if page:
        app.router.routes.extend(web.ROUTES)
    for router in routers:
        app.include_router(router)
    app.state.paths = tuple(route.path for route in routes)
    app.openapi = lambda: describe(app, keys=keys.closed)  # type: ignore[method-assign]
    return app


async def _load(
    service: Service,
    load: Callable[[], Runtime],
    on_ready: Callable[[], None],
    on_failure: Callable[[HeadstartError], None] | None,
) -> None:
    try:
        service.open(await asyncio.to_thread(load))
        on_ready()
    except Exception as error:
        known = isinstance(error, HeadstartError)
        service.failure = error if isinstance(error, HeadstartError) else HeadstartError(_UNKNOWN.format(for_log(error)))
        if not known or on_failure is None:
            log.error("the model could not be loaded", error=for_log(error), exc_info=None if known else error)
        if on_failure is not None:
            on_failure(service.failure)
