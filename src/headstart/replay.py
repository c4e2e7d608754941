"""Replay: what a trace would have found in a cache of some size, with each policy and at best.

The cache is the real one, without KV: `prefix_cache/blocks.Chain` computes ids, `prefix_cache/index.Index` matches them, and
`prefix_cache/eviction.Retention` decides what to evict. Eviction happens before admission, children are evicted before their
parents, and a hit counts for all ancestors. The blocks of a running request are pinned. Each block is one token of the
simulation, so all blocks have the same size and cost, and hits are counted in blocks.

A trace has no blocks of replies. So the tokens of a reply count as computed when they return in a prompt, for every policy
alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST, RequestTraits, ReuseHistory, ReuseModel, ReuseStats
from headstart.traces import Trace, TracedRequest

OPTIMUM = "optimum"
_TIER = "memory"
_ROOT = root_id(b"replay", "")
HALF_LIFE = 60.0
"""Seconds in which the weight of a use halves, for policies that count uses."""


@dataclass(frozen=True, slots=True)
class ReplayCosts:
    """The costs of a token: seconds of prefill, and bytes of storage."""

    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of one policy with a trace, in tokens. Requests before the first counted one are not included.

    Attributes:
        budget: tokens that fit.
        prompt: tokens of all prompts.
        hit: tokens of prompts that the cache had.
        seconds: seconds of prefill that the hits saved.
    """

    policy: str
    budget: int
    prompt: int
    hit: int
    seconds: float

    @property
    def computed(self) -> int:
        return self.prompt - self.hit


def working_set(trace: Trace) -> int:
    """Tokens of all different blocks."""
    known: set[bytes] = set()
    for request in trace.requests:
        known.update(chain_of(request).ids)
    return len(known) * trace.block_size


def log2_add(a: float, b: float) -> float:
    """log2(2^a + 2^b)."""
    high, low = max(a, b), min(a, b)
    return high + math.log2(1.0 + 2.0 ** (low - high))


EvictionPolicy = Callable[[ReuseHistory, float, ReuseModel, float], float]
"""Rank of an entry at a time: the lowest is evicted first. The second value is its *heat*: log2 of the sum of its uses at time
0, if the weight of a use halves every `HALF_LIFE`."""

POLICIES: dict[str, EvictionPolicy] = {
    "value": lambda stats, _, reuse, now: reuse.value(stats, now),
    "gdsf": lambda stats, heat, _, __: heat + math.log2(stats.saved_per_byte),
    "lfu": lambda _, heat, __, ___: heat,
    "twice": lambda stats, _, __, ___: stats.last + (1e12 if stats.uses > 1 else 0.0),
    "lru": lambda stats, _, __, ___: stats.last,
}
"""`value` is the one that headstart uses; the others are for comparison. `gdsf`: greedy dual size frequency, with decayed uses.
`lfu`: decayed uses only. `twice`: least recently used, but entries with one use before all others. `lru`: least recently
used."""


class ReplayRetention(Retention):
    """Retention with a policy in `POLICIES`."""

    def __init__(self, tier: str, index: Index, saved_per_byte: Callable[[Entry], float], policy: str) -> None:
        super().__init__(tier, index, saved_per_byte, by_owner=False)
        self._policy = POLICIES[policy]

        self._heats: dict[BlockId, float] = {}  # of entries and ghosts

    def use(self, entry: Entry, now: float, *, anew: bool = False) -> None:
        self._heats[entry.id] = self._heated(entry.id, now)
        super().use(entry, now, anew=anew)

    def refuse(self, entry: Entry, now: float, request_traits: RequestTraits = UNKNOWN_REQUEST) -> None:
        if self._in_tier(entry.id) is None:
            self._heats[entry.id] = self._heated(entry.id, now)
        super().refuse(entry, now, request_traits)

    def outranks(self, newcomer: Entry, victim: Entry, now: float, request_traits: RequestTraits = UNKNOWN_REQUEST) -> bool:
        before = self._heats.get(newcomer.id)
        self._heats[newcomer.id] = self._heated(newcomer.id, now)
        try:
            return super().outranks(newcomer, victim, now, request_traits)
        finally:
            if before is None:
                del self._heats[newcomer.id]
            else:
                self._heats[newcomer.id] = before

    def _heated(self, key: BlockId, now: float) -> float:
        heat = self._heats.get(key)
        return now / HALF_LIFE if heat is None else log2_add(heat, now / HALF_LIFE)

    def _lose(self, key: BlockId, ghost: ReuseStats) -> None:
        super()._lose(key, ghost)
        del self._heats[key]

    def _value(self, key: BlockId, stats: ReuseHistory, now: float) -> float:
        return self._policy(stats, self._heats[key], self._reuse, now)


def replay(trace: Trace, policy: str, budget: int, costs: ReplayCosts, *, first: int = 0) -> ReplayResult:
    """Replays a trace with a policy in `POLICIES`, or `OPTIMUM`.

    Args:
        budget: tokens that fit; whole blocks of them are used.
        first: the first request that is counted; the cache sees all.
    """
    capacity = budget // trace.block_size
    simulated = _Optimum(trace, capacity) if policy == OPTIMUM else SimulatedCache(policy, capacity, trace.block_size, costs)
    hit = prompt = 0
    for number, request in enumerate(trace.requests):
        found = simulated.serve(number, request)
        if number >= first:
            hit += found * trace.block_size
            prompt += request.prompt
    return ReplayResult(policy, budget, prompt, hit, hit * costs.seconds)


def closed(result: ReplayResult, lru: ReplayResult, optimum: ReplayResult) -> float | None:
    """The share of the gap between LRU and the optimum that a policy closes; None if there is no gap."""
    gap = optimum.hit - lru.hit
    return (result.hit - lru.hit) / gap if gap > 0 else None


def chain_of(request: TracedRequest) -> Chain:
    """The blocks of a request's prompt. Each is one token, with a simulated block size of 1."""
    return Chain(_ROOT, 1, request.blocks)


class SimulatedCache:
    """Index and retention, as `serving/cache` uses them. `capacity`: blocks that fit, of `block_size` tokens each.

    As in the server, new KV is saved after the reply, so admission knows the whole request.
    """

    def __init__(self, policy: str, capacity: int, block_size: int, costs: ReplayCosts) -> None:
        self._capacity, self._block_size = capacity, block_size
        self._index = Index(1)
        value = costs.seconds / costs.bytes
        self.retention = ReplayRetention(_TIER, self._index, lambda _: value, policy)

    def serve(self, number: int, request: TracedRequest) -> int:
        """Serves a request; how many of its blocks were there."""
        chain, now = chain_of(request), request.at
        found = self._index.match(chain, len(chain), canonical_only=True, partial=False).blocks
        request_traits = self._request_traits(request, *self.retention.seen(chain.ids))
        path = list(found)
        for entry in found:
            entry.holds += 1
            self.retention.use(entry, now)
        for block in range(len(found), len(chain)):
            entry = Entry(chain.ids[block], chain.parent_of(block), chain.block(block), block)
            if len(path) < block or not self._evict_for(entry, now, request_traits):
                self.retention.refuse(entry, now, request_traits)
                continue
            self._index.add(entry, _TIER, canonical=True)
            self.retention.use(entry, now)
            entry.holds += 1
            path.append(entry)
        for entry in path:
            entry.holds -= 1
        self.retention.replied((entry.id for entry in path), request_traits)
        return len(found)

    def _request_traits(self, request: TracedRequest, known: int, siblings: int) -> RequestTraits:
        """The traits of a request after its reply. `known`: how many of its blocks have been seen before."""
        new = request.prompt - known * self._block_size
        return RequestTraits.of(len(request.blocks), new=new, siblings=siblings, reply=request.reply, called=request.called)

    def _evict_for(self, newcomer: Entry, now: float, request_traits: RequestTraits) -> bool:
        while len(self._index) >= self._capacity:
            victim = self.retention.victim()
            if victim is None or not self.retention.outranks(newcomer, victim, now, request_traits):
                return False
            self._index.remove(victim.id, _TIER)
            self.retention.forget(victim)
        return True


class _Optimum:
    """The most hits that any cache of `capacity` blocks can have, with knowledge of the future.

    It evicts the block with the farthest next use (Belady's MIN), and does not admit a block whose next use is farther than all
    others'. For blocks of equal size and cost this is the optimum of a cache that may hold any set of blocks. A prefix cache is
    more constrained, because a block is useful only with all its ancestors. So it cannot have more hits.

    It does not have fewer hits either. A request that uses a block also uses its ancestors, so the next use of an ancestor is
    never later than a descendant's. Ties are broken towards the deeper block, so MIN never drops a block before its
    descendants. It always holds whole prefixes, and all of them that a request needs are hits. So the optimum bounds every
    policy here, and a policy could reach it. If counting begins in the middle of a trace, it is still the optimum of the whole
    trace.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        self._capacity = capacity
        self._held: set[bytes] = set()
        self._heap: list[tuple[int, int, bytes]] = []
        end = len(trace.requests)
        upcoming: dict[bytes, int] = {}
        self._next: list[list[int]] = [[]] * end
        for number in range(end - 1, -1, -1):
            ids = chain_of(trace.requests[number]).ids
            self._next[number] = [upcoming.get(key, end) for key in ids]
            upcoming.update(dict.fromkeys(ids, number))

    def serve(self, number: int, request: TracedRequest) -> int:
        """Serves a request; how many of its blocks were there."""
        ids = chain_of(request).ids
        hit = sum(1 for _ in takewhile(self._held.__contains__, ids))
        for depth, (key, after) in enumerate(zip(ids, self._next[number], strict=True)):
            self._held.add(key)
            heapq.heappush(self._heap, (-after, -depth, key))
        while len(self._held) > self._capacity:
            # Items of earlier uses are past, so they come after the items of all held blocks.
            self._held.remove(heapq.heappop(self._heap)[2])
        return hit


def policies() -> list[str]:
    """All names that can be replayed: those in `POLICIES`, and the optimum."""
    return [*POLICIES, OPTIMUM]
