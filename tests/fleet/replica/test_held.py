"""Held keys against a plain set."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from effort import examples
from headstart.fleet.replica.held import HeldKeys, by_tier
from headstart.fleet.router.reports import Tier, TierKeys

KEYS = st.sampled_from([0, 1, 5, 2**63, 2**64 - 1])
TIERS = st.sampled_from(Tier)


def pairs(tiers: TierKeys) -> set[tuple[int, Tier]]:
    assert all(tiers.values()), "an empty list of keys"
    found = [(key, tier) for tier, keys in tiers.items() for key in keys]
    assert len(set(found)) == len(found)
    return set(found)


class HeldMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.held = HeldKeys()
        self.now: set[tuple[int, Tier]] = set()
        self.drained: set[tuple[int, Tier]] = set()

    @rule(key=KEYS, tier=TIERS)
    def add(self, key: int, tier: Tier) -> None:
        self.held.add(key, tier)
        self.now.add((key, tier))

    @rule(key=KEYS, tier=TIERS)
    def remove(self, key: int, tier: Tier) -> None:
        self.held.remove(key, tier)
        self.now.discard((key, tier))

    @rule()
    def drain(self) -> None:
        removed, added = self.held.drain()
        assert pairs(removed) == self.drained - self.now
        assert pairs(added) == self.now - self.drained
        self.drained = self.now.copy()

    @invariant()
    def agree(self) -> None:
        assert pairs(by_tier(self.held.drained())) == self.drained
        assert len(self.held) == len({key for key, _ in self.now})


TestHeld = HeldMachine.TestCase
TestHeld.settings = examples(100, stateful_step_count=30)
