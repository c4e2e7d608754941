"""More users than were recorded: each session of a trace is held by several users, who begin at random times."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from headstart.interfaces.tokens import as_tokens
from headstart.traces import Trace, TracedRequest


def by_users(trace: Trace, users: int, every: float, *, seed: int = 0) -> Trace:
    """A trace in which each session is held once by each of so many users.

    Sessions begin at random times, in a random order; within a session all pauses are as recorded. Blocks that several recorded
    sessions share (a system prompt) are shared by all users. All others are a user's own.

    Args:
        trace: its requests have sessions.
        every: mean seconds between the begins of two sessions.
    """
    sessions: dict[int, list[TracedRequest]] = {}
    for request in trace.requests:
        sessions.setdefault(request.session, []).append(request)
    recorded = list(sessions.values())
    seen = Counter(block for one in recorded for block in {int(block) for request in one for block in request.blocks})
    last = max(seen, default=0) + 1
    common = np.array(sorted(block for block, count in seen.items() if count > 1), np.int64)
    random = np.random.default_rng(seed)
    held = [(user, number) for user in range(users) for number in range(len(recorded))]
    random.shuffle(held)
    begins = np.cumsum(random.exponential(every, len(held)))
    found = []
    for name, ((user, number), begin) in enumerate(zip(held, begins, strict=True)):
        for request in recorded[number]:
            blocks = request.blocks.astype(np.int64)
            own = np.where(np.isin(blocks, common), blocks, blocks + user * last)
            at = float(begin) + request.at - recorded[number][0].at
            found.append(replace(request, at=at, blocks=as_tokens(own), session=name))
    return replace(trace, requests=tuple(sorted(found, key=lambda one: one.at)))
