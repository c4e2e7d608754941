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
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

OCTAVES = 24
"""Octave 0 is below a second, octave k from 2^(k-1) to 2^k; the last has no end (and begins at 48 days)."""
_USES = (2, 3, 5, 9)
_REPLY = (0, 32, 128, 512)
_NEW = (512, 2048, 8192)
_SIBLINGS = (0, 1, 3)
_TRAITS = (len(_USES) + 1, len(_REPLY) + 1, 3, len(_NEW) + 1, len(_SIBLINGS) + 1)
"""Number of classes of each trait of a kind: uses, length of the reply, ended in a tool call (unknown, yes, no), new tokens,
siblings."""
KINDS = math.prod(_TRAITS)
REQUEST_BUCKETS = KINDS // _TRAITS[0]
_MANY = _USES[-1]
_FIRST_KIND = [bisect_right(_USES, uses) * REQUEST_BUCKETS for uses in range(_MANY + 1)]
"""The kind of bucket 0, by number of uses."""
_FIRST_KINDS = np.array(_FIRST_KIND)

_HAZARD = np.array([0.05, 0.1, 0.2, 0.3, 0.4])
"""Chance that an interval ends in an octave, by number of uses, without data."""
_USUAL = -2.0
"""The same for any octave, in log odds; the number of uses shifts it."""
_RIDGE_OCTAVE, _RIDGE_TRAIT = 0.5, 1.0
_PRIOR = 3.0
"""Weight of the fit, in requests, beside a kind's own counts."""
_HALF = 2.0**-0.5
"""The middle of the first octave, in seconds."""
_STEPS, _SMALL = 50, 1e-3
"""Newton's method ends after this many steps, or after a step that is smaller."""
_TO_8_BITS = 2.0**45 + 1
"""Splits the first 8 bits of a value off (Veltkamp): 0.4 % are lost at most, and a million entries have few values."""
MEMORY = 1 << 20
"""Events after which all counts are halved."""
_FIRST, _GROWTH = 64, 16
"""The rates are computed again after 64 events, then each time another sixteenth was added."""

_STATS_A_STEP, _NEWTON_A_STEP, _KINDS_A_STEP = 2048, 4, 192
"""How much a step of `ReuseModel.learning` reads, how far it fits, and for how many kinds it computes rates."""

_WIDTH = np.array([1.0, *(2.0**octave for octave in range(OCTAVES - 1))])
TRAITS = np.concatenate(
    [np.eye(size)[index] for size, index in zip(_TRAITS, np.unravel_index(np.arange(KINDS), _TRAITS), strict=True)], axis=1
)
"""Kinds × traits: 1 where a kind has a trait."""
_BASE = np.concatenate([np.log(_HAZARD / (1 - _HAZARD)) - _USUAL, np.zeros(sum(_TRAITS[1:]))])
_USUAL_FIT = np.concatenate([np.full(OCTAVES, _USUAL), _BASE])
"""The weights of octaves, then of traits, without data."""
_NO_INTERVALS = np.zeros((KINDS, OCTAVES))

Table = npt.NDArray[np.float64]
"""Kinds × octaves, or × traits; `ReuseModel.counts` has two."""
Rates: TypeAlias = "array[float]"
"""The rates of one kind, by octave. A list of numbers takes three times the memory."""


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """The traits of a request that predict when its entries are used again.

    Attributes:
        bucket: number of the class of the request, less than `REQUEST_BUCKETS`.
        weight: weight of the interval of each of its entries.
    """

    bucket: int = 0
    weight: float = 0.05

    @staticmethod
    def of(entries: int, *, new: int, siblings: int, reply: int, called: bool | None = None) -> RequestTraits:
        """The class of a request.

        Args:
            entries: number of entries that it used.
            new: tokens of its prompt that no earlier prompt had.
            siblings: number of other continuations at the position where the new tokens begin; -1 if the whole prompt is new.
            reply: tokens of the reply; -1 if unknown.
            called: whether the reply ended in a tool call, so that a program will answer; None if unknown.
        """
        bins = (
            bisect_right(_REPLY, reply),
            0 if called is None else 1 if called else 2,
            bisect_left(_NEW, new),
            bisect_right(_SIBLINGS, siblings),
        )
        bucket = 0
        for place, classes in zip(bins, _TRAITS[1:], strict=True):
            bucket = bucket * classes + place
        return _traits(bucket, 1.0 / max(1, entries))


@lru_cache(4096)
def _traits(bucket: int, weight: float) -> RequestTraits:
    """One object for most requests with these values: all their entries have it."""
    return RequestTraits(bucket, weight)


UNKNOWN_REQUEST = RequestTraits()
"""The traits of an unknown request. Its entries have the weight of one of twenty."""


class ReuseHistory:
    """How an entry was used. An entry in memory has it in itself (`entry.Entry`); elsewhere it is a `ReuseStats`.

    Attributes:
        saved_per_byte: the prefill that the entry saves, per byte that it occupies: in tokens in memory, in seconds on disk.
        last: time of the last use, in seconds.
        uses: number of uses.
        request_traits: those of the latest request whose traits are known.
        children: number of different entries that have followed it.
    """

    __slots__ = ()
    saved_per_byte: float
    last: float
    uses: int
    request_traits: RequestTraits
    children: int

    @property
    def kind(self) -> int:
        uses = self.uses
        return _FIRST_KIND[uses if uses < _MANY else _MANY] + self.request_traits.bucket

    def age(self, now: float) -> int:
        """The octave of the seconds since the last use."""
        seconds = int(now - self.last)
        return min(seconds.bit_length(), OCTAVES - 1) if seconds > 0 else 0


@dataclass(slots=True)
class ReuseStats(ReuseHistory):
    """The history of an entry that is not in memory."""

    saved_per_byte: float
    last: float
    uses: int
    request_traits: RequestTraits = UNKNOWN_REQUEST
    children: int = 0

    def use(self, now: float) -> None:
        """Counts a use."""
        self.last = now
        self.uses += 1


@dataclass(frozen=True, slots=True)
class Histories:
    """How several entries were used: a column for each attribute.

    Attributes:
        last: times of the last use, in seconds.
        uses: numbers of uses.
        bucket: classes of the latest requests (`RequestTraits`).
        weight: weights of the intervals.
    """

    last: npt.NDArray[np.float64]
    uses: npt.NDArray[np.uint16]
    bucket: npt.NDArray[np.uint16]
    weight: npt.NDArray[np.float64]

    def open(self, now: float) -> Table:
        """The weights of their open intervals."""
        kinds = _FIRST_KINDS[np.minimum(self.uses, _MANY)] + self.bucket
        seconds = np.maximum(now - self.last, 0.0).astype(np.int64)
        ages = np.minimum(np.frexp(seconds)[1], OCTAVES - 1)  # of a whole number: its number of bits
        counted = np.bincount(kinds * OCTAVES + ages, self.weight, KINDS * OCTAVES)
        return np.asarray(counted, np.float64).reshape(KINDS, OCTAVES)


class ReuseModel:
    """The counts of reuse intervals of one tier, and the rates that follow from them. See the module."""

    def __init__(self) -> None:
        self.counts = np.zeros((2, KINDS, OCTAVES))
        self._intervals = self._news = 0
        self._fit = _USUAL_FIT
        self._ended = self._lasted = _NO_INTERVALS
        self._rates: dict[int, Rates] = {}

    @property
    def counts(self) -> Table:
        """2 × `KINDS` × `OCTAVES`: intervals that have ended, and intervals that were still open when they were dropped."""
        return self._counts

    @counts.setter
    def counts(self, counts: Table) -> None:
        self._counts = counts
        self._flat = counts.data.cast("B").cast("d")  # the same numbers; one is changed in a third of the time here

    def returned(self, stats: ReuseHistory, now: float) -> None:
        """An entry is used again. Call it before `stats` is updated."""
        self._count(0, stats, now)

    def lost(self, stats: ReuseHistory, now: float) -> None:
        """The ghost of an entry is dropped: its interval stays open."""
        self._count(1, stats, now)

    def left(self) -> None:
        """An entry has left the tier, or was not admitted. Its interval continues."""
        self._intervals += 1
        self._news += 1

    @property
    def due(self) -> bool:
        """Whether there is enough new data for `learn`."""
        return self._news > _FIRST and self._news * _GROWTH > self._intervals

    def learn(self, followed: Iterable[ReuseHistory], now: float) -> None:
        """Computes the rates again. `followed`: the entries in the tier, and the ghosts."""
        for _ in self.learning(followed, now):
            pass

    def learning(
        self, followed: Iterable[ReuseHistory], now: float, weight: float = 1.0, more: Iterable[Histories] = ()
    ) -> Iterator[None]:
        """`learn` in steps of about a millisecond. The rates change in the last one.

        Args:
            weight: how many entries each of those in `followed` stands for.
            more: others that are followed, a piece for each step.
        """
        self._news = 0
        ended, unknown = self.counts.copy()
        going: defaultdict[int, float] = defaultdict(float)
        for number, stats in enumerate(followed, 1):
            going[stats.kind * OCTAVES + stats.age(now)] += stats.request_traits.weight
            if number % _STATS_A_STEP == 0:
                yield
        for place, of_request in going.items():
            unknown[divmod(place, OCTAVES)] += of_request * weight
        for piece in more:
            unknown += piece.open(now)
            yield
        both = ended + unknown
        some = np.flatnonzero(both.any(axis=1))
        lasted = np.zeros_like(both)  # they are somewhere in their octave
        lasted[some] = np.cumsum(both[some, ::-1], axis=1)[:, ::-1] - unknown[some] / 2
        weights = self._fit
        for number, after_step in enumerate(fitting(ended[some], lasted[some], TRAITS[some], weights), 1):
            weights = after_step
            if number % _NEWTON_A_STEP == 0:
                yield
        found: dict[int, Rates] = {}
        kinds = np.array(sorted({*some.tolist(), *self._rates}), np.intp)  # the first np.union1d imports for 8 ms
        for first in range(0, len(kinds), _KINDS_A_STEP):
            part = kinds[first : first + _KINDS_A_STEP]
            found.update(zip(part.tolist(), _rates_of(part, ended, lasted, weights), strict=True))
            yield
        for kind in self._rates.keys() - found.keys():
            (found[kind],) = _rates_of(np.array([kind]), ended, lasted, weights)
        self._ended, self._lasted, self._fit, self._rates = ended, lasted, weights, found

    def rate(self, stats: ReuseHistory, now: float) -> float:
        """Hits per second that keeping an entry from `now` on can give."""
        uses, age = stats.uses, now - stats.last
        kind = _FIRST_KIND[uses if uses < _MANY else _MANY] + stats.request_traits.bucket  # as a property it takes longer
        row = self._rates.get(kind)
        if row is None:
            row = self._rates[kind] = self._rates_of_kind(kind)
        if age <= _HALF:
            return row[0]
        place = math.log2(age) + 0.5  # a rate is that of the middle of its octave
        octave = int(place)
        if octave > OCTAVES - 2:
            return row[OCTAVES - 1]
        part = place - octave
        return row[octave] * (1.0 - part) + row[octave + 1] * part

    def _rates_of_kind(self, kind: int) -> Rates:
        if self._ended is _NO_INTERVALS:
            return _usual_rates(kind)
        (row,) = _rates_of(np.array([kind]), self._ended, self._lasted, self._fit)
        return row

    def value(self, stats: ReuseHistory, now: float) -> float:
        """Seconds of prefill that an entry is expected to save, per byte and second of keeping it from `now` on, to 8 bits."""
        value = self.rate(stats, now) * stats.saved_per_byte
        return (high := value * _TO_8_BITS) - (high - value)

    def _count(self, row: int, stats: ReuseHistory, now: float) -> None:
        self._flat[(row * KINDS + stats.kind) * OCTAVES + stats.age(now)] += stats.request_traits.weight
        self.left()
        if self._intervals > MEMORY:
            self.counts *= 0.5
            self._intervals //= 2


def _rates_of(kinds: npt.NDArray[np.intp], ended: Table, lasted: Table, weights: npt.NDArray[np.float64]) -> list[Rates]:
    return [array("d", row.tobytes()) for row in rates(hazards(ended[kinds], lasted[kinds], TRAITS[kinds], weights))]


@lru_cache(KINDS)
def _usual_rates(kind: int) -> Rates:
    """The rates of a kind without data, which all models share."""
    (row,) = _rates_of(np.array([kind]), _NO_INTERVALS, _NO_INTERVALS, _USUAL_FIT)
    return row


def fitting(ended: Table, lasted: Table, traits: Table, start: npt.NDArray[np.float64]) -> Iterator[npt.NDArray[np.float64]]:
    """The most likely weights of octaves, then of traits, after each step of Newton's method from `start`. A ridge draws them
    towards the usual.

    Args:
        ended: kinds × octaves: intervals that ended in an octave.
        lasted: kinds × octaves: intervals that reached it.
        traits: kinds × traits.
    """
    usual = _USUAL_FIT
    ridge = np.concatenate([np.full(OCTAVES, _RIDGE_OCTAVE), np.full(len(_BASE), _RIDGE_TRAIT)])
    found = start
    for _ in range(_STEPS):
        chance = _chance(traits, found)
        miss, spread = ended - lasted * chance, lasted * chance * (1 - chance)
        slope = np.concatenate([miss.sum(axis=0), traits.T @ miss.sum(axis=1)]) - ridge * (found - usual)
        cross = spread.T @ traits
        curve = np.block([[np.diag(spread.sum(axis=0)), cross], [cross.T, traits.T @ (spread.sum(axis=1)[:, None] * traits)]])
        step = np.linalg.solve(curve + np.diag(ridge), slope)
        largest = np.abs(step).max()
        found = found + step * min(1.0, 2.0 / max(largest, _SMALL))
        yield found
        if largest < _SMALL:
            break


def _chance(traits: Table, weights: npt.NDArray[np.float64]) -> Table:
    odds = weights[:OCTAVES] + (traits @ weights[OCTAVES:])[:, None]
    chance: Table = 1 / (1 + np.exp(-np.clip(odds, -15.0, 15.0)))
    return chance


def hazards(ended: Table, lasted: Table, traits: Table, weights: npt.NDArray[np.float64]) -> Table:
    """For each kind and octave, the chance that an interval which has reached the octave ends in it."""
    return (ended + _PRIOR * _chance(traits, weights)) / (lasted + _PRIOR)


def rates(hazard: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The best rate of hits that can still be reached, from the middle of each octave on."""
    hazard = np.ascontiguousarray(hazard.T)
    lasts, hits, seconds, best = np.ones_like(hazard), *np.zeros((3, *hazard.shape))  # from an octave on: octaves × kinds
    for octave in range(OCTAVES):
        begun = slice(octave + 1)
        part = np.ones((octave + 1, 1))
        part[octave] = 0.5
        chance, before = hazard[octave] * part, lasts[begun]
        after = before * (1.0 - chance)
        hits[begun] += before * chance
        seconds[begun] += (before + after) / 2 * (_WIDTH[octave] * part)
        best[begun] = np.maximum(best[begun], hits[begun] / seconds[begun])
        lasts[begun] = after
    found: npt.NDArray[np.float64] = best.T
    return found
