"""What is learned of reuse, against a plain calculation of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.reuse import KINDS, NEVER, OCTAVES, POLICIES, Reuse, Usage, hazards, log2_add, rates

WIDTHS = [1.0] + [2.0**octave for octave in range(OCTAVES - 1)]


def used(uses: int = 1, last: float = 0.0, reply: int = -1, saved: float = 1.0) -> Usage:
    return Usage(saved, last, uses, 0.0, reply)


def best_rate(hazard: list[float], octave: int) -> float:
    """Give up at the end of each later octave in turn: hits per second of keeping, from the middle of this one."""
    found, alive, hits, seconds = 0.0, 1.0, 0.0, 0.0
    for step in range(octave, OCTAVES):
        part = 0.5 if step == octave else 1.0
        chance, width = hazard[step] * part, WIDTHS[step] * part
        hits += alive * chance
        seconds += width * (alive + alive * (1 - chance)) / 2
        alive *= 1 - chance
        found = max(found, hits / seconds)
    return found


@given(st.lists(st.floats(0.0, 0.99), min_size=OCTAVES, max_size=OCTAVES))
@settings(max_examples=50)
def test_the_rate_is_the_best_of_all_times_to_give_up(hazard: list[float]) -> None:
    found = rates(np.array([hazard]))[0]
    assert found == pytest.approx([best_rate(hazard, octave) for octave in range(OCTAVES)])


@given(st.lists(st.tuples(st.integers(0, KINDS - 1), st.integers(0, NEVER), st.integers(1, 10**6)), max_size=20))
@settings(max_examples=100)
def test_hazards_are_chances(spells: list[tuple[int, int, int]]) -> None:
    counts = np.zeros((KINDS, OCTAVES + 1))
    for kind, octave, count in spells:
        counts[kind, octave] += count
    found = hazards(counts)
    assert ((found > 0) & (found < 1)).all()


def test_many_spells_speak_for_themselves() -> None:
    """Of 100,000 spells of a kind a quarter ends in octave 6, half of the rest in octave 9, the others never."""
    counts = np.zeros((KINDS, OCTAVES + 1))
    kind = used(2, reply=100).kind
    counts[kind, 6], counts[kind, 9], counts[kind, NEVER] = 25_000, 37_500, 37_500
    found = hazards(counts)[kind]
    assert found[6] == pytest.approx(0.25, abs=0.01)
    assert found[9] == pytest.approx(0.5, abs=0.01)
    assert max(np.delete(found, [6, 9])[:10]) < 0.01
    # and the kind beside it, of which nothing is known, takes after it
    assert hazards(counts)[used(2, reply=1000).kind][9] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("seconds", "octave"), [(0, 0), (0.9, 0), (1, 1), (1.9, 1), (2, 2), (64, 7), (1e9, OCTAVES - 1), (-5, 0)]
)
def test_octaves(seconds: float, octave: int) -> None:
    assert used(last=100.0).age(100.0 + seconds) == octave


def test_kinds_part_by_uses_and_reply() -> None:
    kinds = [used(uses, reply=reply).kind for uses, reply in itertools.product((1, 2, 4, 8, 16), (-1, 0, 50, 200, 1000))]
    assert kinds == list(range(KINDS))
    assert used(10**9, reply=10**9).kind == KINDS - 1


def test_a_tier_that_has_seen_nothing_begins_as_lru() -> None:
    reuse = Reuse()
    ranks = [reuse.rate(used(last=-float(age)), 0.0) for age in (0, 1, 3, 10, 100, 10**4, 10**6)]
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == len(ranks)
    for age in (0, 5, 500):
        by_uses = [reuse.rate(used(uses, last=-float(age)), 0.0) for uses in (1, 2, 4, 8, 16)]
        assert by_uses == sorted(by_uses)


def test_what_comes_back_outranks_what_does_not() -> None:
    """Requests with long replies come back after a minute, those with short ones never: also when both are as old."""
    reuse = Reuse()
    for _ in range(3000):
        reuse.returned(used(reply=600), 60.0)
        reuse.left(used(reply=5))
    reuse.settle()
    for age in (0.0, 1.0, 20.0, 50.0):
        assert reuse.rate(used(reply=600), age) > 10 * reuse.rate(used(reply=5), age)
    assert reuse.rate(used(reply=600), 40.0) > reuse.rate(used(reply=600), 1000.0), "it is overdue"


def test_what_comes_again_after_it_has_gone_was_no_loss() -> None:
    reuse = Reuse()
    usage = used(reply=50)
    reuse.left(usage)
    assert reuse.counts[usage.kind, NEVER] == 1
    reuse.returned(usage, 10.0, gone=True)
    assert reuse.counts[usage.kind, NEVER] == 0
    assert reuse.counts[usage.kind, usage.age(10.0)] == 1


def test_old_times_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.core.reuse.MEMORY", 5000)
    reuse = Reuse()
    for _ in range(20_000):
        reuse.left(used())
    reuse.settle()
    before = reuse.rate(used(), 10.0)
    for _ in range(8000):
        reuse.returned(used(), 20.0)
    reuse.settle()
    assert reuse.counts.sum() < 7000
    assert reuse.rate(used(), 10.0) > 50 * before


def test_what_was_learned_survives_as_a_table() -> None:
    reuse = Reuse()
    for _ in range(1000):
        reuse.returned(used(), 30.0)
    again = Reuse(reuse.counts.copy())
    fresh = Reuse()
    assert again.rate(used(), 20.0) != fresh.rate(used(), 20.0)
    reuse.settle()
    assert again.rate(used(), 20.0) == reuse.rate(used(), 20.0)


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=20))
def test_heat_is_the_decayed_sum_of_uses(times: list[float]) -> None:
    first, *others = sorted(times)
    usage = Usage(1.0, first, 1, first / 50)
    for now in others:
        usage.use(now, 50.0)
    assert usage.heat == pytest.approx(math.log2(sum(2.0 ** (now / 50) for now in times)))
    assert (usage.uses, usage.last) == (len(times), max(times))
    assert log2_add(1.0, 1.0) == 2.0


def test_policies_rank_by_what_their_names_say() -> None:
    reuse = Reuse()
    fresh, hot, dear = used(last=9.0), Usage(1.0, 5.0, 9, 10.0), used(last=1.0, saved=1e6)
    first = {name: min((fresh, hot, dear), key=lambda usage: policy(usage, reuse, 10.0)) for name, policy in POLICIES.items()}
    assert first["lru"] is dear
    assert first["twice"] is dear
    assert first["lfu"] is not hot
    assert first["gdsf"] is fresh
    assert first["value"] is not dear
