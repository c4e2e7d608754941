"""Fit: how many slots, and how many tokens in each, memory has room for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.errors import ConfigError

UNIT = 256
"""llama.cpp rounds a sequence's context up to a multiple of this."""
MAX_SLOTS = 4
SHARE = 0.8
"""Of the available memory: what is planned for unless the user asks for more."""
_SPARE = 128 << 20  # compute buffers and the interpreter
_GOOD_CTX = 32_768  # a longer context is not worth a slot
_LEAST_CTX = 512
_FALLBACK_CTX = 4096


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes: weights; rows of one token; constant state of one slot; the rows that no slot holds; what is available."""

    weights: int
    row: int
    state: int
    budget: int
    available: int

    def total(self, ctx: int, slots: int) -> int:
        """Bytes for `slots` × `ctx` tokens, with the buffer that moves one slot's rows and state."""
        return self.weights + _SPARE + self.budget + (slots + 1) * (self.state + ctx * self.row)

    def room(self, slots: int, limit: float) -> int:
        """Tokens a slot can hold if everything together stays below `limit`; a multiple of UNIT."""
        free = limit - self.total(0, slots)
        return max(0, int(free // max(1, (slots + 1) * self.row))) // UNIT * UNIT


@dataclass(frozen=True, slots=True)
class Fit:
    ctx: int
    slots: int


def fit(needs: Needs, *, trained: int, ctx: int | None, slots: int | None) -> Fit:
    """Chooses what the user left open; refuses what cannot work.

    Args:
        trained: tokens that the model was trained on; 0 if unknown.

    Raises:
        ConfigError: too little memory, or no sense in the numbers.
    """
    if (ctx is not None and ctx < 1) or (slots is not None and slots < 1):
        raise ConfigError("--ctx and --slots must be at least 1.")
    whole = max(UNIT, (trained or _FALLBACK_CTX) // UNIT * UNIT)
    wanted = whole if ctx is None else -(-ctx // UNIT) * UNIT
    limit = SHARE * needs.available
    good = wanted if ctx is not None else min(wanted, _GOOD_CTX)
    candidates = [slots] if slots is not None else range(MAX_SLOTS, 0, -1)
    for count in candidates:
        if needs.room(count, limit) >= good:
            return Fit(min(wanted, needs.room(count, limit)), count)
    count = slots or 1
    if ctx is None and (room := min(wanted, needs.room(count, limit))) >= min(wanted, _LEAST_CTX):
        return Fit(room, count)
    # Asked for in so many words: then all of the memory may be used.
    least = wanted if ctx is not None else min(wanted, _LEAST_CTX)
    if needs.total(least, count) <= needs.available:
        return Fit(least, count)
    raise ConfigError(
        f"Too little memory: {_gib(needs.weights)} of weights, {_gib(needs.budget)} for --memory-budget and "
        f"{_gib((count + 1) * (least * needs.row + needs.state))} for {count} × {least} tokens do not fit into the "
        f"{_gib(needs.available)} available. Lower --memory-budget, --ctx or --slots, use --kv-type q8_0, or a smaller model."
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
