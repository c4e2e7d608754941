"""Scaling: how many replicas a fleet needs, by the seconds of prefill that wait.

The number of requests says little: one new prompt of 30,000 tokens is a minute of work, and a turn of a known conversation is
nearly none. So each replica says how many seconds of prefill it has in its queue.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

WAIT = 5.0
"""Seconds of prefill that a replica may have in its queue before another replica is started."""
IDLE = 0.25
"""Share of `WAIT` under which a replica is stopped."""


def replicas_for(waiting: float, current: int, least: int, most: int, wait: float = WAIT) -> int:
    """The number of replicas for so many seconds of waiting prefill in the fleet."""
    wanted = current
    if waiting > wait * current:
        wanted = math.ceil(waiting / wait)
    elif waiting < IDLE * wait * (current - 1):
        wanted = current - 1
    return max(least, min(most, wanted))


def by_waiting_seconds(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: the number of replicas, and state that is not used."""
    metrics = (context.aggregated_metrics or {}).get("waiting", {})
    waiting = sum(metrics.values())
    current = context.target_num_replicas
    if not metrics:
        return current, {}
    return (
        replicas_for(waiting, current, context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas),
        {},
    )
