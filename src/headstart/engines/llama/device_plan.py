"""Device plan: which layers go to a GPU, and how many slots of how many tokens its memory allows. Pure.

A layer's KV is where its weights are. A *discrete* GPU has memory of its own. A *unified* one uses the host's: there layers
cost nothing more, and the host's plan (`memory_plan`) decides about slots. Where several models are loaded, each has a part of
a discrete GPU. Sizes are estimates, so a margin stays free. No machine with a GPU was at hand when this was written: the
margins are not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

ALL = -1
"""llama.cpp's number of layers for all of them, with the output."""
MARGIN = 0.9
"""Share of a device's free memory that is planned for."""
BUFFERS = 512 << 20
"""Bytes for computing, on the device."""
MOST_SLOTS = 4
GOOD_CTX, LEAST_CTX = 32_768, 8192
"""A slot need not have more tokens; with fewer, layers are left on the host."""


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes, in bytes.

    Attributes:
        layers: that repeat. The output counts as one more.
        kv: of one token, in all layers.
        trained: tokens that it was trained on.
        step: a slot's context is a multiple of this many tokens.
    """

    weights: int
    layers: int
    kv: int
    trained: int
    step: int = 256

    def each(self, tokens: int) -> float:
        """Bytes of a layer with the KV of so many tokens."""
        return self.weights / (self.layers + 1) + self.kv * tokens / max(1, self.layers)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU: its name, the bytes that a model may use, which are free, and whether they are the host's memory."""

    name: str
    free: int
    unified: bool

    @property
    def usable(self) -> int:
        return max(0, int(MARGIN * self.free) - BUFFERS)


def part(total: int, weights: int, together: Sequence[int]) -> int:
    """Bytes of a device for one of several models, so that no loaded model takes what another one needs.

    It is what the model's weights take, and an equal part of the rest. If the weights of all do not fit, it is as large a part
    as that of the model's weights. The parts of models are together at most `total`, if there are no more of them than in
    `together`.

    Args:
        total: bytes of the device.
        weights: bytes of the model's weights.
        together: bytes of weights of the largest models that are loaded at the same time; empty for a model alone.
    """
    if not together:
        return total
    rest = int(MARGIN * total) - len(together) * BUFFERS - sum(together)
    if rest < 0:
        return total * weights // max(1, *together, sum(together))
    return int((weights + rest // len(together) + BUFFERS) / MARGIN)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What goes to a GPU.

    Attributes:
        layers: on the device, `ALL` or a number; 0 for none.
        share: of weights and slots on the device, from 0 to 1.
        ctx, slots: the most that the device allows; None if it sets no limit.
        bytes: planned on the device, without buffers, for `ctx` tokens in each of `slots` slots.
    """

    device: DeviceMemory
    layers: int
    share: float
    ctx: int | None
    slots: int | None
    bytes: int

    @property
    def host_share(self) -> float:
        """Share of weights and slots in host memory."""
        return 1.0 if self.device.unified else 1.0 - self.share


def plan(
    needs: ModelNeeds, device: DeviceMemory, *, ctx: int | None = None, slots: int | None = None, layers: int | None = None
) -> DevicePlan:
    """The layers for a device, and what it allows beside them.

    Args:
        ctx, slots, layers: what the user chose; None for what fits. Given layers are used whether they fit or not.
    """
    whole = max(needs.step, needs.trained // needs.step * needs.step)
    wanted = whole if ctx is None else -(-ctx // needs.step) * needs.step
    if device.unified:
        count = _count(needs, layers, device.usable, min(wanted, LEAST_CTX) if ctx is None else wanted * (slots or 1))
        return _planned(needs, device, count, None, None)
    most = needs.layers + 1 if layers is None else _number(needs, layers)
    good, least = (wanted, wanted) if ctx is not None else (min(wanted, GOOD_CTX), min(wanted, LEAST_CTX))
    for length in (good, least):
        for number in [slots] if slots is not None else range(MOST_SLOTS, 0, -1):
            longest = _longest(needs, device.usable, most, number)
            if longest >= length:
                return _planned(needs, device, most, min(wanted, longest), number)
    number = slots or 1
    return _planned(needs, device, _count(needs, layers, device.usable, least * number), least, number)


def alternatives(
    needs: ModelNeeds, device: DeviceMemory, *, ctx: int | None, slots: int | None, kv_type: str
) -> dict[str, DevicePlan]:
    """What other settings would give, by setting; only those that differ from the plan."""
    now = plan(needs, device, ctx=ctx, slots=slots)
    tried = {
        "one slot": plan(needs, device, ctx=ctx, slots=1),
        f"at most {LEAST_CTX} tokens": plan(needs, device, ctx=min(LEAST_CTX, ctx or LEAST_CTX), slots=slots),
    }
    if kv_type != "q8_0":
        smaller = replace(needs, kv=needs.kv * 17 // 32)  # 34 bytes for 32 numbers of 2 bytes
        tried["KV of type q8_0"] = plan(smaller, device, ctx=ctx, slots=slots)
    return {
        name: found
        for name, found in tried.items()
        if (found.layers, found.ctx, found.slots) != (now.layers, now.ctx, now.slots)
    }


def _number(needs: ModelNeeds, layers: int) -> int:
    """Layers as a number, the output among them."""
    return needs.layers + 1 if layers < 0 else min(layers, needs.layers + 1)


def _count(needs: ModelNeeds, layers: int | None, usable: int, tokens: int) -> int:
    """Layers that fit with the KV of so many tokens; what the user chose, if anything."""
    if layers is not None:
        return _number(needs, layers)
    if needs.weights + needs.kv * tokens <= usable:
        return needs.layers + 1
    return min(needs.layers, int(usable / needs.each(tokens)))


def _longest(needs: ModelNeeds, usable: int, count: int, slots: int) -> int:
    """Tokens that each slot can hold beside `count` layers."""
    left = usable - needs.weights * count / (needs.layers + 1)
    each = slots * needs.kv * min(count, needs.layers) / max(1, needs.layers)
    if left < 0:
        return 0
    return int(left / each) // needs.step * needs.step if each else needs.trained


def _planned(needs: ModelNeeds, device: DeviceMemory, count: int, ctx: int | None, slots: int | None) -> DevicePlan:
    share = count / (needs.layers + 1)
    live = needs.kv * (ctx or 0) * (slots or 0) * min(count, needs.layers) // max(1, needs.layers)
    return DevicePlan(
        device,
        ALL if count > needs.layers else count,
        share,
        ctx if count else None,
        slots if count else None,
        int(needs.weights * share) + live,
    )
