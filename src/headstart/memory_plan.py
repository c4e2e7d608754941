"""Memory plan: how many slots of how many tokens fit into host memory, and how much is left to store conversations. Pure.

An engine asks `fit` before it allocates its slots, because memory must be left to store conversations. When it is loaded,
`serving` asks `budget` how much that is.
"""

from __future__ import annotations

from typing import NamedTuple

from headstart.errors import ConfigError
from headstart.interfaces.host_memory import HostMemory
from headstart.names import option

MAX_SLOTS = 4
SHARE = 0.8
"""Share of the available memory that is planned for, unless the user asks for more."""
BUDGET = 4 << 30
"""Bytes to store conversations, unless restoring one needs more, or memory is short."""
_WHOLE = 2.1
"""Host memory that restores a conversation, as a multiple of its live size: it is in the cache, and in the engine's buffer."""
_GOOD_CTX = 32_768  # a longer context is not worth a slot
_LEAST_CTX = 512
_FALLBACK_CTX = 4096


class Fit(NamedTuple):
    """Tokens of a slot, and slots."""

    ctx: int
    slots: int


def fit(
    host: HostMemory,
    *,
    trained: int,
    ctx: int | None,
    slots: int | None,
    reserve: int | None,
    most: Fit | None = None,
    kv_types: bool = True,
) -> Fit:
    """Chooses the context and the slots that the user left open, and refuses what cannot work.

    Args:
        trained: tokens that the model was trained on; 0 if unknown.
        reserve: bytes that must stay free beside the slots; None for what restores one conversation, if it fits.
        most: what a device allows that has a part of the slots; None for no limit.
        kv_types: whether the user can choose a smaller type of keys and values.

    Raises:
        ConfigError: too little memory, or numbers that make no sense.
    """
    if (ctx is not None and ctx < 1) or (slots is not None and slots < 1):
        raise ConfigError(f"{option('ctx')} and {option('slots')} must be at least 1.")
    step = host.ctx_step
    whole = max(step, (trained or _FALLBACK_CTX) // step * step)
    if most is not None:
        whole = max(step, min(whole, most.ctx))
    wanted = whole if ctx is None else -(-ctx // step) * step
    good = wanted if ctx is not None else min(wanted, _GOOD_CTX)
    free = SHARE * host.available - host.fixed
    for count in [slots] if slots is not None else range(min(MAX_SLOTS, most.slots if most else MAX_SLOTS), 0, -1):
        here = host.share * count
        longest = _longest(host, here + _WHOLE, free) if reserve is None else _longest(host, here, free - reserve)
        if longest >= good:
            return Fit(min(wanted, longest), count)
    # Memory is short. The slots then get half of it, unless the user says otherwise.
    count = slots or 1
    least = wanted if ctx is not None else min(wanted, _LEAST_CTX)
    if ctx is None:
        least = max(least, min(good, _longest(host, host.share * count, free / 2 if reserve is None else free - reserve)))
    # The user asked for exactly this, or less is not possible: all of the memory may be used.
    if host.available - host.fixed - host.live(least, count) >= (reserve or 0):
        return Fit(least, count)
    beside = "" if reserve is None else f"{_gib(reserve)} for {option('memory_budget')} and "
    smaller = f"use {option('kv_type', 'q8_0')}, or" if kv_types else "or use"
    raise ConfigError(
        f"Too little memory: {_gib(host.weights)} of weights, {beside}{_gib(host.live(least, count))} for {count} × {least} "
        f"tokens do not fit into the {_gib(host.available)} available. Lower {option('memory_budget')}, {option('ctx')} or "
        f"{option('slots')}, {smaller} a smaller model."
    )


def budget(host: HostMemory | None, ctx: int, slots: int) -> int:
    """Bytes to store conversations beside `slots` slots of `ctx` tokens, if the user sets no budget.

    It is 4 GiB, or more if restoring one conversation needs it, within the planned share of memory. If the slots alone
    exceed that share, it is at most what restores one conversation.

    Args:
        host: None if the engine does not know.
    """
    if host is None:
        return BUDGET
    used, whole = host.fixed + host.live(ctx, slots), int(_WHOLE * host.size(ctx))
    planned = int(SHARE * host.available) - used
    return min(planned, max(BUDGET, whole)) if planned >= 0 else max(0, min(host.available - used, whole))


def _longest(host: HostMemory, slots: float, size: float) -> int:
    """Tokens that each of so many slots can hold in `size` bytes; a multiple of the step."""
    return max(0, int((size - slots * host.state) // max(1, slots * host.kv))) // host.ctx_step * host.ctx_step


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
