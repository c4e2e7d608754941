"""Reuse model: when will an entry be used again? It learns from past uses, and eviction policies rank entries by it.

The currency is *expected seconds of prefill saved, per byte and second of keeping*. One factor has to be learned: the rate of
hits, in uses per second. It is learned in these steps.

1. Each use of an entry begins a *reuse interval*, which ends at the next use. All intervals of one request count as one.
2. Intervals are divided into kinds: by how often the entry was used, and by the *traits* of the request (`RequestTraits`): the
   length of its reply, whether the reply ended in a tool call, how much of the prompt was new, and how many other prompts had
   continued differently at that position.
3. For each kind, intervals are counted by length, in octaves of seconds (1, 2, 4, 8, …). An open interval counts as "at least
   as long".
4. The *hazard* is the chance that an interval which has reached an octave ends in it. It is fitted by a logistic regression on
   octave and traits (discrete-time survival analysis; Singer and Willett, 1993), with a ridge where data is scarce. Each kind
   then combines that fit with its own counts.
5. From the hazards follows the best rate of hits that keeping the entry can still give, over all later times T of dropping it:

       rate(age) = max over T > age of  P(used between age and T) / E(seconds until used or T)

   This is Gittins' index: if entries are independent and the tier is full, keeping the highest rates is best.

A tier without any data behaves like LRU, except that entries which were used again rank higher.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OCTAVES = 24
"""Octave 0 is below a second, octave k from 2^(k-1) to 2^k; the last has no end (and begins at 48 days)."""
_USES = (2, 3, 5, 9)
_REPLY = (0, 32, 128, 512)
_NEW = (512, 2048, 8192)
_SIBLINGS = (0, 1, 3)
_TRAITS = (len(_USES) + 1, len(_REPLY) + 1, 3, len(_NEW) + 1, len(_SIBLINGS) + 1)
"""Of a kind: uses, reply, whether it ended in a call (unknown, yes, no), new tokens, siblings."""
KINDS = math.prod(_TRAITS)
REQUEST_BUCKETS = KINDS // _TRAITS[0]

_HAZARD = np.array([0.05, 0.1, 0.2, 0.3, 0.4])
"""Chance that a spell ends in an octave, by number of uses, where nothing is known."""
_USUAL = -2.0
"""The same for an octave, in log odds; uses shift it."""
_RIDGE_OCTAVE, _RIDGE_TRAIT = 0.5, 1.0
_PRIOR = 3.0
"""Requests that the fit counts for beside a kind's own."""
_STEPS, _SMALL = 50, 1e-3
"""Of Newton's method: at most so many; none after one that is smaller."""
MEMORY = 1 << 20
"""Events after which what was counted before has half its weight."""
_FIRST, _GROWTH = 64, 16
"""The rates are worked out anew after 64 events, then whenever a sixteenth has been added."""

_WIDTH = np.array([1.0, *(2.0**octave for octave in range(OCTAVES - 1))])
TRAITS = np.concatenate(
    [np.eye(size)[index] for size, index in zip(_TRAITS, np.unravel_index(np.arange(KINDS), _TRAITS), strict=True)], axis=1
)
"""Kinds × traits: which each has."""
_BASE = np.concatenate([np.log(_HAZARD / (1 - _HAZARD)) - _USUAL, np.zeros(sum(_TRAITS[1:]))])

Table = npt.NDArray[np.float64]
"""Kinds × octaves, or × traits."""


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """What is known of a request: of its reply, once that is over.

    Attributes:
        bucket: which of `REQUEST_BUCKETS` sorts of request it is.
        weight: what a spell of each of its pieces counts for.
    """

    bucket: int = 0
    weight: float = 0.05

    @classmethod
    def of(cls, pieces: int, *, new: int, siblings: int, reply: int, called: bool | None = None) -> RequestTraits:
        """Sorts a request.

        Args:
            pieces: that it used.
            new: tokens of its prompt that had never been seen.
            siblings: prompts that had gone on otherwise where it parted from what had been seen; -1 if all of it was new.
            reply: tokens; -1 if nobody knows.
            called: whether the reply ended in a call, so that a program will answer; None if nobody knows.
        """
        bins = (
            bisect_right(_REPLY, reply),
            0 if called is None else 1 if called else 2,
            bisect_left(_NEW, new),
            bisect_right(_SIBLINGS, siblings),
        )
        return cls(int(np.ravel_multi_index(bins, _TRAITS[1:])), 1.0 / max(1, pieces))


UNKNOWN_REQUEST = RequestTraits()
"""Of a request that nobody told of: as one of twenty pieces counts."""


@dataclass(slots=True)
class ReuseStats:
    """How a piece was used.

    Attributes:
        saved_per_byte: seconds of prefill that having it saves, per byte that it occupies.
        last: when it was last used, in seconds.
        uses: how often it was used.
        heat: log2 of the sum of uses, each halving in weight every half-life, at time 0.
        request_traits: the latest request that told of itself.
        children: different pieces that have followed it.
    """

    saved_per_byte: float
    last: float
    uses: int
    heat: float
    request_traits: RequestTraits = UNKNOWN_REQUEST
    children: int = 0

    @property
    def kind(self) -> int:
        return bisect_right(_USES, self.uses) * REQUEST_BUCKETS + self.request_traits.bucket

    def age(self, now: float) -> int:
        """The octave of the seconds since the last use."""
        seconds = int(now - self.last)
        return min(seconds.bit_length(), OCTAVES - 1) if seconds > 0 else 0

    def use(self, now: float, half_life: float) -> None:
        """Counts a use."""
        self.heat = log2_add(self.heat, now / half_life)
        self.last = now
        self.uses += 1


class ReuseModel:
    """What a tier has learned of spells. See the module.

    Attributes:
        counts: 2 × `KINDS` × `OCTAVES`: spells that have ended, and those that nobody follows any more, by their length.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((2, KINDS, OCTAVES))
        self._intervals = self._news = 0
        self._fit = np.concatenate([np.full(OCTAVES, _USUAL), _BASE])
        self._ended = self._lasted = np.zeros((KINDS, OCTAVES))
        self._rates: dict[int, list[float]] = {}

    def returned(self, stats: ReuseStats, now: float) -> None:
        """A piece is used again, before `stats` is told."""
        self._count(0, stats, now)

    def lost(self, stats: ReuseStats, now: float) -> None:
        """A piece that has left is not followed any more."""
        self._count(1, stats, now)

    def left(self) -> None:
        """A piece has left the tier, or was not let in. Its spell goes on."""
        self._intervals += 1
        self._news += 1

    @property
    def due(self) -> bool:
        """Whether enough has happened to learn from."""
        return self._news > _FIRST and self._news * _GROWTH > self._intervals

    def learn(self, followed: Iterable[ReuseStats], now: float) -> None:
        """Works the rates out anew. `followed`: the pieces in the tier, and those that have left and may come again."""
        going: defaultdict[tuple[int, int], float] = defaultdict(float)
        for stats in followed:
            going[stats.kind, stats.age(now)] += stats.request_traits.weight
        unknown = self.counts[1].copy()
        for place, weight in going.items():
            unknown[place] += weight
        self._ended = self.counts[0].copy()
        lasted = np.cumsum((self._ended + unknown)[:, ::-1], axis=1)[:, ::-1]
        self._lasted = lasted - unknown / 2  # they are somewhere in their octave
        some = np.flatnonzero(self._lasted[:, 0])
        self._fit = fit(self._ended[some], self._lasted[some], TRAITS[some], self._fit)
        self._rates = dict(zip(some.tolist(), self._rates_of(some), strict=True))
        self._news = 0

    def rate(self, stats: ReuseStats, now: float) -> float:
        """Hits per second that keeping the piece from `now` on can give."""
        row, age = self._rates.get(stats.kind), now - stats.last
        if row is None:
            (row,) = self._rates_of(np.array([stats.kind]))
            self._rates[stats.kind] = row
        place = max(0.0, math.log2(age) + 0.5) if age > 0 else 0.0  # a rate is that of the middle of its octave
        octave = min(int(place), OCTAVES - 2)
        part = min(place - octave, 1.0)
        return row[octave] * (1.0 - part) + row[octave + 1] * part

    def _rates_of(self, kinds: npt.NDArray[np.intp]) -> list[list[float]]:
        found: list[list[float]] = rates(hazards(self._ended[kinds], self._lasted[kinds], TRAITS[kinds], self._fit)).tolist()
        return found

    def _count(self, row: int, stats: ReuseStats, now: float) -> None:
        self.counts[row, stats.kind, stats.age(now)] += stats.request_traits.weight
        self.left()
        if self._intervals > MEMORY:
            self.counts *= 0.5
            self._intervals //= 2


def fit(ended: Table, lasted: Table, traits: Table, start: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The most likely weights of octaves, then of traits, by Newton's method from `start`, with a ridge towards the usual.

    Args:
        ended: spells that ended in an octave, by kind; `lasted`: those that came as far.
        traits: those of the kinds.
    """
    usual = np.concatenate([np.full(OCTAVES, _USUAL), _BASE])
    ridge = np.concatenate([np.full(OCTAVES, _RIDGE_OCTAVE), np.full(len(_BASE), _RIDGE_TRAIT)])
    found = start.copy()
    for _ in range(_STEPS):
        chance = _chance(traits, found)
        miss, spread = ended - lasted * chance, lasted * chance * (1 - chance)
        slope = np.concatenate([miss.sum(axis=0), traits.T @ miss.sum(axis=1)]) - ridge * (found - usual)
        cross = spread.T @ traits
        curve = np.block([[np.diag(spread.sum(axis=0)), cross], [cross.T, traits.T @ (spread.sum(axis=1)[:, None] * traits)]])
        step = np.linalg.solve(curve + np.diag(ridge), slope)
        largest = np.abs(step).max()
        found += step * min(1.0, 2.0 / max(largest, _SMALL))
        if largest < _SMALL:
            break
    return found


def _chance(traits: Table, weights: npt.NDArray[np.float64]) -> Table:
    odds = weights[:OCTAVES] + (traits @ weights[OCTAVES:])[:, None]
    chance: Table = 1 / (1 + np.exp(-np.clip(odds, -15.0, 15.0)))
    return chance


def hazards(ended: Table, lasted: Table, traits: Table, weights: npt.NDArray[np.float64]) -> Table:
    """For each kind and octave, the chance that a spell which has lasted so long ends in it."""
    return (ended + _PRIOR * _chance(traits, weights)) / (lasted + _PRIOR)


def rates(hazard: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The best rate of hits that is still to be had, from the middle of each octave on."""
    found = np.empty_like(hazard)
    for octave in range(OCTAVES):
        chance, width = hazard[:, octave:].copy(), _WIDTH[octave:].copy()
        chance[:, 0] *= 0.5
        width[0] *= 0.5
        lasts = np.cumprod(1.0 - chance, axis=1)
        before = np.concatenate([np.ones((len(hazard), 1)), lasts[:, :-1]], axis=1)
        hits = np.cumsum(before * chance, axis=1)
        seconds = np.cumsum((before + lasts) / 2 * width, axis=1)
        found[:, octave] = (hits / seconds).max(axis=1)
    return found


def log2_add(a: float, b: float) -> float:
    """log2(2^a + 2^b)."""
    high, low = max(a, b), min(a, b)
    return high + math.log2(1.0 + 2.0 ** (low - high))


EvictionPolicy = Callable[[ReuseStats, ReuseModel, float], float]
"""Rank of a piece at a time: the lowest goes first."""

POLICIES: dict[str, EvictionPolicy] = {
    "value": lambda stats, reuse, now: reuse.rate(stats, now) * stats.saved_per_byte,
    "gdsf": lambda stats, _, __: stats.heat + math.log2(stats.saved_per_byte),
    "lfu": lambda stats, _, __: stats.heat,
    "twice": lambda stats, _, __: stats.last + (1e12 if stats.uses > 1 else 0.0),
    "lru": lambda stats, _, __: stats.last,
}
"""`value` is headstart's own. `gdsf`: greedy dual size frequency, with decayed uses; `lfu`: decayed uses alone; `twice`: least
recently used, those used once before those used again."""
