"""Savings: what reuse has saved since the server's start, from the sums that the server keeps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


NOTHING = Savings(0, 0, {}, 0, None, None, None, None)
"""Of a server without requests, or that has not answered yet."""
