"""Reuse: what past uses say about the next one, and the policies that rank by it.

The currency is *expected seconds of prefill saved per byte and second of keeping*. Its learned factor, hits per second, works
like this. Every use begins a *spell*, which ends when the piece is used again. Spells are sorted into kinds (how often the
piece has been used; how long the reply to its latest request was: titles, tool calls and answers come back at different rates)
and counted by their length, in octaves of seconds. A spell whose piece left the tier counts as one that never ends, until the
piece comes again after all. From the counts follows the hazard h(a), the chance that a spell which has lasted to octave a ends
in it, and from that the rate that holding on can still give, were one to give up at the best of all later times:

    rate(a) = max over T > a of  P(used between a and T) / E(seconds until used or T)

(Gittins' index: for independent items in a full tier, keeping the highest is best.) Where there are few counts a kind leans on
all of the same number of uses, and those on a hazard that is the same in each octave, higher for what was used more often. So a
tier that has seen nothing begins as LRU, but for what has come again. The state is a table of `KINDS` × (`OCTAVES` + 1) counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UNKNOWN = -1
"""A reply that has not ended, or that nobody told of."""
OCTAVES = 24
"""Octave 0 is below a second, octave k from 2^(k-1) to 2^k; the last has no end (and begins at 48 days)."""
NEVER = OCTAVES
"""Where spells are counted whose piece has left the tier."""
_USES = (2, 3, 5, 9)
_REPLY = (0, 32, 128, 512)
_KINDS_OF_REPLY = len(_REPLY) + 1
KINDS = (len(_USES) + 1) * _KINDS_OF_REPLY

_PRIOR = 300.0
"""Spells that the more general hazard counts for."""
_HAZARD = (0.05, 0.1, 0.2, 0.3, 0.4)
"""Chance that a spell ends in an octave, by number of uses, where nothing is known."""
MEMORY = 1 << 20
"""Spells after which older ones have half their weight."""
_FIRST, _GROWTH = 64, 16
"""The rates are worked out anew after 64 spells, then whenever a sixteenth has been added."""

_WIDTH = np.array([1.0, *(2.0**octave for octave in range(OCTAVES - 1))])


@dataclass(slots=True)
class Usage:
    """How a piece was used.

    Attributes:
        saved_per_byte: seconds of prefill that having it saves, per byte that it occupies.
        last: when it was last used, in seconds.
        uses: how often it was used.
        reply: tokens of the reply to the latest request that used it, or `UNKNOWN`.
        heat: log2 of the sum of uses, each halving in weight every half-life, at time 0.
    """

    saved_per_byte: float
    last: float
    uses: int
    heat: float
    reply: int = UNKNOWN

    @property
    def kind(self) -> int:
        return bisect_right(_USES, self.uses) * _KINDS_OF_REPLY + bisect_right(_REPLY, self.reply)

    def age(self, now: float) -> int:
        """The octave of the seconds since the last use."""
        seconds = int(now - self.last)
        return min(seconds.bit_length(), OCTAVES - 1) if seconds > 0 else 0

    def use(self, now: float, half_life: float) -> None:
        """Counts a use; how long its reply will be is not known yet."""
        self.heat = log2_add(self.heat, now / half_life)
        self.last = now
        self.uses += 1
        self.reply = UNKNOWN


class Reuse:
    """What a tier has learned of spells. See the module.

    Attributes:
        counts: spells by kind and octave, and in the last column those that have not ended.
    """

    def __init__(self, counts: npt.NDArray[np.float64] | None = None) -> None:
        self.counts = np.zeros((KINDS, OCTAVES + 1)) if counts is None else counts
        self._spells = float(self.counts.sum())
        self._news = 0
        self._version = 0
        self._rates: list[list[float]] | None = None

    def returned(self, usage: Usage, now: float, *, gone: bool = False) -> None:
        """A piece is used again, before `usage` is told; `gone`: it had left the tier."""
        kind = usage.kind
        self.counts[kind, usage.age(now)] += 1.0
        if gone:
            self.counts[kind, NEVER] -= 1.0
        self._count()

    def left(self, usage: Usage) -> None:
        """A piece leaves the tier, or was not let in."""
        self.counts[usage.kind, NEVER] += 1.0
        self._count()

    def rate(self, usage: Usage, now: float) -> float:
        """Hits per second that keeping the piece from `now` on can give."""
        return (self._rates or self._refresh())[usage.kind][usage.age(now)]

    def settle(self) -> int:
        """Lets what has been learned since count, if it is enough; a number that grows whenever rates change."""
        if self._news > _FIRST and self._news * _GROWTH > self._spells:
            self._refresh()
        return self._version

    def _count(self) -> None:
        self._spells += 1
        self._news += 1
        if self._spells > MEMORY:
            self.counts *= 0.5
            self._spells *= 0.5

    def _refresh(self) -> list[list[float]]:
        self._news = 0
        self._version += 1
        self._rates = rates(hazards(self.counts)).tolist()
        return self._rates


def hazards(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each kind and octave, the chance that a spell which has lasted so long ends in it."""
    ended = counts[:, :OCTAVES].reshape(-1, _KINDS_OF_REPLY, OCTAVES)
    never = np.maximum(counts[:, NEVER], 0.0).reshape(-1, _KINDS_OF_REPLY, 1)
    lasted = ended[..., ::-1].cumsum(axis=-1)[..., ::-1] + never
    hazard = np.reshape(_HAZARD, (-1, 1, 1))
    for axes in (1, ()):
        hazard = (ended.sum(axes, keepdims=True) + _PRIOR * hazard) / (lasted.sum(axes, keepdims=True) + _PRIOR)
    return hazard.reshape(KINDS, OCTAVES)


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


Policy = Callable[[Usage, Reuse, float], float]
"""Rank of a piece at a time: the lowest goes first."""

POLICIES: dict[str, Policy] = {
    "value": lambda usage, reuse, now: reuse.rate(usage, now) * usage.saved_per_byte,
    "gdsf": lambda usage, _, __: usage.heat + math.log2(usage.saved_per_byte),
    "lfu": lambda usage, _, __: usage.heat,
    "twice": lambda usage, _, __: usage.last + (1e12 if usage.uses > 1 else 0.0),
    "lru": lambda usage, _, __: usage.last,
}
"""`value` is headstart's own. `gdsf`: greedy dual size frequency, with decayed uses; `lfu`: decayed uses alone; `twice`: least
recently used, those used once before those used again."""
