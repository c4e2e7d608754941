"""The simulator: the real cache's hits, and an optimum that is one."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import SLOW, examples
from headstart import replay as simulator
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.reuse_model import ReuseModel, ReuseStats
from headstart.replay import HALF_LIFE, OPTIMUM, POLICIES, ReplayCosts, ReplayRetention, closed, log2_add, replay, working_set
from headstart.traces import Trace, TracedRequest, read, sample

COSTS = ReplayCosts(0.5, 10.0)


def trace(*prompts: str, step: float = 10.0, block_size: int = 4) -> Trace:
    """Each letter is a block."""
    requests = (
        TracedRequest(number * step, as_tokens([ord(letter) for letter in prompt]), len(prompt) * block_size + 1, 100)
        for number, prompt in enumerate(prompts)
    )
    return Trace("test", block_size, tuple(requests))


def hits(found: Trace, policy: str, blocks: int) -> int:
    return replay(found, policy, blocks * found.block_size, COSTS).hit // found.block_size


def test_an_infinite_cache_hits_all_that_was_there() -> None:
    found = trace("abc", "abcd", "abx", "abcd", "q")
    for policy in simulator.policies():
        result = replay(found, policy, 10**6, COSTS)
        assert result.hit == (3 + 2 + 4) * 4, policy
        assert result.computed == result.prompt - result.hit == (3 + 1 + 1 + 1) * 4 - 4 + 5 + 4
        assert result.seconds == result.hit * 0.5
    assert working_set(found) == 6 * 4


def test_the_same_letters_behind_others_are_other_blocks() -> None:
    assert hits(trace("ab", "b", "cb"), "lru", 100) == 0


def test_lru_by_hand() -> None:
    """Two blocks: the end of a chain goes before its beginning, the least recently used first."""
    assert hits(trace("ab", "c", "ab", "c"), "lru", 2) == 1 + 0
    assert hits(trace("a", "b", "a", "c", "a", "b"), "lru", 2) == 2


def test_only_counted_requests_are_in_the_figures() -> None:
    found = trace("ab", "ab", "ab")
    assert replay(found, "lru", 80, COSTS, first=2).hit == 2 * 4
    assert replay(found, "lru", 80, COSTS, first=2).prompt == 9


def test_nothing_fits() -> None:
    for policy in simulator.policies():
        assert hits(trace("ab", "ab"), policy, 0) == 0


def best(requests: list[tuple[tuple[int, ...], ...]], room: int) -> int:
    """The most hits, by trying everything: any whole prefixes may be kept of what was there and of what has come."""
    states: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for chain in requests:
        after: dict[frozenset[tuple[int, ...]], int] = {}
        for held, hit in states.items():
            found = hit + sum(piece in held for piece in chain)
            there = held | set(chain)
            for size in range(min(room, len(there)) + 1):
                for kept in itertools.combinations(sorted(there), size):
                    state = frozenset(kept)
                    if all(piece[:-1] in state or len(piece) == 1 for piece in state):
                        after[state] = max(after.get(state, 0), found)
        states = after
    return max(states.values())


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=7), st.integers(0, 3))
@examples(60)
def test_nobody_can_hit_more_than_the_optimum_and_it_can_be_done(prompts: list[str], room: int) -> None:
    found = trace(*prompts)
    chains = [tuple(tuple(map(ord, prompt[: end + 1])) for end in range(len(prompt))) for prompt in prompts]
    assert hits(found, OPTIMUM, room) == best(chains, room)


@given(st.lists(st.text("abc", max_size=6), max_size=30), st.integers(0, 12))
@examples(60)
def test_every_policy_is_between_nothing_and_the_optimum(prompts: list[str], room: int) -> None:
    found = trace(*prompts)
    most = hits(found, OPTIMUM, room)
    for policy in simulator.policies():
        assert 0 <= hits(found, policy, room) <= most, policy


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=20))
def test_heat_is_the_decayed_sum_of_uses(times: list[float]) -> None:
    index = Index(1)
    retention = ReplayRetention("memory", index, lambda _: 1.0, "lfu")
    entry = Entry(b"a" * 32, b"b" * 32, as_tokens([1]), 0)
    index.add(entry, "memory", canonical=True)
    for now in sorted(times):
        retention.use(entry, now)
    assert entry.rank == pytest.approx(math.log2(sum(2.0 ** (now / HALF_LIFE) for now in times)))
    assert (entry.uses, entry.last) == (len(times), max(times))
    assert log2_add(1.0, 1.0) == 2.0


def test_policies_rank_by_what_their_names_say() -> None:
    reuse = ReuseModel()
    heats = {"fresh": 0.0, "hot": 10.0, "dear": 0.0}
    known = {"fresh": ReuseStats(1.0, 9.0, 1), "hot": ReuseStats(1.0, 5.0, 9), "dear": ReuseStats(1e6, 1.0, 1)}
    first = {name: min(known, key=lambda one: policy(known[one], heats[one], reuse, 10.0)) for name, policy in POLICIES.items()}
    assert first["lru"] == "dear"
    assert first["twice"] == "dear"
    assert first["lfu"] != "hot"
    assert first["gdsf"] == "fresh"
    assert first["value"] != "dear"


class Watched(simulator.SimulatedCache):
    """Looks at the cache after each request."""

    def serve(self, number: int, request: TracedRequest) -> int:
        found = super().serve(number, request)
        assert len(self._index) <= self._capacity, "over budget"
        self._index.check()
        for entry in self._index:
            assert not entry.holds
            assert entry.start == 0 or self._index.get(entry.parent) is not None, "dropped before what hangs on it"
        return found


@pytest.mark.parametrize("policy", ["value", "lru"])
def test_budget_and_order_hold_throughout(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr(simulator, "SimulatedCache", Watched)
    dice = random.Random(1)
    prompts = ["".join(dice.choices("abcd", k=dice.randint(1, 40))) for _ in range(300)]
    assert hits(trace(*prompts, step=7.0), policy, 60) > 0


SECONDS = 1800 if SLOW else 900


@pytest.fixture(scope="module")
def generated() -> tuple[Trace, int]:
    found = sample(seconds=SECONDS)
    return found, working_set(found)


def test_the_same_again(generated: tuple[Trace, int]) -> None:
    found, total = generated
    assert all(
        (one.at, one.blocks.tolist()) == (two.at, two.blocks.tolist())
        for one, two in zip(sample(seconds=SECONDS).requests, found.requests, strict=True)
    )
    assert replay(found, "value", total // 10, COSTS) == replay(found, "value", total // 10, COSTS)


@pytest.mark.parametrize("part", [0.1, pytest.param(0.25, marks=pytest.mark.slow)])
def test_the_default_policy_is_worth_it(generated: tuple[Trace, int], part: float) -> None:
    found, total = generated
    lru, ours, best = (replay(found, name, int(total * part), COSTS) for name in ("lru", "value", OPTIMUM))
    gap = closed(ours, lru, best)
    assert gap is not None
    assert gap > 0.1
    assert closed(lru, lru, lru) is None


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.05, 0.1, 0.25])
@pytest.mark.parametrize(
    "name", ["mooncake/conversation_trace.jsonl", "mooncake/synthetic_trace.jsonl", "claude-code", "miniswe"]
)
def test_recorded_traffic_is_never_much_worse_off_than_under_lru(data_dir: Path | None, name: str, part: float) -> None:
    """The held-out halves: docs/benchmarks.md has the figures."""
    if data_dir is None:
        pytest.skip("needs recorded traffic: see HEADSTART_DATA")
    place = data_dir / name
    if place.is_dir():
        sessions = sorted(place.iterdir())
        found, first = read(sessions[len(sessions) // 2 :], block_size=512 if name == "claude-code" else None), 0
    else:
        found = read([place])
        first = len(found.requests) // 2
    budget = int(working_set(found) * part)
    lru, ours, best = (replay(found, policy, budget, COSTS, first=first) for policy in ("lru", "value", OPTIMUM))
    assert 0.99 * lru.hit <= ours.hit <= best.hit
