"""Savings: what reuse has saved, from the requests that are known. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from headstart.cli.top.state import RequestRow

COLD = 0.5
"""A request is cold if less than this share of its prompt was cached."""
MEASURED = 64
"""Least computed tokens of a request whose prefill says how fast the server computes."""


@dataclass(frozen=True, slots=True)
class Savings:
    """Sums of requests.

    Attributes:
        tiers: cached tokens by tier, those `live` in a slot too.
        saved: seconds that the cached tokens would have taken to compute, about; None if no prefill was long enough to measure.
        warm, cold: median seconds to the first token.
        decode: median tokens a second of a reply.
    """

    requests: int
    prompt: int
    tiers: Mapping[str, int]
    computed: int
    saved: float | None
    warm: float | None
    cold: float | None
    decode: float | None

    @property
    def cached(self) -> int:
        return sum(self.tiers.values())


def savings(rows: Collection[RequestRow]) -> Savings:
    """The figures of the requests whose prompt is computed. The choices of a request count once, as in the metrics."""
    replied = [row for row in rows if row.computed is not None and row.seconds]
    main: dict[str, RequestRow] = {}
    for row in replied:
        if row.id not in main or (row.computed or 0) > (main[row.id].computed or 0):
            main[row.id] = row
    tiers: Counter[str] = Counter()
    for row in main.values():
        tiers.update(row.tiers)
    speeds = [row.seconds["prefill"] / row.computed for row in main.values() if row.computed and row.computed >= MEASURED]
    each = median(speeds) if speeds else None  # seconds a token
    saved = None if each is None else sum(row.prompt * each - row.seconds["prefill"] for row in main.values())
    first = {cold: [row.seconds["ttft"] for row in main.values() if _cold(row) == cold] for cold in (True, False)}
    decoded = [(row.completion - 1) / row.seconds["decode"] for row in replied if row.completion > 1 and row.seconds["decode"]]
    return Savings(
        len(main),
        sum(row.prompt for row in main.values()),
        tiers,
        sum(row.computed or 0 for row in main.values()),
        None if saved is None else max(0.0, saved),
        median(first[False]) if first[False] else None,
        median(first[True]) if first[True] else None,
        median(decoded) if decoded else None,
    )


def of_sums(stats: Mapping[str, Any]) -> Savings:
    """The figures in an answer of `/headstart/stats`: those since the server's start."""
    ttft = stats["ttft"]
    return Savings(
        stats["requests"],
        stats["prompt"],
        stats["tiers"],
        stats["computed"],
        stats["saved_seconds"],
        ttft["warm"]["median"],
        ttft["cold"]["median"],
        stats["decode"],
    )


def _cold(row: RequestRow) -> bool:
    return row.cached < COLD * row.prompt
