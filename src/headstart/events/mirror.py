"""Mirror: the tree of entries and the latest requests, as the readers of events know them. Pure: it knows no threads or clocks.

Each change becomes an `Item`: a piece of JSON with the owner who may read it. It is encoded once, for all readers.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.events.item import Item, LatestRequests
from headstart.events.source import PastRequest, SlotState, Source
from headstart.events.tap import JobNews, News, RequestState
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.id_map import IdMap
from headstart.prefix_cache.quota import owner_of
from headstart.serving.job import Job
from headstart.serving.portions import paced
from headstart.serving.request import Report

OVER = frozenset({"stop", "length", "cancelled", "failed"})
"""The stages after which nothing of a request follows."""
ENDED = 1024
"""How many requests that have ended are known, so that none is told twice. More than a runtime remembers."""


_Request = tuple[bytes, str, int, float]
"""What tells requests apart: owner, id, choice, and the time to the first token, because clients may repeat an id."""


@dataclass(frozen=True, slots=True)
class TreeChanges:
    """What has changed, by the name of the event. `resized`: whether more or less is stored than before."""

    tree: Sequence[Item]
    requests: Sequence[Item]
    resized: bool


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
        self._known = IdMap[Known]()
        self._requests = LatestRequests()
        self._ended: deque[_Request] = deque(maxlen=ENDED)
        self._open: dict[int, tuple[Job, int]] = {}  # by identity; the number of a request
        self._last = 0  # number
        self.held: Counter[tuple[bytes, str]] = Counter()
        self._all: Counter[str] = Counter()  # of all owners

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, entries: Iterable[Entry], past: Iterable[PastRequest] = ()) -> None:
        """Takes what is stored at the beginning. Requests that are known stay; those that were open are forgotten.

        Args:
            past: requests that have ended. Those that nobody heard of are added.
        """
        before, self._known = self._known, IdMap()
        for _ in paced(before.clearing()):
            pass
        for job, number in self._open.values():
            self._requests.drop(number, owner_of(job.root))
        self._open.clear()
        self.held.clear()
        self._all.clear()
        for entry in entries:
            self._look(entry)
        for one in past:
            if (request := (one.owner, one.id, one.choice, one.report.ttft)) not in self._ended:
                self._ended.append(request)
                number = self._next(one.at - one.report.ttft - one.report.decode)
                self._requests.put(number, Item(one.owner, _json(_past(number, one))))

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
        before = self._all.copy()
        tree = [item for item in map(self._look, touched.values()) if item is not None]
        return TreeChanges(tree, list(requests.values()), self._all != before)

    def tree(self) -> Iterator[Item]:
        """All entries, as new ones."""
        return (self._came(known) for known in self._known.values())

    def requests(self) -> list[Item]:
        """The latest requests, in order."""
        return list(self._requests)

    # ── entries ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self, entry: Entry) -> Item | None:
        """Looks at an entry that may have changed."""
        before = self._known.get(entry.id)
        copies = entry.copies  # once: the engine thread may replace it
        if not copies:
            if before is None:
                return None
            del self._known[entry.id]
            self._hold(before, -1)
            return Item(before.owner, _json({"left": entry.id.hex()}))
        shown = copies.get("memory"), copies.get("disk"), self._source.pinned(entry.id)
        if before is None:
            known = self._known[entry.id] = Known(entry.owner, entry.length, shown, entry)
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
        for name, size in (("entries", sign), ("tokens", sign * known.tokens)):
            self.held[known.owner, name] += size
            self._all[name] += size
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
        return mine, {name: self._all[name] - mine[name] for name in mine}

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _request(self, news: JobNews) -> tuple[int, Item]:
        job, report = news.job, news.report
        number = self._number(news)
        data: dict[str, Any] = {
            "number": number,
            "id": job.ticket.request.id,
            "owner": owner_of(job.root).hex(),
            "choice": job.choice,
            "state": news.stage,
            "at": round(news.at, 3),
            "prompt": len(job.chain),
        }
        if news.slot >= 0:
            data["slot"] = news.slot
        if (news.stage == "prefill" or report is not None) and job.plan is not None:
            ids, blocks = job.chain.ids, job.plan.start // job.chain.block_size
            reused = (
                ids[blocks - 1].hex() if blocks else None
            )  # in each event, because a later stage replaces one of its period
            data |= {"cached": job.plan.start, "tiers": dict(job.tiers), "reused": reused}
        if report is not None:
            data |= _figures(report)
        owner = owner_of(job.root)
        item = Item(owner, _json(data))
        self._requests.put(number, item)
        if news.stage in OVER:
            self._open.pop(id(job), None)
            if report is not None:
                self._ended.append((owner, job.ticket.request.id, job.choice, report.ttft))
        return number, item

    def _number(self, news: JobNews) -> int:
        """The number of a request."""
        if id(news.job) not in self._open:
            self._open[id(news.job)] = news.job, self._next(news.at)
        return self._open[id(news.job)][1]

    def _next(self, at: float) -> int:
        """A new number. It is made of the time, because a count would tell each owner about the others."""
        self._last = max(self._last + 1, round(at * 1e6))
        return self._last

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def slots(self) -> list[Item]:
        """What the slots do. Others than the owner see whether a slot is in use."""
        return [self._slot(state) for state in self._source.slots()]

    def _slot(self, state: SlotState) -> Item:
        data: dict[str, Any] = {"slot": state.number, "state": state.state, "tokens": state.tokens}
        if state.job is not None and id(state.job) in self._open:
            data |= {"total": state.total, "reply": state.reply, "request": self._open[id(state.job)][1]}
            if state.left is not None:
                data["left"] = round(state.left, 2)
        public = {"slot": state.number, "state": "idle" if state.state == "idle" else "busy"}
        return Item(state.owner, _json(data), _json(public))

    def soon(self, count: int) -> list[Item]:
        """The entries that memory evicts next, about, and why."""
        known = ((key, why, self._known.get(key)) for key, why in self._source.soon(count))
        return [Item(one.owner, _json({"id": key.hex(), "why": why})) for key, why, one in known if one is not None]


def _past(number: int, one: PastRequest) -> dict[str, Any]:
    """A request that nobody heard of while it ran."""
    state: RequestState = "cancelled" if one.report.cancelled else "ended"
    place = {"number": number, "id": one.id, "owner": one.owner.hex(), "choice": one.choice}
    return {**place, "state": state, "at": round(one.at, 3), "prompt": one.report.prompt, **_figures(one.report)}


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
