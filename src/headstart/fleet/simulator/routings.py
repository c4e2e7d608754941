"""Routings: the rules by which a simulated fleet sends requests to replicas.

`exact` is headstart's own router with the reports of the replicas. The others are rules of well-known routers, after their
documentation. They know what they routed themselves, and at each moment how many requests each replica has.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Sequence

import xxhash

from headstart.fleet.router.chains import PromptChain
from headstart.fleet.router.costs import Weights
from headstart.fleet.router.reports import BlockKey, ReplicaReport
from headstart.fleet.router.router import FleetRouter
from headstart.traces import TracedRequest


class Routing(ABC):
    """A rule. `listens`: whether it wants the replicas' reports."""

    listens = False

    @abstractmethod
    def choose(self, number: int, request: TracedRequest, chain: PromptChain, ongoing: Sequence[int], now: float) -> int:
        """The replica for a request.

        Args:
            number: of the request.
            ongoing: requests that each replica has.
        """

    def report(self, report: ReplicaReport, now: float) -> None:  # noqa: B027 (most rules do not listen)
        """A replica's report has come."""


class Exact(Routing):
    """headstart's router. Replicas have their numbers as names."""

    listens = True

    def __init__(self, weights: Weights | None = None) -> None:
        self.router = FleetRouter(weights)

    def choose(self, number: int, request: TracedRequest, chain: PromptChain, ongoing: Sequence[int], now: float) -> int:
        choice = self.router.choose(str(number), chain, now)
        assert choice is not None
        return int(choice.replica)

    def report(self, report: ReplicaReport, now: float) -> None:
        gap = self.router.report(report, now)
        assert not gap  # the simulation loses no report


class RoundRobin(Routing):
    """One after the other."""

    def choose(self, number: int, request: TracedRequest, chain: PromptChain, ongoing: Sequence[int], now: float) -> int:
        return number % len(ongoing)


class PowerOfTwo(Routing):
    """The less busy one of two random replicas: Ray Serve's default."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def choose(self, number: int, request: TracedRequest, chain: PromptChain, ongoing: Sequence[int], now: float) -> int:
        return self.among(range(len(ongoing)), ongoing)

    def among(self, replicas: Sequence[int], ongoing: Sequence[int]) -> int:
        pair = self._dice.sample(replicas, min(2, len(replicas)))
        return min(pair, key=ongoing.__getitem__)


class Sticky(Routing):
    """By a consistent hash of the session; of the first block if there is none."""

    _POINTS = 64

    def __init__(self, replicas: int) -> None:
        ring = sorted((_hash(f"{one}/{point}"), one) for one in range(replicas) for point in range(self._POINTS))
        self._places, self._replicas = zip(*ring, strict=True)

    def choose(self, number: int, request: TracedRequest, chain: PromptChain, ongoing: Sequence[int], now: float) -> int:
        name = f"session {request.session}" if request.session >= 0 else f"block {chain.keys[0] if chain.keys else number}"
        replica: int = self._replicas[bisect(self._places, _hash(name)) % len(self._places)]
        return replica


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


class PrefixTree:
    """What was routed where: for each block its replicas, and how many blocks each replica has."""

    def __init__(self, replicas: int) -> None:
        self.sizes = [0] * replicas
        self._replicas: dict[BlockKey, set[int]] = {}

    def match(self, keys: Sequence[BlockKey]) -> tuple[int, Sequence[int]]:
        """The longest match with any replica, in blocks, and the replicas that have it."""
        best: set[int] = set()
        for depth, key in enumerate(keys):
            here = self._replicas.get(key)
            if not here:
                return depth, sorted(best)
            best = here
        return len(keys), sorted(best)

    def insert(self, keys: Sequence[BlockKey], replica: int) -> None:
        for key in keys:
            here = self._replicas.setdefault(key, set())
            self.sizes[replica] += replica not in here
            here.add(replica)


class RayPrefix(Routing):
    """Ray Serve's prefix-aware router.

    If the longest and the shortest queue differ by more than `imbalance`, the less busy one of two random replicas. Otherwise,
    if at least a tenth of the prompt was routed before, the replicas with the longest match; if not, those with the smallest
    tree. Of these again the less busy one of two. Its tree never forgets. Ray's default never sees an imbalance.
    """

    _MATCH = 0.1

    def __init__(self, replicas: int, dice: random.Random, imbalance: float = math.inf) -> None:
        self._tree = PrefixTree(replicas)
        self._two = PowerOfTwo(dice)
        self._imbalance = imbalance

    def choose(self, number: int, request: TracedRequest, chain: PromptChain, ongoing: Sequence[int], now: float) -> int:
        candidates: Sequence[int] = range(len(ongoing))
        if max(ongoing) - min(ongoing) <= self._imbalance:
            depth, replicas = self._tree.match(chain.keys)
            if depth and depth * chain.block_size >= self._MATCH * chain.tokens:
                candidates = replicas
            else:
                least = min(self._tree.sizes)
                candidates = [one for one, size in enumerate(self._tree.sizes) if size == least]
        replica = self._two.among(candidates, ongoing)
        self._tree.insert(chain.keys, replica)
        return replica


class SGLang(Routing):
    """SGLang's cache-aware rule.

    If the queues differ by more than `absolute` and by more than `relative` times, the shortest queue. Otherwise, if more than
    `match` of the prompt was routed before, the replica with the longest match; if not, the one with the smallest tree.
    """

    def __init__(self, replicas: int, *, match: float = 0.3, absolute: int = 64, relative: float = 1.5) -> None:
        self._tree = PrefixTree(replicas)
        self._match, self._absolute, self._relative = match, absolute, relative

    def choose(self, number: int, request: TracedRequest, chain: PromptChain, ongoing: Sequence[int], now: float) -> int:
        most, least = max(ongoing), min(ongoing)
        if most - least > self._absolute and most > self._relative * least:
            replica = ongoing.index(least)
        else:
            depth, replicas = self._tree.match(chain.keys)
            if depth * chain.block_size > self._match * chain.tokens:
                replica = replicas[0]
            else:
                replica = self._tree.sizes.index(min(self._tree.sizes))
        self._tree.insert(chain.keys, replica)
        return replica


ROUTINGS: dict[str, Callable[[int, random.Random], Routing]] = {
    "exact": lambda replicas, dice: Exact(),
    "round-robin": lambda replicas, dice: RoundRobin(),
    "power-of-two": lambda replicas, dice: PowerOfTwo(dice),
    "sticky": lambda replicas, dice: Sticky(replicas),
    "ray-prefix": RayPrefix,
    "ray-prefix-10": lambda replicas, dice: RayPrefix(replicas, dice, 10.0),
    "sglang": lambda replicas, dice: SGLang(replicas),
}
"""By name, what makes a rule for a number of replicas. `ray-prefix-10`: with 10 requests as the imbalance."""
