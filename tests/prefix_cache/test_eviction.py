"""Retention: faults of other caches, one by one, none of which may happen under the default policy; and against a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from effort import examples
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.prefix_cache.blocks import Chain, checkpoint_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.eviction import ASIDE, AT_ONCE, HAND, PAUSE, TRIES, Retention
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST, RequestTraits, ReuseHistory, ReuseModel, ReuseStats
from headstart.prefix_cache.reuse_sample import SAMPLE, ReuseSample
from headstart.replay import HALF_LIFE, POLICIES, ReplayRetention
from small_blocks import BLOCK_SIZE, ROOT, TOKENS, entries_of


def retention_of(policy: str, index: Index, saved_per_byte: Callable[[Entry], float]) -> Retention:
    """What a tier has for `value`; what replays have for other policies."""
    if policy == "value":
        return Retention("memory", index, saved_per_byte)
    return ReplayRetention("memory", index, saved_per_byte, policy)


class Tier:
    """Entries of one size under a budget counted in entries."""

    def __init__(self, policy: str = "value", budget: int = 10**6) -> None:
        self.index = Index(BLOCK_SIZE)
        self.retention = retention_of(policy, self.index, lambda entry: 1.0 + entry.start / 1000)
        self.budget = budget
        self.evicted: list[Entry] = []

    def serve(self, tokens: list[int], now: float) -> int:
        """One request: hits what is known, saves the rest; returns the tokens that were known."""
        chain = Chain(ROOT, BLOCK_SIZE, as_tokens(tokens))
        found = self.index.match(chain, len(tokens), canonical_only=True, partial=False)
        for number, key in enumerate(chain.ids):
            if number >= len(found.blocks):
                if len(self.index) >= self.budget:
                    self.evict()
                entry = Entry(key, chain.parent_of(number), chain.block(number), number * BLOCK_SIZE)
                self.index.add(entry, "memory", canonical=True)
            known = self.index.get(key)
            assert known is not None
            self.retention.use(known, now)
        return found.tokens

    def replied(self, tokens: list[int], reply: int) -> None:
        ids = Chain(ROOT, BLOCK_SIZE, as_tokens(tokens)).ids
        self.retention.replied(ids, RequestTraits.of(len(ids), new=1, siblings=0, reply=reply))

    def evict(self) -> Entry:
        victim = self.retention.victim()
        assert victim is not None
        self.retention.forget(victim)
        self.index.remove(victim.id, "memory")
        self.evicted.append(victim)
        return victim


def prompt(owner: int, blocks: int) -> list[int]:
    return [owner] * (blocks * BLOCK_SIZE)


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
        assert [tier.evict().start // BLOCK_SIZE for _ in range(5)] == [4, 3, 2, 1, 0], policy


def test_hot_shared_prefix_outlives_one_shot_giants() -> None:
    tier = Tier(budget=60)
    system = prompt(1, 8)
    for user in range(10):
        tier.serve(system + prompt(100 + user, 1), now=float(user))
    for giant in range(10):
        tier.serve(prompt(200 + giant, 50), now=100.0 + giant)
        assert tier.serve(system + prompt(300 + giant, 1), now=100.5 + giant) == len(system)
    assert tier.evicted, "the giants did not fill the tier: nothing was tested"


def test_daily_prefix_outlives_one_shot_giants() -> None:
    """A prefix used once a day, among 24 giants a day that do not fit beside each other. LRU never has it."""
    known = {}
    for policy in ("value", "lru"):
        tier, system = Tier(policy, budget=60), prompt(1, 8)
        for hour in range(10 * 24):
            if hour % 24 == 9:
                known[policy] = tier.serve(system + prompt(100 + hour, 1), now=hour * 3600.0)
            tier.serve(prompt(1000 + hour, 40), now=hour * 3600.0 + 1800)
    assert known == {"value": len(system), "lru": 0}


def test_a_fresh_conversation_is_not_the_first_victim() -> None:
    """In a tier whose conversations come back after a minute or two, the newest is not given up for the oldest."""
    tier = Tier(budget=100)
    for number in range(400):
        tier.serve(prompt(number, 4), now=number * 10.0)
        if number >= 12:
            tier.serve(prompt(number - 12, 5), now=number * 10.0 + 1)
    last = len(tier.evicted)
    tier.serve(prompt(1000, 8), now=4005.0)
    assert len(tier.evicted) > last
    gone = [int(entry.tokens[0]) for entry in tier.evicted[last:]]
    assert gone[0] not in (1000, 399)
    assert 399 not in gone


def test_replies_tell_who_comes_back() -> None:
    """Chats (long replies) go on after half a minute; what got a short reply never does. Of two as old, the chat stays."""
    tier = Tier(budget=400)
    for number in range(300):
        now = number * 30.0
        for owner, blocks in ((number, 3), (number - 1, 4)):
            tier.serve(prompt(owner, blocks), now)
            tier.replied(prompt(owner, blocks), 500)
        tier.serve(prompt(10_000 + number, 3), now)
        tier.replied(prompt(10_000 + number, 3), 4)
    for owner, reply in ((20_000, 500), (30_000, 4)):
        tier.serve(prompt(owner, 3), 9000.0)
        tier.replied(prompt(owner, 3), reply)
    gone: list[int] = []
    while not {20_000, 30_000} & {*gone}:
        gone.append(int(tier.evict().tokens[0]))
    assert 30_000 in gone


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
    chain = Chain(ROOT, BLOCK_SIZE, as_tokens(prompt(9, 400)))
    for number, key in enumerate(chain.ids):
        entry = Entry(key, chain.parent_of(number), chain.block(number), number * BLOCK_SIZE)
        if len(tier.index) >= tier.budget:
            victim = tier.retention.victim()
            assert victim is not None
            if not tier.retention.outranks(entry, victim, 5.0):
                break
            tier.evict()
        tier.index.add(entry, "memory", canonical=True)
        tier.retention.use(entry, 5.0)
    assert tier.serve(prompt(1, 10), now=5.5) == 10 * BLOCK_SIZE


@pytest.mark.parametrize("policy", POLICIES)
def test_all_pinned_means_no_victim(policy: str) -> None:
    tier = Tier(policy)
    tier.serve(prompt(1, 3), now=0.0)
    for entry in tier.index:
        entry.holds = 1
    assert tier.retention.victim() is None
    for entry in tier.index:
        entry.holds = 0
    assert tier.retention.victim() is not None


def test_a_use_leaves_no_trace_in_the_order() -> None:
    """An entry used a million times must not leave a million traces."""
    tier = Tier()
    for now in range(500):
        tier.serve(prompt(1, 2), now=float(now))
    assert len(tier.retention._order) == len(tier.retention._order._order) == 1
    tier.retention._order._order.check()


LEARNING = 16
"""Most steps of learning with few kinds of requests."""


class Ranks:
    """Counts the ranks that a tier computes, and remembers when each was computed last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tier: Tier) -> None:
        self.count = 0
        self.at: dict[BlockId, float] = {}
        value = tier.retention._value

        def counted(key: BlockId, stats: ReuseHistory, now: float) -> float:
            self.count += 1
            self.at[key] = now
            return value(key, stats, now)

        monkeypatch.setattr(tier.retention, "_value", counted)


def full(leaves: int) -> Tier:
    """A tier of as many conversations of one block, each used at another time."""
    tier = Tier()
    for number in range(leaves):
        tier.serve(prompt(number, 1), now=number / 10)
    return tier


def oldest_first(tier: Tier) -> list[Entry]:
    """All entries, in the order of their last use."""
    return sorted(tier.index, key=lambda entry: tier.retention.last_use(entry.id) or 0.0)


@pytest.mark.parametrize("leaves", [1500, 10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_look_for_a_victim_computes_few_ranks(monkeypatch: pytest.MonkeyPatch, leaves: int) -> None:
    """As many in a large tier as in a small one, though all ranks are old; and the model learns from as few entries."""
    tier = full(leaves)
    followed: list[int] = []
    learning = ReuseModel.learning

    def counted(model: ReuseModel, stats: Iterable[ReuseHistory], *rest: Any) -> Iterator[None]:
        followed.append(0)

        def each() -> Iterator[ReuseHistory]:
            for one in stats:
                followed[-1] += 1
                yield one

        return learning(model, each(), *rest)

    monkeypatch.setattr(ReuseModel, "learning", counted)
    for number in range(65):  # so that learning is due
        tier.serve(prompt(number, 1), now=leaves / 10)
    ranks = Ranks(monkeypatch, tier)
    most = 0
    for number in range(80):
        tier.serve(prompt(leaves + number, 1), now=leaves / 10 + 100.0 * number)
        before = ranks.count
        tier.evict()
        most = max(most, ranks.count - before)
    assert HAND <= most <= HAND + TRIES
    assert followed
    assert min(leaves, SAMPLE) / 4 < max(followed) <= SAMPLE


@pytest.mark.parametrize("leaves", [20, 1500])
def test_no_rank_is_older_than_two_rounds(monkeypatch: pytest.MonkeyPatch, leaves: int) -> None:
    """While conversations come and go: a round takes as many looks as its leaves, by `HAND`, and those in which it learns. It
    sees a leaf twice that rises, as most do after learning. A leaf may be near the beginning of one round, and near the end of
    the next.
    """
    tier = full(leaves)
    ranks = Ranks(monkeypatch, tier)
    looks, learned = 1 if leaves <= AT_ONCE else -(-leaves // HAND), tier.retention._reuse._fit
    looks = 2 * (2 * looks + 1 + LEARNING)
    times = []
    for number in range(max(100, 2 * leaves)):
        times.append(leaves / 10 + 2.0 * number)
        tier.serve(prompt(leaves + number, 1), times[-1])
        tier.evict()
        assert len(tier.retention._order) == leaves
        if number > looks:
            assert min(ranks.at[entry.id] for entry in tier.retention._order) >= times[-looks - 1]
    assert tier.retention._reuse._fit is not learned


@pytest.mark.parametrize(("leaves", "moves"), [(1500, [1, 1, 2]), (AT_ONCE // 2, None)])
def test_the_victims_of_a_moment_share_a_move_of_the_hand(
    monkeypatch: pytest.MonkeyPatch, leaves: int, moves: list[int] | None
) -> None:
    """A long prompt evicts many entries in a few calls. A small tier is ranked at once, so its hand need not wait."""
    tier = full(leaves)
    moved: list[float] = []
    move = tier.retention._move_hand

    def counted() -> None:
        moved.append(tier.retention._now)
        move()

    monkeypatch.setattr(tier.retention, "_move_hand", counted)
    found = []
    for number in range(3):
        tier.serve(prompt(leaves + number, 1), now=leaves + number * 0.6 * PAUSE)
        for _ in range(10):
            tier.evict()
        found.append(len(moved))
    assert found == (moves or [found[0]] * 3)
    assert moves or found[0] >= 1


def test_what_is_pinned_in_front_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand pinned conversations go first. They are passed over once, and go when they are no longer pinned."""
    tier = full(1100)
    held = oldest_first(tier)
    for entry in held[:1000]:
        entry.holds += 1
    assert tier.evict() is held[1000]
    asked = []
    may_go = tier.retention._may_go
    monkeypatch.setattr(tier.retention, "_may_go", lambda entry: asked.append(entry) or may_go(entry))
    assert tier.evict() is held[1001]
    assert len(asked) <= HAND + ASIDE + 1
    held[500].holds -= 1
    gone = [tier.evict() for _ in range(1000 // ASIDE + 1)]
    assert held[500] in gone
    held[300].holds -= 1
    while len(tier.index) > 998:
        gone.append(tier.evict())
    assert held[300] in gone, "nothing else can go"
    assert tier.retention.victim() is None


def test_an_owner_above_its_quota_goes_first() -> None:
    index = Index(BLOCK_SIZE)
    retention = Retention("memory", index, lambda _: 1.0)
    for number in range(200):
        (entry,) = entries_of(prompt(number, 1))
        entry.owner = b"many" if number % 10 == 9 else b"%d" % number
        index.add(entry, "memory", canonical=True)
        retention.use(entry, float(number))
    entries = sorted(index, key=lambda entry: entry.last)
    for entry in entries[9::10]:
        assert retention.soon(3, (b"many",))[0] is entry
        assert retention.victim((b"many",)) is entry
        retention.forget(entry)
        index.remove(entry.id, "memory")
    assert retention.victim((b"many",)) is entries[0]
    assert retention.soon(3, (b"many",)) == entries[:3]
    assert b"many" not in (retention._order._own or {})


def test_a_sample_of_everything_is_everything() -> None:
    """Up to the size of the sample, the model learns from all entries and ghosts."""
    tier = Tier(budget=60)
    for number in range(300):
        tier.serve(prompt(number % 90, 2), now=10.0 * number)
    retention = tier.retention
    assert retention._ghosts
    assert len(retention) + len(retention._ghosts) < SAMPLE
    one, other = ReuseModel(), ReuseModel()
    for model in (one, other):
        model.counts = retention._reuse.counts
    one.learn([*tier.index, *(stats for _, stats in retention._ghosts.items())], 5000.0)
    sample, weight = retention._sample.drawn(len(retention), len(retention._ghosts))
    for _ in other.learning(sample, 5000.0, weight, retention._ghosts.sampled(weight)):
        pass
    assert np.allclose(one._fit, other._fit)
    assert one._rates.keys() == other._rates.keys()


def test_the_sample_stands_for_all() -> None:
    """Of 100,000 statistics, a tenth were used twice; so was a tenth of the sample. It grows after most are gone."""
    everything: dict[bytes, ReuseStats] = {}
    sample = ReuseSample(everything.items)
    for number in range(100_000):
        key, stats = sha256(b"%d" % number).digest(), ReuseStats(1.0, 0.0, 2 if number % 10 == 0 else 1)
        everything[key] = stats
        if len(everything) > SAMPLE:
            sample.put(key, stats)
        elif number == SAMPLE // 2:
            drawn, weight = sample.drawn(len(everything), 0)
            assert {*map(id, drawn)} == {*map(id, everything.values())}
            assert (weight, len(sample)) == (1, 0)
            drawn, weight = sample.drawn(len(everything), 3 * SAMPLE)
            assert weight == 4
            assert len(list(drawn)) * weight == pytest.approx(len(everything), rel=0.05)
    drawn, weight = sample.drawn(len(everything), 0)
    found = list(drawn)
    assert (len(found), weight) == (len(sample), sample.weight)
    assert SAMPLE / 2 < len(found) <= SAMPLE
    assert len(found) * weight == pytest.approx(100_000, rel=0.05)
    assert sum(stats.uses == 2 for stats in found) / len(found) == pytest.approx(0.1, abs=0.02)
    for left, weight in ((SAMPLE + 100, 2), (3000, 1)):
        for key in list(everything)[left:]:
            del everything[key]
            sample.discard(key)
        drawn, each = sample.drawn(left, 0)
        assert each == sample.weight == weight
        assert len(list(drawn)) * weight == pytest.approx(left, rel=0.05)
    assert not len(sample), "it is small again"


def test_what_was_seen_is_told_from_what_is_new() -> None:
    """Also of entries that have gone since, or were refused; and how many others went on behind the last of them."""
    tier = Tier()

    def seen(tokens: list[int]) -> tuple[int, int]:
        return tier.retention.seen(Chain(ROOT, BLOCK_SIZE, as_tokens(tokens)).ids)

    one, other, third = (prompt(1, 2) + prompt(after, 2) for after in (2, 3, 4))
    assert seen(one) == (0, -1)
    tier.serve(one, 0.0)
    assert seen(one) == (4, 0)
    assert seen(one + prompt(5, 1)) == (4, 0)
    assert seen(other) == (2, 1)
    tier.serve(other, 1.0)
    tier.serve(one, 2.0)
    assert seen(third) == (2, 2)
    while len(tier.index):
        tier.evict()
    assert seen(one) == (4, 0)
    assert seen(third) == (2, 2)
    chain = Chain(ROOT, BLOCK_SIZE, as_tokens(third))
    for number in (2, 3):
        tier.retention.refuse(Entry(chain.ids[number], chain.parent_of(number), chain.block(number), number * BLOCK_SIZE), 3.0)
    assert seen(third) == (4, 0)
    assert seen(prompt(1, 2)) == (2, 3)
    state = Entry(checkpoint_id(chain.ids[3]), chain.ids[3], chain.block(3), 3 * BLOCK_SIZE, state=True)
    tail = Entry(b"t" * 32, chain.ids[3], chain.block(0)[:1], 4 * BLOCK_SIZE)
    for entry in (state, tail):  # neither goes on with other tokens
        tier.retention.refuse(entry, 4.0)
    assert seen(third) == (4, 0)


def test_there_are_ghosts_for_a_large_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.prefix_cache.eviction.GHOSTS", 4)
    tier = Tier(budget=20)
    for owner in range(200):
        tier.serve(prompt(owner, 1), float(owner))
    assert len(tier.retention._ghosts) == 9
    assert tier.retention._reuse.counts[1].sum() == pytest.approx((180 - 9) * UNKNOWN_REQUEST.weight), (
        "that they did not come again"
    )
    assert len(list(tier.retention._sample.drawn(20, 9)[0])) == 20
    while len(tier.index):
        tier.evict()
    assert len(tier.retention._ghosts) == 4


TINY = 1e-9


class RetentionMachine(RuleBasedStateMachine):
    """One tier under retention, beside a second tier that retention must not look at."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.policy = policy
        self.now = 0.0
        self.index = Index(BLOCK_SIZE)
        self.retention = retention_of(policy, self.index, self.saved)
        self.uses: dict[BlockId, list[float]] = {}
        self.abouts: dict[BlockId, RequestTraits] = {}
        self.ghosts: dict[BlockId, list[float]] = {}

    @staticmethod
    def saved(entry: Entry) -> float:
        return 1.0 + entry.start / BLOCK_SIZE + len(entry.tokens)

    def rank(self, entry: Entry) -> float:
        uses = self.uses[entry.id]
        heat = math.log2(sum(2.0 ** (at / HALF_LIFE) for at in uses))
        stats = ReuseStats(self.saved(entry), uses[-1], len(uses), self.abouts.get(entry.id, UNKNOWN_REQUEST))
        # What was learned is the tier's own (its arithmetic: test_reuse_model); which uses it is asked about is not.
        return POLICIES[self.policy](stats, heat, self.retention._reuse, self.now)

    def known(self, key: BlockId) -> Entry:
        entry = self.index.get(key)
        assert entry is not None
        return entry

    def evictable(self) -> list[Entry]:
        held = [self.known(key) for key in self.uses]
        parents = {entry.parent for entry in held}
        return [entry for entry in held if entry.id not in parents and not entry.holds]

    @rule(tokens=TOKENS, wait=st.just(0.0) | st.floats(1, 300), shadow=st.booleans())
    def use_chain(self, tokens: list[int], wait: float, shadow: bool) -> None:
        """A conversation is saved or hit: the entries of its chain, ancestors first."""
        self.now += wait
        for entry in entries_of(tokens):
            self.index.add(entry, "memory", canonical=True)
            if shadow:
                self.index.add(entry, "disk", canonical=True)
            self.retention.use(self.known(entry.id), self.now)
            self.uses.setdefault(entry.id, self.ghosts.pop(entry.id, [])).append(self.now)

    @rule(tokens=TOKENS, reply=st.integers(0, 1000))
    def replied(self, tokens: list[int], reply: int) -> None:
        keys = [entry.id for entry in entries_of(tokens)]
        request_traits = RequestTraits.of(len(keys), new=reply, siblings=reply % 4, reply=reply)
        self.retention.replied(keys, request_traits)
        self.abouts |= {key: request_traits for key in keys if key in self.uses}

    @rule(tokens=TOKENS)
    def refuse(self, tokens: list[int]) -> None:
        """An entry is not let in; its use counts when it comes again."""
        entry = entries_of(tokens)[-1]
        if entry.id not in self.uses:
            self.retention.refuse(entry, self.now)
            self.ghosts.setdefault(entry.id, []).append(self.now)
            self.abouts.pop(entry.id, None)

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), pins=st.integers(0, 2))
    def pin(self, data: st.DataObject, pins: int) -> None:
        self.known(data.draw(st.sampled_from(sorted(self.uses)))).holds = pins

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        for _ in range(count):
            eligible = self.evictable()
            victim = self.retention.victim()
            if not eligible:
                assert victim is None
                return
            assert victim in eligible, "pinned, or something hangs on it"
            lowest = min(self.rank(entry) for entry in eligible)
            assert math.isclose(self.rank(victim), lowest, abs_tol=TINY)
            self.retention.forget(victim)
            self.index.remove(victim.id, "memory")
            self.ghosts[victim.id] = self.uses.pop(victim.id)

    @rule(tokens=TOKENS)
    def outranks(self, tokens: list[int]) -> None:
        eligible = self.evictable()
        newcomer = entries_of(tokens)[-1]
        if not eligible or newcomer.id in self.uses:
            return
        request_traits = RequestTraits.of(1, new=1000, siblings=0, reply=len(tokens))
        was = self.abouts.get(newcomer.id)
        self.uses[newcomer.id], self.abouts[newcomer.id] = [*self.ghosts.get(newcomer.id, []), self.now], request_traits
        mine = self.rank(newcomer)
        del self.uses[newcomer.id], self.abouts[newcomer.id]
        if was is not None:
            self.abouts[newcomer.id] = was
        for victim in eligible:
            if not math.isclose(mine, self.rank(victim), abs_tol=TINY):
                assert self.retention.outranks(newcomer, victim, self.now, request_traits) == (mine > self.rank(victim))

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "uses"):
            self.index.check()
            assert len(self.retention) == len(self.uses)
            victim = self.retention.victim()
            assert victim == self.retention.victim(), "asking changes nothing"


TestRetention = RetentionMachine.TestCase
TestRetention.settings = examples(100, stateful_step_count=40)
