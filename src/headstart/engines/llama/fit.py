"""Fit: how many slots, how many tokens in each, and how much for what no slot holds: what memory has room for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.errors import ConfigError
from headstart.names import option

UNIT = 256
"""llama.cpp rounds a sequence's context up to a multiple of this."""
MAX_SLOTS = 4
SHARE = 0.8
"""Of the available memory: what is planned for unless the user asks for more."""
BUDGET = 4 << 30
"""Bytes for what no slot holds, unless one conversation needs more to come back, or memory is short."""
_WHOLE = 2.1
"""Of a conversation's rows: what brings it back whole. They lie in cells, and again in the engine's own buffer."""
_SPARE = 128 << 20  # compute buffers and the interpreter
_GOOD_CTX = 32_768  # a longer context is not worth a slot
_LEAST_CTX = 512
_FALLBACK_CTX = 4096


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes: weights; rows of one token; constant state of one slot; what is available."""

    weights: int
    row: int
    state: int
    available: int

    def slots(self, ctx: int, slots: int) -> int:
        """Bytes of `slots` × `ctx` live tokens."""
        return slots * (self.state + ctx * self.row)

    def budget(self, ctx: int) -> int:
        """Bytes for what no slot holds, if there is room."""
        return max(BUDGET, self.whole(ctx))

    def whole(self, ctx: int) -> int:
        """Bytes that bring back a conversation of `ctx` tokens."""
        return int(_WHOLE * self.slots(ctx, 1))

    def room(self, slots: float, bytes: float) -> int:
        """Tokens that a slot can hold if so many slots take `bytes`; a multiple of UNIT."""
        free = bytes - slots * self.state
        return max(0, int(free // max(1, slots * self.row))) // UNIT * UNIT


@dataclass(frozen=True, slots=True)
class Fit:
    """Tokens of a slot, slots, and bytes for what no slot holds."""

    ctx: int
    slots: int
    budget: int


def fit(needs: Needs, *, trained: int, ctx: int | None, slots: int | None, budget: int | None) -> Fit:
    """Chooses what the user left open; refuses what cannot work.

    Args:
        trained: tokens that the model was trained on; 0 if unknown.
        budget: bytes for what no slot holds.

    Raises:
        ConfigError: too little memory, or no sense in the numbers.
    """
    if (ctx is not None and ctx < 1) or (slots is not None and slots < 1):
        raise ConfigError(f"{option('ctx')} and {option('slots')} must be at least 1.")
    whole = max(UNIT, (trained or _FALLBACK_CTX) // UNIT * UNIT)
    wanted = whole if ctx is None else -(-ctx // UNIT) * UNIT
    good = wanted if ctx is not None else min(wanted, _GOOD_CTX)
    free = SHARE * needs.available - needs.weights - _SPARE
    for count in [slots] if slots is not None else range(MAX_SLOTS, 0, -1):
        room = needs.room(count + _WHOLE, free) if budget is None else needs.room(count, free - budget)
        if room >= good:
            found = min(wanted, room)
            rest = int(free) - needs.slots(found, count)
            return Fit(found, count, min(rest, needs.budget(found)) if budget is None else budget)
    # Memory is short. Then slots have half of it, if nobody says otherwise.
    count = slots or 1
    least = wanted if ctx is not None else min(wanted, _LEAST_CTX)
    if ctx is None:
        least = max(least, min(good, needs.room(count, free / 2 if budget is None else free - budget)))
    # Asked for in so many words, or the least there can be: then all of the memory may be used.
    for left, most in ((free, needs.budget(least)), (needs.available - needs.weights - _SPARE, needs.whole(least))):
        rest = int(left) - needs.slots(least, count)
        if rest >= (budget or 0):
            return Fit(least, count, min(rest, most) if budget is None else budget)
    beside = "" if budget is None else f"{_gib(budget)} for {option('memory_budget')} and "
    raise ConfigError(
        f"Too little memory: {_gib(needs.weights)} of weights, {beside}{_gib(needs.slots(least, count))} for {count} × {least} "
        f"tokens do not fit into the {_gib(needs.available)} available. Lower {option('memory_budget')}, {option('ctx')} or "
        f"{option('slots')}, use {option('kv_type', 'q8_0')}, or a smaller model."
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
