"""Replay: what a trace would have found in a cache of some size, under each policy, and what it could have found at best.

The cache is the real one, without KV: `prefix_cache/blocks.Chain` computes ids, `prefix_cache/index.Index` matches them, and
`prefix_cache/eviction.Retention` decides what to evict. Eviction happens before admission, children are evicted before their
parents, and a hit counts for all ancestors. The blocks of a running request are pinned. Each block is one token of the
simulation, so all blocks have the same size and cost, and hits are counted in blocks.

The trace says nothing of the blocks that replies leave behind: their tokens are counted as computed when they come back as part
of a prompt, for every policy alike.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import takewhile

from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Entry, Index
from headstart.prefix_cache.reuse_model import POLICIES, RequestTraits
from headstart.traces import Trace, TracedRequest

OPTIMUM = "optimum"
_TIER = "memory"
_ROOT = root_id(b"replay", "")


@dataclass(frozen=True, slots=True)
class ReplayCosts:
    """What a token costs: seconds of prefill, and bytes to keep."""

    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one policy made of a trace, in tokens; the requests before the first counted one are in none of the figures.

    Attributes:
        budget: tokens that fit.
        prompt: tokens of all prompts.
        hit: of those, found in the cache.
        seconds: of prefill that the hits saved.
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


def replay(
    trace: Trace, policy: str, budget: int, costs: ReplayCosts, *, first: int = 0, half_life: float = 60.0
) -> ReplayResult:
    """Replays a trace under a row of `POLICIES`, or `OPTIMUM`.

    Args:
        budget: tokens that fit; whole blocks of them are used.
        first: the first request that is counted; the cache sees all.
    """
    room = budget // trace.block_size
    serve = (
        _Optimum(trace, room).serve
        if policy == OPTIMUM
        else SimulatedCache(policy, room, trace.block_size, costs, half_life).serve
    )
    hit = prompt = 0
    for number, request in enumerate(trace.requests):
        found = serve(number, request)
        if number >= first:
            hit += found * trace.block_size
            prompt += request.prompt
    return ReplayResult(policy, budget, prompt, hit, hit * costs.seconds)


def closed(result: ReplayResult, lru: ReplayResult, optimum: ReplayResult) -> float | None:
    """The part of the gap from LRU to the optimum that a policy closes; None if there is no gap."""
    gap = optimum.hit - lru.hit
    return (result.hit - lru.hit) / gap if gap > 0 else None


def chain_of(request: TracedRequest) -> Chain:
    """The blocks of a request's prompt, one token of a simulated block size of 1 each."""
    return Chain(_ROOT, 1, request.blocks)


class SimulatedCache:
    """Index and retention, as `serving/cache` uses them. `room`: blocks that fit, of `block_size` tokens each.

    As there, new rows are copied out when the reply is over: what is known of the request by then counts when they are let in.
    """

    def __init__(self, policy: str, room: int, block_size: int, costs: ReplayCosts, half_life: float = 60.0) -> None:
        self._room, self._block_size = room, block_size
        self._index = Index(1)
        value = costs.seconds / costs.bytes
        self.retention = Retention(_TIER, self._index, lambda _: value, policy, half_life)

    def serve(self, number: int, request: TracedRequest) -> int:
        """Serves a request; how many of its blocks were there."""
        chain, now = chain_of(request), request.at
        found = self._index.match(chain, len(chain), canonical_only=True, partial=False).blocks
        request_traits = self._request_traits(request, *self.retention.seen(chain.ids))
        path = list(found)
        for entry in found:
            entry.pins += 1
            self.retention.use(entry, now)
        for block in range(len(found), len(chain)):
            entry = Entry(chain.ids[block], chain.parent_of(block), chain.block(block), block)
            if len(path) < block or not self._make_room(entry, now, request_traits):
                self.retention.refuse(entry, now, request_traits)
                continue
            self._index.add(entry, _TIER, canonical=True)
            self.retention.use(entry, now)
            entry.pins += 1
            path.append(entry)
        for entry in path:
            entry.pins -= 1
        self.retention.replied((entry.id for entry in path), request_traits)
        return len(found)

    def _request_traits(self, request: TracedRequest, known: int, siblings: int) -> RequestTraits:
        """What is known of a request when its reply is over; of its blocks `known` have been seen before."""
        new = request.prompt - known * self._block_size
        return RequestTraits.of(len(request.blocks), new=new, siblings=siblings, reply=request.reply, called=request.called)

    def _make_room(self, newcomer: Entry, now: float, request_traits: RequestTraits) -> bool:
        while len(self._index) >= self._room:
            victim = self.retention.victim()
            if victim is None or not self.retention.outranks(newcomer, victim, now, request_traits):
                return False
            self._index.remove(victim.id, _TIER)
            self.retention.forget(victim)
        return True


class _Optimum:
    """The most that any cache of `room` blocks can hit, knowing the future.

    Farthest next use goes first (Belady's MIN), and a block whose next use is farther than all others' is not taken in. For
    blocks of equal size and cost that is the optimum of a cache that may hold any set of blocks and may decline to store, one
    access after another. A prefix cache is more constrained (a block is of use only with all its ancestors) so its hits cannot
    be more. They are not fewer either: a request that uses a block uses its ancestors too, so the next use of an ancestor is
    never later than a descendant's; with ties broken towards the deeper block, MIN never drops a block before what hangs on it,
    what it holds is always whole prefixes, and all of it that a request asks for is a hit. Thus it is both a bound on every
    policy here and within reach of one. For a count that begins in the middle of a trace it is the optimum of the whole.
    """

    def __init__(self, trace: Trace, room: int) -> None:
        self._room = room
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
        while len(self._held) > self._room:
            # Items of earlier uses are behind those of all that is held: their time is past.
            self._held.remove(heapq.heappop(self._heap)[2])
        return hit


def policies() -> list[str]:
    """All that can be replayed: the rows of `POLICIES`, and the optimum."""
    return [*POLICIES, OPTIMUM]
