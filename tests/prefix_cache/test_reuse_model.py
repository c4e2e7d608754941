"""What is learned of reuse, against a plain calculation of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headstart.prefix_cache.reuse_model as reuse_module
from effort import examples
from headstart.prefix_cache.reuse_model import (
    KINDS,
    OCTAVES,
    TRAITS,
    RequestTraits,
    ReuseModel,
    ReuseStats,
    fitting,
    hazards,
    rates,
)

WIDTHS = [1.0] + [2.0**octave for octave in range(OCTAVES - 1)]


LAST = st.integers(0, OCTAVES - 1)


def used(
    uses: int = 1,
    last: float = 0.0,
    reply: int = -1,
    saved: float = 1.0,
    called: bool | None = None,
    new: int = 1,
    siblings: int = -1,
    weight: int = 1,
) -> ReuseStats:
    return ReuseStats(saved, last, uses, RequestTraits.of(weight, new=new, siblings=siblings, reply=reply, called=called))


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
@examples(50)
def test_the_rate_is_the_best_of_all_times_to_give_up(hazard: list[float]) -> None:
    found = rates(np.array([hazard]))[0]
    assert found == pytest.approx([best_rate(hazard, octave) for octave in range(OCTAVES)])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, KINDS - 1), LAST, st.integers(1, 10**6)), max_size=20))
@examples(100)
def test_hazards_are_chances(spells: list[tuple[int, int, int, int]]) -> None:
    reuse = ReuseModel()
    for row, kind, octave, count in spells:
        reuse.counts[row, kind, octave] += count
    followed = [used(uses, -float(2**uses), weight=uses) for uses in range(1, 9)]
    reuse.learn(followed, 0.0)
    ended = reuse.counts[0]
    lasted = so_far(reuse, *((one.kind, one.age(0.0), one.request_traits.weight) for one in followed))
    assert np.allclose(reuse._lasted, lasted, rtol=1e-9, atol=1e-6)
    found = hazards(ended, lasted, TRAITS, reuse._fit)
    assert ((found > 0) & (found < 1)).all()


def so_far(reuse: ReuseModel, *followed: tuple[int, int, float]) -> np.ndarray:
    """How many spells came to each octave, counted one by one; those whose end is not known are half through their last."""
    lasted = np.zeros((KINDS, OCTAVES))
    ends = [(*place, reuse.counts[*place]) for place in np.argwhere(reuse.counts)]
    ends += [(1, *one) for one in followed]
    for unknown, kind, octave, count in ends:
        lasted[kind, :octave] += count
        lasted[kind, octave] += count / 2 if unknown else count
    return lasted


def test_the_fit_is_the_most_likely() -> None:
    """Against the gradient of the likelihood with its ridge, by differences."""
    dice = np.random.default_rng(1)
    ended = np.zeros((KINDS, OCTAVES))
    for kind in dice.integers(0, KINDS, 40):
        ended[kind] = dice.integers(0, 30, OCTAVES)
    lasted = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] + 5.0 * (ended.sum(axis=1, keepdims=True) > 0)
    usual = ReuseModel()._fit
    ridge = np.array([reuse_module._RIDGE_OCTAVE] * OCTAVES + [reuse_module._RIDGE_TRAIT] * (len(usual) - OCTAVES))
    found = usual
    for _ in range(5):
        *_, found = fitting(ended, lasted, TRAITS, found)

    def likely(weights: np.ndarray) -> float:
        chance = hazards(np.zeros_like(ended), np.zeros_like(ended), TRAITS, weights)
        told = ended * np.log(chance) + (lasted - ended) * np.log(1 - chance)
        return float(told.sum() - (ridge * (weights - usual) ** 2).sum() / 2)

    best = likely(found)
    for place in range(len(found)):
        for step in (-0.01, 0.01):
            other = found.copy()
            other[place] += step
            assert likely(other) < best


def test_many_spells_speak_for_themselves() -> None:
    """Of 100,000 spells of a kind a quarter ends in octave 6, half of the rest in octave 9, the others never."""
    reuse = ReuseModel()
    kind = used(2, reply=100).kind
    reuse.counts[0, kind, [6, 9]] = 25_000, 37_500
    reuse.counts[1, kind, OCTAVES - 1] = 37_500
    reuse.learn((), 0.0)
    found = hazards(reuse.counts[0], so_far(reuse), TRAITS, reuse._fit)
    assert found[kind, 6] == pytest.approx(0.25, abs=0.01)
    assert found[kind, 9] == pytest.approx(0.5, abs=0.01)
    assert max(np.delete(found[kind], [6, 9])[:10]) < 0.01
    # and a kind of which nothing is known takes after it
    other = found[used(2, reply=1000).kind]
    assert other.argmax() == 9
    assert other[9] > 5 * other[8]


def test_traits_add_up() -> None:
    """Of requests with long replies, and of those that bring little, many come back. One that is both was never seen."""
    reuse = ReuseModel()
    for reply, new, returns in ((600, 4000, 300), (600, 9000, 250), (5, 100, 300), (5, 9000, 10), (5, 4000, 30)):
        for number in range(1000):
            stats = used(reply=reply, new=new)
            (reuse.returned if number < returns else reuse.lost)(stats, 60.0)
    reuse.learn((), 0.0)
    assert reuse.rate(used(reply=600, new=100), 10.0) > 1.5 * reuse.rate(used(reply=5, new=100), 10.0)
    assert reuse.rate(used(reply=600, new=100), 10.0) > 1.5 * reuse.rate(used(reply=600, new=4000), 10.0)


@pytest.mark.parametrize(
    ("seconds", "octave"), [(0, 0), (0.9, 0), (1, 1), (1.9, 1), (2, 2), (64, 7), (1e9, OCTAVES - 1), (-5, 0)]
)
def test_octaves(seconds: float, octave: int) -> None:
    assert used(last=100.0).age(100.0 + seconds) == octave


def test_kinds_part_by_uses_and_what_is_known_of_the_request() -> None:
    traits = itertools.product(
        (1, 2, 4, 8, 16), (-1, 0, 50, 200, 1000), (None, True, False), (512, 513, 3000, 9000), (-1, 0, 2, 3)
    )
    kinds = [used(one, reply=two, called=three, new=four, siblings=five).kind for one, two, three, four, five in traits]
    assert kinds == list(range(KINDS))
    assert used(10**9, reply=10**9, called=False, new=10**9, siblings=10**9).kind == KINDS - 1
    assert RequestTraits.of(20, new=1, siblings=0, reply=1).weight == 0.05
    assert RequestTraits.of(0, new=1, siblings=0, reply=1).weight == 1


def test_a_tier_that_has_seen_nothing_begins_as_lru() -> None:
    reuse = ReuseModel()
    ranks = [reuse.rate(used(last=-float(age)), 0.0) for age in (0, 1, 3, 3.5, 10, 100, 10**4, 10**6, 10**8)]
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == len(ranks)
    for age in (0, 5, 500):
        by_uses = [reuse.rate(used(uses, last=-float(age)), 0.0) for uses in (1, 2, 4, 8, 16)]
        assert by_uses == sorted(by_uses)


def test_rates_have_no_steps() -> None:
    """What is a little older is worth about as much: none goes for the other's sake at the end of an octave."""
    reuse = ReuseModel()
    for seconds in (0.5, 20.0, 20.0, 300.0):
        for _ in range(50):
            reuse.returned(used(), seconds)
    reuse.learn([used(last=-5000.0)] * 100, 0.0)
    for end in (math.sqrt(0.5), 0.75, *(math.sqrt(0.5) * 2.0**octave for octave in range(1, OCTAVES)), *WIDTHS):
        near = 1e-3 * reuse.rate(used(), end / 2)
        assert reuse.rate(used(), end * 1.00001) == pytest.approx(reuse.rate(used(), end * 0.99999), abs=near)


def test_before_it_has_learned_nothing_counts() -> None:
    reuse, fresh = ReuseModel(), ReuseModel()
    for _ in range(20):
        reuse.returned(used(), 30.0)
    assert reuse.rate(used(), 20.0) == fresh.rate(used(), 20.0)


def test_what_comes_back_outranks_what_does_not() -> None:
    """Requests with long replies come back after a minute, those with short ones never: also when both are as old."""
    reuse = ReuseModel()
    gone = [used(reply=5, last=-10_000.0) for _ in range(3000)]
    for _ in range(3000):
        reuse.returned(used(reply=600), 60.0)
    reuse.learn(gone, 0.0)
    for age in (0.0, 1.0, 20.0, 50.0):
        assert reuse.rate(used(reply=600), age) > 10 * reuse.rate(used(reply=5), age)
    assert reuse.rate(used(reply=600), 40.0) > reuse.rate(used(reply=600), 1000.0), "it is overdue"


def test_a_spell_that_goes_on_says_so_far_and_no_more() -> None:
    """Half come back after two minutes. Those that left a moment ago take nothing from that; those of an hour ago do."""
    rates = []
    for since in (1.0, 3600.0):
        reuse = ReuseModel()
        for _ in range(500):
            reuse.returned(used(), 120.0)
        reuse.learn([used(last=-since)] * 500, 0.0)
        rates.append(reuse.rate(used(), 60.0))
    assert rates[0] > 1.5 * rates[1]


def test_all_pieces_of_a_request_count_for_one() -> None:
    """One request of a thousand entries that comes back does not outweigh ten of one entry each that do not."""
    reuse = ReuseModel()
    request_traits = RequestTraits.of(1000, new=1, siblings=0, reply=1)
    for _ in range(1000):
        reuse.returned(ReuseStats(1.0, 0.0, 1, request_traits), 60.0)
    single = RequestTraits.of(1, new=1, siblings=0, reply=1)
    for _ in range(100):
        reuse.lost(ReuseStats(1.0, 0.0, 1, single), 3600.0)
    assert reuse.counts[0].sum() == pytest.approx(1.0)
    assert reuse.counts[1].sum() == 100
    reuse.learn((), 0.0)
    fresh = ReuseModel()
    assert reuse.rate(ReuseStats(1.0, 0.0, 1, request_traits), 40.0) < fresh.rate(ReuseStats(1.0, 0.0, 1, request_traits), 40.0)


def test_old_times_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.prefix_cache.reuse_model.MEMORY", 5000)
    reuse = ReuseModel()
    for _ in range(20_000):
        reuse.lost(used(), 1000.0)
    reuse.learn((), 0.0)
    before = reuse.rate(used(), 10.0)
    for _ in range(8000):
        reuse.returned(used(), 20.0)
    reuse.learn((), 0.0)
    assert reuse.counts.sum() < 7000
    assert reuse.rate(used(), 10.0) > 10 * before


def test_it_is_time_to_learn_when_a_sixteenth_has_been_added() -> None:
    reuse, learned = ReuseModel(), []
    for event in range(1, 1000):
        reuse.left()
        if reuse.due:
            reuse.learn((), 0.0)
            learned.append(event)
    assert learned[0] == 65
    assert all(after > before + 64 for before, after in itertools.pairwise(learned))
