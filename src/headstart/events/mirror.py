"""Mirror: the tree of entries and the latest requests, as the readers of events know them. Pure: it knows no threads or clocks.

Each change becomes an `Item`: a piece of JSON with the owner who may read it. It is encoded once, for all readers.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.events.source import PastRequest, SlotState, Source
from headstart.events.tap import JobNews, News
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.index import Entry
from headstart.prefix_cache.quota import owner_of
from headstart.serving.job import Job
from headstart.serving.request import Report

LATEST = 128
"""Most requests that are remembered for new readers."""
OVER = frozenset({"stop", "length", "cancelled", "failed"})
"""The stages after which nothing of a request follows."""


_Request = tuple[bytes, str, int, float]
"""What tells requests apart: owner, id, choice, and the time to the first token, because clients may repeat an id."""


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of an event. `owner`: who may read it, beside the operator. `public`: what others read in its place, or b""."""

    owner: bytes
    data: bytes
    public: bytes = b""


@dataclass(frozen=True, slots=True)
class TreeChanges:
    """What has changed, by the name of the event."""

    tree: Sequence[Item] = ()
    requests: Sequence[Item] = ()


@dataclass(slots=True)
class Known:
    """What readers know of an entry."""

    owner: bytes
    tokens: int
    shown: tuple[bool | None, bool | None, bool]  # canonical in memory, on disk; pinned
    entry: Entry


class Mirror:
    """What readers know.

    Attributes:
        held: entries and tokens by owner: `(owner, "entries")`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[BlockId, Known] = {}
        self._requests: OrderedDict[int, tuple[_Request, Item]] = OrderedDict()
        self._open: dict[int, tuple[Job, int]] = {}  # by identity; the number of a request
        self._count = 0
        self.held: Counter[tuple[bytes, str]] = Counter()

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, entries: Iterable[Entry], past: Iterable[PastRequest] = ()) -> None:
        """Takes what is stored at the beginning. Requests that are known stay; those that were open are forgotten.

        Args:
            past: requests that have ended. Those that nobody heard of are added.
        """
        self._known.clear()
        self._open.clear()
        self.held.clear()
        for entry in entries:
            self._look(entry)
        heard = {request for request, _ in self._requests.values()}
        for one in past:
            if (request := (one.owner, one.id, one.choice, one.report.ttft)) not in heard:
                self._count += 1
                self._keep(self._count, request, _past(self._count, one))

    def apply(self, news: Iterable[News]) -> TreeChanges:
        """What is new for readers. Several changes of one entry are one."""
        touched: dict[BlockId, Entry] = {}
        requests: dict[int, Item] = {}
        for one in news:
            if isinstance(one, Entry):
                touched[one.id] = one
            elif isinstance(one, JobNews):
                number, item = self._request(one)
                requests[number] = item
            else:
                touched.update((key, self._known[key].entry) for key in one if key in self._known and key not in touched)
        tree = [item for item in map(self._look, touched.values()) if item is not None]
        return TreeChanges(tree, list(requests.values()))

    def tree(self) -> Iterator[Item]:
        """All entries, as new ones."""
        return (self._came(known) for known in self._known.values())

    def requests(self) -> list[Item]:
        """The latest requests, in order."""
        return [item for _, item in self._requests.values()]

    # ── entries ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self, entry: Entry) -> Item | None:
        """Looks at an entry that may have changed."""
        before = self._known.get(entry.id)
        copies = dict(entry.copies)  # in one step: the engine thread may change it
        if not copies:
            if before is None:
                return None
            del self._known[entry.id]
            self._hold(before, -1)
            return Item(before.owner, _json({"left": entry.id.hex()}))
        shown = copies.get("memory"), copies.get("disk"), self._source.pinned(entry.id)
        if before is None:
            known = self._known[entry.id] = Known(entry.owner, len(entry.tokens), shown, entry)
            self._hold(known, 1)
            return self._came(known)
        before.entry = entry
        if before.shown == shown:
            return None
        before.shown = shown
        return Item(before.owner, _json({"id": entry.id.hex(), **_where(shown)}))

    def _hold(self, known: Known, sign: int) -> None:
        if known.entry.state:
            return
        self.held[known.owner, "entries"] += sign
        self.held[known.owner, "tokens"] += sign * known.tokens
        if not self.held[known.owner, "entries"]:
            del self.held[known.owner, "entries"], self.held[known.owner, "tokens"]

    def _came(self, known: Known) -> Item:
        entry, age = known.entry, self._source.age(known.entry.id)
        data = {
            "id": entry.id.hex(),
            "owner": known.owner.hex(),
            "parent": entry.parent.hex() if entry.start or entry.state else None,  # else a root, which names the salt
            "start": entry.start,
            "tokens": known.tokens,
            **({"checkpoint": True} if entry.state else {}),
            **_where(known.shown),
            "seconds_ago": None if age is None else round(age, 1),
        }
        return Item(known.owner, _json(data))

    def totals(self, owner: bytes) -> tuple[dict[str, int], dict[str, int]]:
        """Entries and tokens of an owner, and of all others together."""
        mine = {name: self.held[owner, name] for name in ("entries", "tokens")}
        every = {name: sum(size for (_, kind), size in self.held.items() if kind == name) for name in mine}
        return mine, {name: every[name] - mine[name] for name in mine}

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _request(self, news: JobNews) -> tuple[int, Item]:
        job, report = news.job, news.report
        number = self.number(job)
        request = job.ticket.request
        data: dict[str, Any] = {
            "number": number,
            "id": request.id,
            "owner": owner_of(job.root).hex(),
            "choice": job.choice,
            "state": news.stage,
            "at": round(news.at, 3),
            "prompt": len(job.chain),
        }
        if news.slot >= 0:
            data["slot"] = news.slot
        if news.stage == "prefill" and job.plan is not None:
            ids, blocks = job.chain.ids, job.plan.start // job.chain.block_size
            reused = ids[blocks - 1].hex() if blocks else None
            data |= {"cached": job.plan.start, "tiers": dict(job.tiers), "reused": reused}
        if report is not None:
            data |= _figures(report)
        ttft = 0.0 if report is None else report.ttft
        item = self._keep(number, (owner_of(job.root), request.id, job.choice, ttft), data)
        if news.stage in OVER:
            self._open.pop(id(job), None)
        return number, item

    def _keep(self, number: int, request: _Request, data: Mapping[str, Any]) -> Item:
        """Remembers a request for new readers."""
        item = Item(request[0], _json(data))
        self._requests[number] = request, item
        self._requests.move_to_end(number)
        if len(self._requests) > LATEST:
            self._requests.popitem(last=False)
        return item

    def number(self, job: Job) -> int:
        """The number of a request."""
        if id(job) not in self._open:
            self._count += 1
            self._open[id(job)] = job, self._count
        return self._open[id(job)][1]

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def slots(self) -> list[Item]:
        """What the slots do. Others than the owner see whether a slot is in use."""
        return [self._slot(state) for state in self._source.slots()]

    def _slot(self, state: SlotState) -> Item:
        data: dict[str, Any] = {"slot": state.number, "state": state.state, "tokens": state.tokens}
        if state.job is not None and id(state.job) in self._open:
            data |= {"total": state.total, "reply": state.reply, "request": self.number(state.job)}
        public = {"slot": state.number, "state": "idle" if state.state == "idle" else "busy"}
        return Item(state.owner, _json(data), _json(public))

    def soon(self, count: int) -> list[Item]:
        """The entries that memory evicts next, about, and why."""
        known = ((key, why, self._known.get(key)) for key, why in self._source.soon(count))
        return [Item(one.owner, _json({"id": key.hex(), "why": why})) for key, why, one in known if one is not None]


def _past(number: int, one: PastRequest) -> dict[str, Any]:
    """A request that nobody heard of while it ran."""
    place = {"number": number, "id": one.id, "owner": one.owner.hex(), "choice": one.choice}
    return {**place, "state": "ended", "at": round(one.at, 3), "prompt": one.report.prompt, **_figures(one.report)}


def _figures(report: Report) -> dict[str, Any]:
    explanation = report.explanation
    return {
        "cached": report.cached,
        "live": report.live,
        "tiers": dict(report.tiers),
        "computed": report.computed,
        "completion": report.completion,
        "cause": None if report.cause is None else report.cause.value,
        "recomputed": 0 if explanation is None else explanation.recomputed,
        "seconds": {name: round(getattr(report, name), 4) for name in ("queued", "prefill", "ttft", "decode")},
    }


def _where(shown: tuple[bool | None, bool | None, bool]) -> dict[str, Any]:
    """In which tiers an entry is, and whether it is canonical there."""
    memory, disk, pinned = shown
    tiers = {name: canonical for name, canonical in (("memory", memory), ("disk", disk)) if canonical is not None}
    return {"tiers": tiers, "pinned": pinned}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
