"""Batched decoding: one token of each of several slots in one call of the model.

Projections, experts and the head see all tokens at once. Attention is computed slot by slot, on the slot's own keys and values,
so nothing is copied when a slot joins or leaves. Short slots are padded instead (`padded`). States of recurrent and convolution
layers are stacked. A stack is kept as long as the same slots are decoded together.

Models call one function of mlx-lm for their attention, `scaled_dot_product_attention`. Each module has it under a name of its
own, where `open_attention` puts another. Models that compute attention in another way are found by a trial, and their slots are
decoded one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

_NAME = "scaled_dot_product_attention"
_MODELS = "mlx_lm.models."


@dataclass(frozen=True, slots=True)
class PerSlot:
    """An array of each slot, where a model expects one array: keys, values or masks."""

    arrays: list[Any]


class SlotsKV:
    """The cache of one attention layer that a model sees: those of several slots, with one new token each.

    Args:
        caches: of the slots.
        before, after: int32, (slots,): tokens that each slot has before and after the step.
    """

    def __init__(self, caches: Sequence[Any], before: Any, after: Any) -> None:
        self._caches = caches
        self._after = after
        self.offset = before

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[PerSlot, PerSlot]:
        """Appends to each slot. keys, values: (slots, heads, 1, dimension)."""
        found = [
            cache.update_and_fetch(keys[slot : slot + 1], values[slot : slot + 1]) for slot, cache in enumerate(self._caches)
        ]
        self.offset = self._after
        return PerSlot([one for one, _ in found]), PerSlot([one for _, one in found])

    def make_mask(self, count: int, **options: Any) -> PerSlot | None:
        masks = [cache.make_mask(count, **options) for cache in self._caches]
        return None if all(mask is None for mask in masks) else PerSlot(masks)


class Stacks:
    """States of several slots as one array, by layer. A stack is used again if each slot still holds its part of it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Any, list[Any]]] = {}

    def join(self, place: tuple[int, int], parts: list[Any]) -> Any:
        """The arrays of the slots, one after the other. `place`: of the layer, and of the array in it."""
        stack, given = self._kept.get(place, (None, []))
        if len(given) == len(parts) and all(one is part for one, part in zip(given, parts, strict=True)):
            return stack
        return mx.concatenate(parts)

    def split(self, place: tuple[int, int], stack: Any, slots: int) -> list[Any]:
        """Each slot's part of a stack. It is not computed before someone needs it."""
        parts = [stack[slot : slot + 1] for slot in range(slots)]
        self._kept[place] = (stack, parts)
        return parts


def decode(
    model: Callable[..., Any],
    slots: Sequence[Sequence[Any]],
    lengths: Sequence[int],
    tokens: Any,
    stacks: Stacks,
    padded: Sequence[Any] = (),
) -> tuple[Any, list[Any]]:
    """Appends one token to each slot. Nothing is computed yet.

    Args:
        slots: the caches of each slot, one a layer.
        lengths: tokens that each slot holds, at least one.
        tokens: int32, (slots, 1).
        stacks: from the last call, or new.
        padded: caches with the KV of all slots, one for each layer that has KV by token, in place of the slots' own; or none.

    Returns:
        Logits, (slots, vocabulary), and what must be computed beside them.
    """
    before = mx.array(list(lengths), mx.int32)
    after = before + 1
    stacked: list[tuple[Any, Sequence[Any]]] = []
    joint = iter(padded)

    def layer(parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], CacheList):
            return CacheList(*(layer(leaves) for leaves in zip(*(part.caches for part in parts), strict=True)))
        if padded and isinstance(parts[0], KVCache):
            return next(joint)
        if not isinstance(parts[0], ArraysCache):
            return SlotsKV(parts, before, after)
        joined = ArraysCache(len(parts[0].cache))
        joined.cache = [
            stacks.join((len(stacked), number), [part[number] for part in parts]) for number in range(len(joined.cache))
        ]
        stacked.append((joined, parts))
        return joined

    caches = [layer(parts) for parts in zip(*slots, strict=True)]
    out = model(tokens, cache=caches)[:, -1]
    for place, (joined, parts) in enumerate(stacked):
        for number, stack in enumerate(joined.cache):
            for part, piece in zip(parts, stacks.split((place, number), stack, len(parts)), strict=True):
                part[number] = piece
    return out, [stack for joined, _ in stacked for stack in joined.cache]


def open_attention() -> None:
    """Lets the models that were imported attend slot by slot where they get keys of several slots. Idempotent."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_MODELS) and vars(module).get(_NAME) is _ATTENTION:
            setattr(module, _NAME, _attention)


_ATTENTION = base.scaled_dot_product_attention


def _attention(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **others: Any) -> Any:
    if not isinstance(keys, PerSlot):
        return _ATTENTION(queries, keys, values, cache, scale=scale, mask=mask, **others)
    masks = mask.arrays if isinstance(mask, PerSlot) else [mask] * len(keys.arrays)
    found = [
        _ATTENTION(queries[slot : slot + 1], one, other, cache, scale=scale, mask=seen, **others)
        for slot, (one, other, seen) in enumerate(zip(keys.arrays, values.arrays, masks, strict=True))
    ]
    return mx.concatenate(found)


def trial(model: Callable[..., Any], fresh: Callable[[], list[Any]]) -> str:
    """Why the model cannot be decoded in batches; "" if it can. `fresh`: makes the caches of a slot.

    Two slots of different lengths are decoded together. Their logits must be those of each alone, apart from rounding.
    """
    try:
        alone, together = ([filled(model, fresh(), count) for count in _TRIED] for _ in range(2))
        due = [model(mx.array([[count]]), cache=one)[0, -1] for count, one in zip(_TRIED, alone, strict=True)]
        found, _ = decode(model, together, _TRIED, mx.array(_TRIED, mx.int32)[:, None], Stacks())
        same = [like(one, other) for one, other in zip(found, due, strict=True)]
        return "" if all(same) else "a batch of two gave other logits"
    except Exception as error:  # whatever a model does with its caches
        return f"{type(error).__name__}: {error}"


_TRIED = (3, 37)  # tokens of the slots, and the token that follows in each
_TOLERANCE = 0.05  # of the standard deviation of the logits: 16-bit numbers are rounded by some thousandths


def like(found: Any, due: Any) -> bool:
    """Whether two arrays of logits are the same, apart from rounding."""
    due = due.astype(mx.float32)
    return bool((mx.abs(found - due).max() < _TOLERANCE * mx.std(due)).item())


def filled(model: Callable[..., Any], caches: list[Any], count: int) -> list[Any]:
    """The caches, with so many tokens."""
    model(mx.arange(count)[None] + 1, cache=caches)
    return caches
