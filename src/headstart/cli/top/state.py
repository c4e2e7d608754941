"""State: what a reader of the events knows of a server. Pure: a state and a batch give the next state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.cli.top.stream import ReadBatch

LATEST = 128
"""Most requests that are remembered, as in the server."""


@dataclass(frozen=True, slots=True)
class ShownEntry:
    """A block, an open tail or a checkpoint. `used`: when it was used last, by the server's clock; None if unknown."""

    id: str
    parent: str | None
    start: int
    tokens: int
    tiers: frozenset[str]
    pinned: bool
    checkpoint: bool
    used: float | None


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request, as its latest event describes it. `tiers` has the cached tokens, those `live` in a slot too."""

    number: int
    id: str
    choice: int
    state: str
    at: float
    prompt: int
    tiers: Mapping[str, int]
    computed: int | None
    completion: int
    cause: str | None
    recomputed: int
    seconds: Mapping[str, float]

    @property
    def cached(self) -> int:
        return sum(self.tiers.values())


@dataclass(frozen=True, slots=True)
class SlotRow:
    """What a slot does. Of the slots of others only the number and whether it is busy are known. `left`: seconds of prefill."""

    number: int
    state: str
    tokens: int
    total: int
    reply: int
    request: int | None
    left: float | None


@dataclass(frozen=True, slots=True)
class TierSize:
    used: int
    budget: int


@dataclass(frozen=True, slots=True)
class TopState:
    """What is known.

    Attributes:
        entries: what is stored, by id.
        evicted_next: why, by id; the first one first.
        others: entries and tokens of other owners.
        tiers: bytes by tier; empty if only the operator may see them.
    """

    time: float = 0.0
    entries: Mapping[str, ShownEntry] = field(default_factory=dict)
    requests: Mapping[int, RequestRow] = field(default_factory=dict)
    slots: tuple[SlotRow, ...] = ()
    evicted_next: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[str, TierSize] = field(default_factory=dict)

    def then(self, batch: ReadBatch) -> TopState:
        """The state after a batch. Raises KeyError, TypeError or ValueError if an event is not as docs/events.md says."""
        now = replace(self, time=batch.time or self.time)
        for name, value in batch.events:
            if name == "snapshot":
                now = TopState(time=now.time)
            elif name == "tree":
                now = replace(now, entries=_entries(now, value))
            elif name == "requests":
                now = _requests(now, value)
            elif name == "slots":
                now = replace(now, slots=tuple(map(_slot, value)))
            elif name == "evicted_next":
                now = replace(now, evicted_next={one["id"]: one["why"] for one in value})
            elif name == "sizes":
                tiers = {tier: TierSize(size["used"], size["budget"]) for tier, size in value.get("tiers", {}).items()}
                now = replace(now, others=value["others"], tiers=tiers)
        return now


def _entries(now: TopState, changes: list[dict[str, Any]]) -> Mapping[str, ShownEntry]:
    found = dict(now.entries)
    for one in changes:
        if "left" in one:
            found.pop(one["left"], None)
            continue
        if one["id"] in found:
            found[one["id"]] = replace(found[one["id"]], tiers=frozenset(one["tiers"]), pinned=one["pinned"])
        if "start" not in one:
            continue
        age = one["seconds_ago"]
        found[one["id"]] = ShownEntry(
            one["id"],
            one["parent"],
            one["start"],
            one["tokens"],
            frozenset(one["tiers"]),
            one["pinned"],
            one.get("checkpoint", False),
            None if age is None else now.time - age,
        )
    return found


def _requests(now: TopState, changes: list[dict[str, Any]]) -> TopState:
    rows, uses = dict(now.requests), [(one["reused"], _began(one)) for one in changes if one.get("reused")]
    for one in changes:
        rows.pop(one["number"], None)  # the latest changed one is the last
        rows[one["number"]] = _request(one)
    for number in [*rows][: max(0, len(rows) - LATEST)]:
        del rows[number]
    return replace(now, requests=rows, entries=_used(now.entries, uses) if uses else now.entries)


def _began(one: Mapping[str, Any]) -> float:
    """When its prefill began."""
    seconds = one.get("seconds", {})
    return float(one["at"] - seconds.get("prefill", 0.0) - seconds.get("decode", 0.0))


def _request(one: Mapping[str, Any]) -> RequestRow:
    tiers = {**one.get("tiers", {}), "live": one.get("live", 0)}
    if "live" not in one:  # a prefill has begun: what was not restored was live
        tiers["live"] = max(0, one.get("cached", 0) - sum(tiers.values()))
    return RequestRow(
        one["number"],
        one["id"],
        one["choice"],
        one["state"],
        one["at"],
        one["prompt"],
        {name: tokens for name, tokens in tiers.items() if tokens},
        one.get("computed"),
        one.get("completion", 0),
        one.get("cause"),
        one.get("recomputed", 0),
        one.get("seconds", {}),
    )


def _used(entries: Mapping[str, ShownEntry], uses: Sequence[tuple[str, float]]) -> Mapping[str, ShownEntry]:
    """The entries after uses of some, at a time, and of all before them."""
    found = dict(entries)
    for key, at in uses:
        while (entry := found.get(key)) is not None and (entry.used is None or entry.used < at):
            found[key] = replace(entry, used=at)
            key = entry.parent or ""
    return found


def _slot(one: Mapping[str, Any]) -> SlotRow:
    number, state = one["slot"], one["state"]
    tokens, total, reply = (one.get(name, 0) for name in ("tokens", "total", "reply"))
    return SlotRow(number, state, tokens, total, reply, one.get("request"), one.get("left"))
