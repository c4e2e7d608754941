"""Faults of other caches, one by one: none of them may happen under the default policy."""

from __future__ import annotations

import pytest

from headstart.core.blocks import Chain, as_tokens, root_id
from headstart.core.index import Entry, Index
from headstart.core.retention import POLICIES, Retention

GRID = 4
ROOT = root_id(b"model", "")


class Tier:
    """Pieces of one size under a budget counted in pieces."""

    def __init__(self, policy: str = "value", budget: int = 10**6) -> None:
        self.index = Index(GRID)
        self.retention = Retention("memory", self.index, lambda entry: 1.0 + entry.start / 1000, policy, 3600.0)
        self.budget = budget
        self.evicted: list[Entry] = []

    def serve(self, tokens: list[int], now: float) -> int:
        """One request: hits what is known, saves the rest; returns the tokens that were known."""
        chain = Chain(ROOT, GRID, as_tokens(tokens))
        found = self.index.match(chain, len(tokens), canonical_only=True, partial=False)
        for number, piece in enumerate(chain.ids):
            if number >= len(found.blocks):
                if len(self.index) >= self.budget:
                    self.evict()
                entry = Entry(piece, chain.parent_of(number), chain.block(number), number * GRID)
                self.index.add(entry, "memory", canonical=True)
            known = self.index.get(piece)
            assert known is not None
            self.retention.use(known, now)
        return found.tokens

    def evict(self) -> Entry:
        victim = self.retention.victim()
        assert victim is not None
        self.retention.forget(victim)
        self.index.remove(victim.id, "memory")
        self.evicted.append(victim)
        return victim


def prompt(owner: int, blocks: int) -> list[int]:
    return [owner] * (blocks * GRID)


def test_use_refreshes_recency() -> None:
    """Fetch does not refresh recency, so LRU is FIFO."""
    for policy in POLICIES:
        tier = Tier(policy)
        tier.serve(prompt(1, 1), now=0.0)
        tier.serve(prompt(2, 1), now=1.0)
        tier.serve(prompt(1, 1), now=2.0)
        assert tier.evict().tokens[0] == 2, policy


def test_hit_counts_for_ancestors() -> None:
    """The chain under a hot leaf is worth as much as the leaf: it outlives a colder chain of the same length."""
    tier = Tier()
    tier.serve(prompt(1, 3), now=0.0)
    tier.serve(prompt(2, 3), now=0.0)
    tier.serve(prompt(1, 3), now=10.0)
    assert [int(tier.evict().tokens[0]) for _ in range(3)] == [2, 2, 2]


def test_end_of_a_chain_goes_before_its_beginning() -> None:
    """Evicting the very prefix that the next look-up needs."""
    for policy in POLICIES:
        tier = Tier(policy)
        tier.serve(prompt(1, 5), now=0.0)
        assert [tier.evict().start // GRID for _ in range(5)] == [4, 3, 2, 1, 0], policy


def test_hot_shared_prefix_outlives_one_shot_giants() -> None:
    tier = Tier(budget=60)
    system = prompt(1, 8)
    for user in range(10):
        tier.serve(system + prompt(100 + user, 1), now=float(user))
    for giant in range(10):
        tier.serve(prompt(200 + giant, 50), now=100.0 + giant)
        assert tier.serve(system + prompt(300 + giant, 1), now=100.5 + giant) == len(system)
    assert tier.evicted, "the giants did not fill the tier: nothing was tested"


def test_just_written_entry_is_not_the_first_victim() -> None:
    tier = Tier()
    for owner in range(20):
        tier.serve(prompt(owner, 2), now=float(owner))
    assert tier.evict().tokens[0] == 0


def test_oversized_entry_does_not_drain_the_tier() -> None:
    """A prompt of ten times the budget comes and goes; what was used often is still there."""
    tier = Tier(budget=40)
    for now in range(5):
        tier.serve(prompt(1, 10), now=float(now))
    chain = Chain(ROOT, GRID, as_tokens(prompt(9, 400)))
    for number, piece in enumerate(chain.ids):
        entry = Entry(piece, chain.parent_of(number), chain.block(number), number * GRID)
        if len(tier.index) >= tier.budget:
            victim = tier.retention.victim()
            assert victim is not None
            if not tier.retention.outranks(entry, victim, 6.0):
                break
            tier.evict()
        tier.index.add(entry, "memory", canonical=True)
        tier.retention.use(entry, 6.0)
    assert tier.serve(prompt(1, 10), now=7.0) == 10 * GRID


@pytest.mark.parametrize("policy", POLICIES)
def test_all_pinned_means_no_victim(policy: str) -> None:
    tier = Tier(policy)
    tier.serve(prompt(1, 3), now=0.0)
    for entry in tier.index:
        entry.pins = 1
    assert tier.retention.victim() is None
    for entry in tier.index:
        entry.pins = 0
    assert tier.retention.victim() is not None


def test_heap_stays_bounded() -> None:
    """A piece used a million times must not leave a million traces."""
    tier = Tier()
    for now in range(5000):
        tier.serve(prompt(1, 2), now=float(now))
    assert len(tier.retention._heap) < 200
