"""Source: where the events come from. `RuntimeSource` reads a runtime, off the engine thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headstart.events.tap import News, Tap
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.quota import owner_of
from headstart.serving.job import Job
from headstart.serving.request import Report
from headstart.serving.runtime import Runtime

Activity = Literal["idle", "prefill", "reply"]
"""What a slot does."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot does.

    Attributes:
        owner: whose text it holds; b"" if it is empty.
        tokens: tokens in it.
        total: tokens of the prompt that is prefilled or was.
        reply: tokens of the reply so far.
        left: seconds of prefill left, about; None if that is not known.
        job: what uses it.
    """

    number: int
    owner: bytes
    state: Activity
    tokens: int
    total: int = 0
    reply: int = 0
    left: float | None = None
    job: Job | None = None


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A choice of a request that has ended. `at`: when, by `time.time`."""

    id: str
    owner: bytes
    choice: int
    at: float
    report: Report


Why = Literal["expired", "over_quota", "least_value"]
"""Why an entry is evicted next: its time is over, its owner is above its quota, or keeping it saves least."""


class Source(Protocol):
    """All methods may be called from any thread, one at a time."""

    def open(self) -> Iterable[Entry]:
        """Begins to listen. Returns what is stored. Called again, it begins anew."""

    def close(self) -> None:
        """Ends listening, so that nothing costs anything."""

    def past(self) -> list[PastRequest]:
        """The latest requests that have ended, the earliest first, whether anybody listened or not."""

    def news(self) -> Sequence[News] | None:
        """What has happened since the last call. None if some of it was lost."""

    def pinned(self, key: BlockId) -> bool: ...

    def age(self, key: BlockId) -> float | None:
        """Seconds since the last use in memory."""

    def slots(self) -> list[SlotState]: ...

    def soon(self, count: int) -> list[tuple[BlockId, Why]]:
        """The next entries that memory evicts, about, and why."""

    def tiers(self) -> dict[str, dict[str, int]]:
        """Used and budgeted bytes, by tier."""


class RuntimeSource:
    """A `Source` of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._store = runtime.cache.store
        self._tap = Tap()

    def open(self) -> Iterable[Entry]:
        if self._tap in self._runtime.listeners:
            self.close()
        return self._runtime.listen(self._tap)

    def close(self) -> None:
        tap, self._tap = self._tap, Tap()  # what it has heard and nobody took has texts
        self._runtime.unlisten(tap)

    def past(self) -> list[PastRequest]:
        since, found = time.time() - time.monotonic(), dict[tuple[int, int], PastRequest]()
        for record in self._runtime.scheduler.history.latest():
            for choice, report in record.reports.items():
                if isinstance(report, Report):  # all records of a request have the reports of all its choices
                    one = PastRequest(record.id, owner_of(record.root), choice, since + record.time, report)
                    found.setdefault((id(record.reports), choice), one)
        return [*found.values()]

    def news(self) -> Sequence[News] | None:
        return self._tap.drain()

    def pinned(self, key: BlockId) -> bool:
        return key in self._store.pins

    def age(self, key: BlockId) -> float | None:
        used = self._store.retention.last_use(key)
        return None if used is None else max(0.0, time.monotonic() - used)

    def slots(self) -> list[SlotState]:
        jobs = {job.slot.number: job for job in self._runtime.scheduler.jobs if job.slot is not None}
        found = []
        for slot in self._runtime.scheduler.slots:
            job, tokens = jobs.get(slot.number), len(slot)
            if job is None:
                found.append(SlotState(slot.number, owner_of(slot.root) if tokens else b"", "idle", tokens))
                continue
            state: Activity = "prefill" if job.token is None else "reply"
            total, reply = len(job.chain), len(job.reply.tokens)
            left = job.prefill_left(total - tokens) if state == "prefill" else None
            found.append(SlotState(slot.number, owner_of(job.root), state, tokens, total, reply, left, job))
        return found

    def soon(self, count: int) -> list[tuple[BlockId, Why]]:
        over = self._store.memory.quota.over()

        def why(entry: Entry) -> Why:
            if self._store.spent(entry):
                return "expired"
            return "over_quota" if entry.owner in over else "least_value"

        return [(entry.id, why(entry)) for entry in self._store.retention.soon(count, over)]

    def tiers(self) -> dict[str, dict[str, int]]:
        return {tier.name: {"used": tier.used, "budget": tier.budget} for tier in (self._store.memory, self._store.disk)}
