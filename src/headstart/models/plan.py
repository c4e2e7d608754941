"""Plan: how much memory each model may use, and which model gives way to another. Pure.

There is one budget of host memory for all models: weights, slots and stored conversations. A model is loaded only when it fits
beside those that hold memory. If it does not, the least valuable models give way: first idle ones, and busy ones only after
the request has waited for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.errors import ConfigError
from headstart.names import option
from headstart.units import show_size

KEEP = 3
"""Most loaded models, if the user does not say how many."""
LEAST_REST = 512 << 20
"""Bytes for slots and stored conversations that each model must have, before more models are kept."""
HALF_LIFE = 600.0
"""Seconds after which a request counts half as much for the value of its model."""


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """How a budget is shared.

    Attributes:
        total: bytes for all models.
        keep: most models that are loaded at the same time.
        rest: bytes of each loaded model beside its weights, at most.
        together: weights of the largest models that may be loaded at the same time; empty if it is one model at a time.
        wanted: `keep` as the user gave it; None if it follows from the models.
    """

    total: int
    keep: int
    rest: int
    together: tuple[int, ...] = ()
    wanted: int | None = None

    @classmethod
    def of(cls, total: int, weights: Sequence[int], wanted: int | None = None) -> MemoryShares:
        """The shares of models with these weights, in bytes. Any `keep` of them fit if the largest do.

        A model that is too large to be loaded, or to be loaded beside another, changes nothing for those that can be.

        Raises:
            ConfigError: not even the smallest model fits.
        """
        largest = sorted((size for size in weights if size < total), reverse=True)
        if not largest:
            raise ConfigError(
                f"Too little memory: {show_size(total)} for all models, and the smallest has {show_size(min(weights))} of "
                f"weights. Give more {option('memory')}, or use a smaller model."
            )
        beside = 2 * LEAST_REST if wanted is None else 0
        while len(largest) > 1 and largest[0] + largest[-1] + beside > total:
            largest.pop(0)
        most = min(KEEP, len(largest))
        fitting = (count for count in range(most, 1, -1) if sum(largest[:count]) + count * LEAST_REST <= total)
        keep = wanted or next(fitting, 1)
        held = largest[: min(keep, len(largest))]
        if len(held) == 1:
            return cls(total, keep, total, wanted=wanted)
        left = total - sum(held)
        # If the largest models do not fit together, others still may: memory decides which ones.
        rest = left // len(held) if left >= len(held) * LEAST_REST else min(LEAST_REST, (total - largest[-1]) // len(held))
        return cls(total, keep, rest, tuple(held), wanted)

    def shared_by(self, weights: Sequence[int]) -> MemoryShares:
        """The shares of the same memory for other models."""
        return MemoryShares.of(self.total, weights, self.wanted)

    def of_model(self, weights: int) -> int:
        """Bytes that a model with these weights may use."""
        return min(weights + self.rest, self.total)

    def holds(self, weights: int) -> bool:
        """Whether a model with these weights can be loaded at all."""
        return weights < self.total


@dataclass(frozen=True, slots=True)
class ModelUse:
    """How much a model is used. `count` is the number of its requests, each halved with every `HALF_LIFE` since `at`."""

    count: float = 0.0
    at: float = 0.0

    def used(self, now: float) -> ModelUse:
        return ModelUse(self.rate(now) + 1.0, now)

    def rate(self, now: float) -> float:
        return float(self.count * 0.5 ** (max(0.0, now - self.at) / HALF_LIFE))


@dataclass(frozen=True, slots=True)
class Holder:
    """A model that holds memory.

    Attributes:
        need: its bytes.
        value: seconds that keeping it saves, times the chance that they are saved, per byte.
        leaving: whether it is being unloaded, or is drained to be.
        idle: whether it can be unloaded at once.
        ready: whether it has been loaded.
    """

    name: str
    need: int
    value: float
    leaving: bool = False
    idle: bool = False
    ready: bool = True


def value_of(rate: float, load_seconds: float, need: int) -> float:
    """The value of a loaded model: the only currency of the cache, seconds saved per byte, times the chance of use."""
    return rate * max(load_seconds, 1e-3) / max(need, 1)


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """What to do so that a model can be loaded.

    Attributes:
        fits: whether it can be loaded now.
        unload: idle models to unload, in order.
        drain: busy models that take no further requests, in order.
    """

    fits: bool = False
    unload: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()


def place(need: int, holders: Sequence[Holder], total: int, keep: int, *, urgent: bool) -> ModelPlacement:
    """How to place a model that needs `need` bytes beside the holders.

    Args:
        urgent: whether a busy model must give way if no idle one can.
    """
    if _fits(need, holders, total, keep):
        return ModelPlacement(fits=True)
    left = [holder for holder in holders if not holder.leaving]
    by_value = sorted(left, key=lambda holder: holder.value)
    idle = [holder for holder in by_value if holder.idle]
    busy = [holder for holder in by_value if holder.ready and not holder.idle] if urgent else []
    chosen: list[Holder] = []
    for holder in (*idle, *busy):
        if _fits(need, left, total, keep):
            break
        left.remove(holder)
        chosen.append(holder)
    # Without `urgent` idle models give way even if that is not enough: they are the first to go in any case.
    return ModelPlacement(
        unload=tuple(holder.name for holder in chosen if holder.idle),
        drain=tuple(holder.name for holder in chosen if not holder.idle),
    )


def _fits(need: int, holders: Sequence[Holder], total: int, keep: int) -> bool:
    return len(holders) < keep and sum(holder.need for holder in holders) + need <= total
