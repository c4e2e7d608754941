"""Holdings against a dictionary of sets."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.router.chains import PromptChain, checkpoint_key
from headstart.fleet.router.holdings import Column, Holdings
from headstart.fleet.router.reports import BlockKey, Tier

COLUMNS = 3
KEYS = st.integers(0, 15)  # odd ones are checkpoints
CHANGE = st.tuples(
    st.integers(0, COLUMNS - 1), st.sampled_from(["add", "remove", "replace", "clear"]), st.sampled_from(Tier), st.lists(KEYS)
)
Truth = defaultdict[tuple[Column, BlockKey], set[Tier]]


def apply(holdings: Holdings, truth: Truth, change: tuple[Column, str, Tier, list[BlockKey]]) -> None:
    column, what, tier, keys = change
    if what == "add":
        holdings.change(column, {}, {tier: keys})
    elif what == "remove":
        holdings.change(column, {tier: keys}, {})
    elif what == "replace":
        holdings.replace(column, {tier: keys})
    else:
        holdings.clear(column)
    for key in range(16) if what in ("replace", "clear") else ():
        truth[column, key] &= {Tier.COMING} if what == "replace" else set()
    for key in keys if what != "clear" else ():
        truth[column, key] = truth[column, key] - {tier} if what == "remove" else truth[column, key] | {tier}


def best(truth: Truth, column: Column, key: BlockKey, *, shared: bool) -> Tier | None:
    """The cheapest tier from which a column has a key. A rumour of one column is good for all."""
    own = truth[column, key] - {Tier.SHARED}
    said = shared and any(Tier.SHARED in truth[other, key] for other in range(COLUMNS))
    return min(own) if own else Tier.SHARED if said else None


def reach(truth: Truth, column: Column, chain: PromptChain, *, shared: bool) -> tuple[int, Counter[Tier]]:
    """How many blocks a column can reuse, and from where. Block by block."""
    length, usable, found = 0, (0, Counter[Tier]()), Counter[Tier]()
    for key in chain.keys:
        tier = best(truth, column, key, shared=shared)
        if tier is None:
            break
        length, found = length + 1, found + Counter([tier])
        if not chain.stateful or best(truth, column, checkpoint_key(key), shared=shared) is not None:
            usable = length, found
    return usable


@given(st.lists(CHANGE, max_size=25), st.lists(st.sampled_from(range(0, 16, 2)), unique=True), st.booleans())
@examples(800)
def test_reach_is_what_a_walk_over_each_replica_finds(
    changes: list[tuple[Column, str, Tier, list[BlockKey]]], keys: list[BlockKey], stateful: bool
) -> None:
    holdings, truth = Holdings(), Truth(set)
    for _ in range(COLUMNS):
        holdings.grow()
    for change in changes:
        apply(holdings, truth, change)
    chain = PromptChain(keys, 8 * len(keys) + 1, 8, stateful)
    found = holdings.reach(chain)
    for column in range(COLUMNS):
        assert found.own[column] == reach(truth, column, chain, shared=False)[0]
        whole, tiers = reach(truth, column, chain, shared=True)
        assert found.all[column] == whole
        assert {tier: int(found.tiers[tier, column]) for tier in Tier} == {tier: tiers[tier] for tier in Tier}
        for key in range(16):
            assert holdings.tiers(column, key) == truth[column, key]
        assert holdings.held(column) == sum(bool(truth[column, key]) for key in range(16))
    assert len(holdings) == len({key for (_, key), tiers in truth.items() if tiers})


def test_equal_copies_are_one_object_and_unused_ones_are_freed() -> None:
    holdings = Holdings()
    columns = [holdings.grow() for _ in range(50)]
    for column in columns:
        holdings.change(column, {}, {Tier.MEMORY: range(0, 2000, 2)})
    gc.collect()
    assert len(holdings._same) == 1
    for column in columns:
        holdings.change(column, {Tier.MEMORY: range(0, 2000, 2)}, {})
    gc.collect()
    assert len(holdings) == len(holdings._same) == 0


def test_the_log_of_a_column_is_bounded_by_what_it_holds() -> None:
    holdings = Holdings()
    column = holdings.grow()
    for start in range(0, 100_000, 100):
        keys = np.arange(start, start + 100).tolist()
        holdings.change(column, {}, {Tier.MEMORY: keys})
        holdings.change(column, {Tier.MEMORY: keys[10:]}, {})
    assert holdings.held(column) == 10_000
    assert len(holdings._logs[column]) < 25_000
    holdings.clear(column)
    assert len(holdings) == holdings.held(column) == 0
