"""Member: one server of a fleet: the app, its runtime, and the reports on both. It knows no cluster library.

start ──▶ load the model ──▶ measure its speed ──▶ fetch the hot list ──▶ ready ──▶ report, again and again ──▶ close
"""

from __future__ import annotations

import asyncio
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.app import create_app
from headstart.api.auth import OPERATOR
from headstart.api.cache.actions import ChainAnswer, ChainRequest, answer
from headstart.api.drain import Drain
from headstart.api.errors import Forbidden
from headstart.api.explain.routes import account
from headstart.api.service import Elsewhere
from headstart.engines import registry
from headstart.errors import EngineError
from headstart.fleet.cluster.booked import TakesBookings
from headstart.fleet.cluster.metrics import merged
from headstart.fleet.cluster.request_id import WithoutRequestId
from headstart.fleet.cluster.setup import FleetSetup
from headstart.fleet.front.affinity import replica_tag
from headstart.fleet.front.hot import TOKENS, HotStretch, hot_prefixes
from headstart.fleet.model_card import ModelCard
from headstart.fleet.replica.journal import Journal
from headstart.fleet.replica.reporter import Reporter
from headstart.fleet.replica.wire import encode
from headstart.fleet.router.reports import Speed
from headstart.interfaces.generation import GenerationParams
from headstart.model_names import model_names
from headstart.observe import logs, redaction
from headstart.observe.metrics import CONTENT_TYPE
from headstart.serving.request import Event, Failed, Finished, Request
from headstart.serving.running_jobs import Outcome
from headstart.serving.runtime import Runtime
from headstart.tiers.shared.address import secrets

STATUS, METRICS = "/headstart/fleet", "/headstart/fleet/metrics"
"""Routes that show what all replicas do."""
MEASURED = 128
"""Tokens that are computed to measure the speed of a new replica."""
MEASURER = "headstart.measure"
"""Salt and tenant of these tokens: no caller shares their KV, or can ask for an explanation of them."""
HOT_SECONDS = 10.0
"""Most seconds in which a new replica asks for the hot list and fetches it."""
HOT_SHARE = 0.5
"""Share of the memory tier that the hot list may fill."""
PERIOD = 0.1
"""Seconds between two reports."""
LATE = 1.0
"""Seconds that a front has to take a report, and pause after none has taken one."""


class Fleet(Elsewhere, Protocol):
    """The other processes of the fleet."""

    async def send(self, report: bytes, card: ModelCard) -> Sequence[bool]:
        """Sends a report to all fronts. The results say whether a front needs a dump. Raises TimeoutError if none takes it."""

    async def hottest(self, fingerprint: bytes, tokens: int) -> Sequence[HotStretch]:
        """The hot list of a front for a model: at most so many tokens."""

    async def status(self) -> dict[str, Any]:
        """What the fronts and the replicas know, and which of them do not answer, for JSON."""

    async def metrics(self) -> dict[str, bytes]:
        """The metrics of all replicas, by their tags; empty for one that does not answer."""


log = structlog.get_logger("headstart.fleet")


@dataclass(frozen=True, slots=True)
class Held:
    """What a tier of a replica holds: entries and bytes."""

    entries: int
    used: int
    budget: int


@dataclass(frozen=True, slots=True)
class MemberFigures:
    """What a replica does now, and did since it started.

    Attributes:
        replica: its name in reports.
        tag: the short form of it in the ids of its answers.
        host, pid: its machine and process.
        running, waiting: choices with and without a slot.
        queue: seconds of prefill in its queue.
        speed: as it measured itself.
        held: by tier.
        computed: prompt tokens that it computed.
        cached: prompt tokens that it did not compute, by the tier that had them.
        preloaded: tokens of the hot list that it fetched before it was ready.
    """

    replica: str
    tag: str
    host: str
    pid: int
    running: int
    waiting: int
    queue: float
    speed: Speed
    held: dict[str, Held]
    computed: int
    cached: dict[str, int]
    preloaded: int


class Member:
    """A server of a fleet. Use it on one event loop.

    Args:
        name: by which the fronts know it.

    Attributes:
        app: the HTTP app, once it is started.
    """

    app: Starlette

    def __init__(self, setup: FleetSetup, name: str) -> None:
        self._setup = setup
        self._name = name
        self._reporting: asyncio.Task[None] | None = None
        self._computed = 0
        self._cached: Counter[str] = Counter()
        self._preloaded = 0

    async def start(self, fleet: Fleet) -> None:
        """Loads the model and begins to report to `fleet`. Raises what loading raises."""
        setup = self._setup
        logs.configure(setup.log_format)
        redaction.hide(secrets())
        journal = Journal()
        self._runtime = await asyncio.to_thread(self._load, journal)
        self._runtime.observe(self._count)
        self._card = ModelCard.of(self._runtime.engine)
        self._reporter = Reporter(self._runtime, journal, self._name, epoch=time.time_ns())
        names = tuple(dict.fromkeys((*setup.alias, *model_names(setup.settings.model))))
        self.app = create_app(
            self._runtime,
            api_keys=setup.keys(),
            isolate=setup.isolate,
            keep_noise=setup.keep_noise,
            model_id=names[0],
            aliases=names,
            hosts=setup.allow_host,
            cors=setup.cors,
            page=not setup.settings.no_web,
            pullers="operator",  # a proxy of the fleet hides where callers are
            replica_tag=replica_tag(self._name),
            elsewhere=fleet,
        )
        self.app.add_middleware(WithoutRequestId)
        self.app.add_middleware(TakesBookings, journal.bookings)
        self.app.add_route(STATUS, self._show_status, methods=["GET"])
        self.app.add_route(METRICS, self._show_metrics, methods=["GET"])
        self._fleet = fleet
        await self._preload()  # after the app, which knows how long data may be kept
        self._reporting = asyncio.create_task(self._report())

    async def _show_status(self, request: HttpRequest) -> Response:
        _check_operator(request)
        return JSONResponse(await self._fleet.status())

    async def _show_metrics(self, request: HttpRequest) -> Response:
        _check_operator(request)
        return Response(merged(await self._fleet.metrics()), media_type=CONTENT_TYPE)

    def _load(self, journal: Journal) -> Runtime:
        settings = self._setup.of_replica()
        engine = self._setup.engine or (lambda: registry.load(settings.engine_options(), None))
        runtime = Runtime(engine, settings, listener=journal)
        _measure(runtime)
        return runtime

    async def _preload(self) -> None:
        """Brings the hot list from the shared tier into memory. Whatever fails, the replica starts without it, in time."""
        runtime, begun = self._runtime, time.monotonic()
        if not runtime.cache.shared.on:
            return
        shape, budget = runtime.engine.shape, runtime.cache.memory.budget
        room = int(HOT_SHARE * budget / shape.kv_bytes_per_token) if shape.kv_bytes_per_token else TOKENS
        try:
            async with asyncio.timeout(HOT_SECONDS):
                found = list(await self._fleet.hottest(self._card.fingerprint, room))
            chains = hot_prefixes(found, self._card.block_size)
            brought = await asyncio.to_thread(runtime.preload, chains, HOT_SECONDS - (time.monotonic() - begun))
        except Exception as error:
            log.warning("the hot list could not be fetched", error=type(error).__name__)
            return
        self._preloaded = brought.tokens
        figures = {"listed": len(found), "prefixes": brought.prefixes, "tokens": brought.tokens}
        log.info("the hot list was fetched", **figures, seconds=round(time.monotonic() - begun, 3))

    async def _report(self) -> None:
        dump = sent = False
        while True:
            begun = time.monotonic()
            try:
                # First the changes: other fronts than the one that asks ignore a dump.
                for make in (self._reporter.report, *([self._reporter.dump] if dump else [])):
                    report = await asyncio.to_thread(make)
                    if report is not None:
                        dump = any(await self._fleet.send(await asyncio.to_thread(encode, report), self._card))
                        sent = True
            except Exception as error:  # the fronts are starting, or gone
                if sent:
                    log.warning("a report could not be sent", error=type(error).__name__)
                dump, sent = True, False
                await asyncio.sleep(LATE)
            await asyncio.sleep(max(0.0, PERIOD - (time.monotonic() - begun)))

    def check(self) -> None:
        """Raises EngineError if the engine thread has ended, so that the replica must be replaced."""
        if not self._runtime.alive:
            raise EngineError("the engine thread has ended")

    def idle(self) -> bool:
        """Whether there is no request, and no turn to settle."""
        return self._runtime.scheduler.idle

    def figures(self) -> MemberFigures:
        """What `headstart fleet status` shows."""
        now = self._runtime.snapshot()
        held = {name: Held(tier["entries"], tier["used"], tier["budget"]) for name, tier in now["tiers"].items()}
        return MemberFigures(
            *(self._name, replica_tag(self._name), platform.node(), os.getpid()),
            *(now["running"], now["waiting"], self.waiting(), self._reporter.speed),
            held=held,
            computed=self._computed,
            cached=dict(self._cached),
            preloaded=self._preloaded,
        )

    def _count(self, outcome: Outcome) -> None:
        report = outcome.report
        self._computed += report.computed
        for tier, tokens in {"live": report.live, **report.tiers}.items():
            self._cached[tier] += tokens

    def metrics(self) -> tuple[str, bytes]:
        """The replica's tag, and its metrics in Prometheus' text format."""
        page: bytes = self.app.state.service.metrics.render()
        return replica_tag(self._name), page

    def explain(self, tenant: str, salt: str, request_id: str | None) -> dict[str, Any] | None:
        """What this replica says about a request."""
        return account(self._runtime, tenant, salt, request_id)

    async def chain(self, asked: ChainRequest) -> ChainAnswer:
        """What this replica does with a chain."""
        return await asyncio.to_thread(answer, self._runtime, asked)

    def waiting(self) -> float:
        """Seconds of prefill in the queue."""
        return self._reporter.waiting()

    def end_replies(self) -> None:
        """Ends the replies that run, as their dialects end one that is not complete. Otherwise `close` could come too late."""
        drain: Drain = self.app.state.service.drain
        log.warning("replies are ended", running=drain.running)
        drain.begin(self._setup.settings.drain)
        drain.end()

    async def close(self) -> None:
        """Stores what only this server has, and frees the model."""
        if self._reporting is None:
            return
        self._reporting.cancel()
        with suppress(asyncio.CancelledError):
            await self._reporting
        self._reporting = None
        await asyncio.to_thread(self._runtime.close, self._setup.settings.drain)


def _measure(runtime: Runtime) -> None:
    """Computes some tokens, so that the first report has the replica's own speed. Fronts would take it for a fast one."""
    ended = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ended.set()

    with runtime.prompts.tokenizer_open() as tokenizer:
        tokens = tokenizer.tokenize("How fast is this machine? " * MEASURED)[: min(MEASURED + 1, runtime.ctx // 2)]
    prompt = runtime.text_prompt(tokens, salt=MEASURER)
    runtime.submit(Request(prompt, GenerationParams(max_tokens=0, reuse=False), tenant=MEASURER), sink)
    ended.wait()


def _check_operator(request: HttpRequest) -> None:
    """Raises Forbidden."""
    if not request.scope["operator"]:
        path = request.scope["path"]
        raise Forbidden(f"{path} shows data of all tenants: it needs the key named '{OPERATOR}' in --api-key-file.")
