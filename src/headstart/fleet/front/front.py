"""Front: routes the requests of a fleet. It knows no cluster library, and sends nothing itself.

    replica ──report──▶ Front ◀──request── caller
                          └──▶ the name of the replica that should serve it, and the booking there

Each front keeps its own state, and all of it is soft. A front that has just started routes by the least wait, and asks each
replica that reports for a dump. A front that no report reaches chooses at random among the replicas that the cluster says run.

Use it on one event loop. Reading a prompt takes milliseconds, so it runs on threads.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers

from headstart.fleet.front.affinity import replica_tag, wanted_tag
from headstart.fleet.front.hot import HotPrompts, HotStretch
from headstart.fleet.model_card import ModelCard
from headstart.fleet.router.chains import PromptChain
from headstart.fleet.router.reports import ReplicaReport
from headstart.fleet.router.router import FleetRouter, ReplicaStatus

SILENT = 5.0
"""Seconds without a report after which a replica gets no more requests. A replica reports at least once a second."""
UNREAD = PromptChain([], 1, 64)
"""The chain of a request without a prompt, or with one that cannot be read. It goes where the wait is least."""


class ChainReader(Protocol):
    """Reads the prompt of a request: `prompts.PromptReader`."""

    def chain(self, card: ModelCard, path: str, headers: Headers, body: bytes) -> PromptChain | None: ...


@dataclass(slots=True)
class HeardReplica:
    """A replica that reports: its model, and when it reported last."""

    card: ModelCard
    at: float


@dataclass(frozen=True, slots=True)
class BookedReplica:
    """Where a request goes.

    Attributes:
        booking: the id under which the request is booked there, 32 hexadecimal digits. Reports name the request by it.
    """

    replica: str
    booking: str


class Front:
    """Knows the replicas by their reports, and chooses one for each request.

    Args:
        reader: reads prompts.
        clock: seconds.
        hot: remembers prompts for new replicas; None if there is no shared tier from which they could fetch them.
    """

    def __init__(self, reader: ChainReader, clock: Callable[[], float] = time.monotonic, hot: HotPrompts | None = None) -> None:
        self._reader = reader
        self._hot = hot
        self._clock = clock
        self._router = FleetRouter()
        self._heard: dict[str, HeardReplica] = {}

    @property
    def replicas(self) -> Collection[str]:
        """The replicas that report."""
        self._sweep()
        return self._heard.keys()

    def report(self, report: ReplicaReport, card: ModelCard) -> bool:
        """Takes a report. True if the replica must send a dump."""
        now, name = self._clock(), report.replica
        self._heard[name] = HeardReplica(card, now)
        return self._router.report(report, now)

    def leave(self, replica: str) -> None:
        """A replica is gone, or stops: it gets no more requests."""
        self._router.leave(replica)
        self._heard.pop(replica, None)

    async def route(
        self,
        path: str,
        headers: Headers,
        body: bytes,
        *,
        running: Collection[str] | None = None,
        without: Collection[str] = (),
    ) -> BookedReplica | None:
        """Chooses a replica and books the request there. None if there is none.

        Args:
            path: "" if the caller knows the body only.
            running: replicas to which the cluster sends requests; None if that is not known. No others are chosen.
            without: replicas that must not be chosen: they refused this request, or died.
        """
        self._sweep()
        booking = uuid.uuid4().hex  # not the request's id: clients may send the same one twice
        tag = await asyncio.to_thread(wanted_tag, path, body)
        reporting = {name for name in self._heard if name not in without and (running is None or name in running)}
        silent = {*(running or ())}.difference(without, reporting)
        owner = next((name for name in (*reporting, *silent) if replica_tag(name) == tag), None)
        if owner is not None:  # what the request names is in that replica's memory
            self._router.choose(booking, UNREAD, self._clock(), without=self._heard.keys() - {owner})
            return BookedReplica(owner, booking)
        card = self._card()
        chain = None
        if card is not None and body:
            chain = await asyncio.to_thread(self._reader.chain, card, path, headers, body)
            if self._hot is not None and chain is not None and chain.source is not None:
                self._hot.asked(card.fingerprint, chain.source, self._clock())
        chosen = self._router.choose(booking, chain or UNREAD, self._clock(), without=self._heard.keys() - reporting)
        if chosen is not None:
            return BookedReplica(chosen.replica, booking)
        if not silent:
            return None
        # Reports are lost, or the first ones have not come yet. The id is random, so these requests spread.
        return BookedReplica(sorted(silent)[int(booking, 16) % len(silent)], booking)

    def close(self, booking: str) -> None:
        """A request is over, or did not reach its replica."""
        self._router.close(booking)

    def hottest(self, fingerprint: bytes, tokens: int) -> Sequence[HotStretch]:
        """The beginnings of prompts that a model's replicas use most, of so many tokens. Any thread may call it."""
        return () if self._hot is None else self._hot.hottest(fingerprint, tokens, self._clock())

    def forget(self) -> None:
        """Forgets all prompts."""
        if self._hot is not None:
            self._hot.forget()

    def status(self) -> tuple[ReplicaStatus, ...]:
        """What is known of each replica."""
        self._sweep()
        return self._router.status(self._clock())

    def _card(self) -> ModelCard | None:
        """The model of most replicas: during an update of the fleet there are two."""
        cards = [one.card for one in self._heard.values()]
        return max(set(cards), key=cards.count) if cards else None

    def _sweep(self) -> None:
        now = self._clock()
        for name in [name for name, one in self._heard.items() if now - one.at > SILENT]:
            self.leave(name)
