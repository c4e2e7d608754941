"""The rules of other routers, by hand."""

from __future__ import annotations

import random
from collections import Counter

from headstart.fleet.router.chains import PromptChain
from headstart.fleet.simulator.routings import PowerOfTwo, RayPrefix, RoundRobin, Routing, SGLang, Sticky
from headstart.interfaces.tokens import as_tokens
from headstart.traces import TracedRequest

IDLE = (0, 0, 0)


def place(rule: Routing, *blocks: int, ongoing: tuple[int, ...] = IDLE, number: int = 0, session: int = -1) -> int:
    request = TracedRequest(0.0, as_tokens(blocks), 10 * len(blocks) + 1, 5, session=session)
    return rule.choose(number, request, PromptChain([2 * one for one in blocks], request.prompt, 10), ongoing, 0.0)


def test_round_robin() -> None:
    assert [place(RoundRobin(), 1, number=number) for number in range(4)] == [0, 1, 2, 0]


def test_power_of_two_never_takes_the_busiest() -> None:
    rule = PowerOfTwo(random.Random(0))
    places = Counter(place(rule, 1, ongoing=(5, 1, 3)) for _ in range(100))
    assert places[0] == 0
    assert places[1] > places[2] > 0


def test_sticky_follows_the_session_and_spreads_sessions() -> None:
    rule = Sticky(3)
    assert len({place(rule, number, session=7) for number in range(20)}) == 1
    assert len({place(rule, 7, number) for number in range(20)}) == 1
    assert Counter(place(rule, 1, session=one) for one in range(300)).keys() == {0, 1, 2}


def test_sticky_moves_few_sessions_when_a_replica_is_added() -> None:
    moved = sum(place(Sticky(8), 1, ongoing=(0,) * 8, session=one) != place(Sticky(9), 1, session=one) for one in range(200))
    assert 0 < moved < 60


def test_ray_goes_where_the_prefix_was_routed() -> None:
    rule = RayPrefix(3, random.Random(0))
    first = place(rule, 1, 2, 3)
    assert place(rule, 1, 2, 3, 4, ongoing=tuple(100 * (one == first) for one in range(3))) == first
    second = place(rule, 5, 6)
    third = place(rule, 7)
    assert {first, second, third} == {0, 1, 2}, "new prompts go to the smallest tree"
    assert place(rule, 1, *range(100, 120)) == third, "less than a tenth is no match"


def test_ray_with_a_threshold_leaves_the_prefix_when_queues_differ() -> None:
    rule = RayPrefix(2, random.Random(0), 10.0)
    first = place(rule, 1, 2, 3, ongoing=(0, 0))
    busy = (11, 0) if first == 0 else (0, 11)
    assert place(rule, 1, 2, 3, ongoing=busy) == 1 - first


def test_sglang_goes_where_the_prefix_was_routed_unless_queues_differ() -> None:
    rule = SGLang(2)
    assert [place(rule, 1, 2, 3, ongoing=(0, 0)), place(rule, 4, 5, ongoing=(0, 0))] == [0, 1]
    assert place(rule, 1, 2, 3, 9, ongoing=(60, 0)) == 0
    assert place(rule, 1, 2, 3, 9, ongoing=(65, 0)) == 1
    assert place(rule, 1, 50, 51, 52, 53, ongoing=(0, 0)) == 0, "too small a match: the smallest tree"
