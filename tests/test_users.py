"""Recorded traffic for fleets: sessions that several users hold (`benchmarks.users`), and times that were rounded."""

from __future__ import annotations

import numpy as np
from benchmarks.fleet_replay import unrounded
from benchmarks.users import by_users

from headstart.interfaces.tokens import as_tokens
from headstart.traces import Trace, TracedRequest


def turn(at: float, session: int, *blocks: int) -> TracedRequest:
    return TracedRequest(at, as_tokens(blocks), 8 * len(blocks) + 1, 4, session=session)


RECORDED = Trace("two", 8, (turn(0, 0, 1, 2), turn(1, 1, 1, 3), turn(5, 0, 1, 2, 4), turn(7, 1, 1, 3, 5)))


def test_each_user_has_its_own_conversations_behind_what_all_share() -> None:
    trace = by_users(RECORDED, 3, 10.0)
    assert len(trace.requests) == 3 * len(RECORDED.requests)
    assert list(trace.requests) == sorted(trace.requests, key=lambda one: one.at)
    sessions: dict[int, list[TracedRequest]] = {}
    for one in trace.requests:
        sessions.setdefault(one.session, []).append(one)
    assert len(sessions) == 6
    own = [set(second.blocks.tolist()) - {1} for _, second in sessions.values()]
    assert len(set().union(*own)) == sum(map(len, own)), "two users share a block that one recorded session has"
    for first, second in sessions.values():
        assert first.blocks[0] == second.blocks[0] == 1, "the system prompt"
        assert second.blocks[: len(first.blocks)].tolist() == first.blocks.tolist()
    pauses = sorted(second.at - first.at for first, second in sessions.values())
    assert np.allclose(pauses, [5, 5, 5, 6, 6, 6])


def test_requests_of_one_time_come_evenly_until_the_next() -> None:
    alone = [turn(at, -1, number) for number, at in enumerate((0, 0, 0, 3, 3, 6))]
    assert [one.at for one in unrounded(alone)] == [0, 1, 2, 3, 4.5, 6]
    assert [one.blocks for one in unrounded(alone)] == [one.blocks for one in alone]
    assert unrounded(RECORDED.requests) == RECORDED.requests
    assert unrounded([turn(0, 5, 1), turn(0, 6, 1), turn(2, 5, 1)])[1].at == 0, "a session keeps its pauses"
