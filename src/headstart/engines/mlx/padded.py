"""Padded: the KV of several slots as one array a layer, while they are decoded together.

Attention by slot needs several calls of the library for each slot and layer. While contexts are short, the calls take longer
than what they compute. So short slots of similar lengths are decoded in mlx-lm's own batch: one array, where the shorter slots
have zeros in front that a mask hides. It is a copy. The slots keep their tokens, and get the new ones when another call wants
one of them.

A slot's bits may depend on its neighbours then, as they do with any batch on a fast device. The proof of decoding does not see
padded batches, so they are for models only whose decoding has not the bits of prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from headstart.engines.mlx.batch import Stacks, decode, filled, like
from headstart.engines.mlx.layers import STEP, Form, contents, kv_leaves, reserve, set_length

MOST_BYTES = 128 << 20
"""Of the KV of a padded batch. Longer slots are decoded without padding: there the calls take little of the time."""
_MOST_PADDING = 0.5  # of all tokens of a batch


class PaddedKV:
    """The KV of several slots, one array a layer. Nothing is computed yet.

    Args:
        slots: the caches of each slot. They get the tokens of the batch in `give_back`.
        lengths: tokens that each holds.
    """

    def __init__(self, slots: Sequence[Sequence[Any]], lengths: Sequence[int]) -> None:
        self._slots, self._lengths = list(slots), list(lengths)
        self.layers = [KVCache.merge(parts) for parts in self._by_layer()]

    def give_back(self, most: int, form: Form) -> None:
        """Appends to the caches of each slot what was decoded since. If that fails, it can be done again.

        Args:
            most: tokens that a slot may ever hold.
        """
        new = self.layers[0].size() - max(self._lengths)
        for caches, length in zip(self._slots, self._lengths, strict=True):
            set_length(caches, length)
            reserve(caches, length + new, most, form)
        for layer, parts in zip(self.layers, self._by_layer(), strict=True):
            keys, values, _, _, end = layer.state
            for slot, part in enumerate(parts):
                part.update_and_fetch(*(array[slot : slot + 1, :, end - new : end] for array in (keys, values)))
        mx.eval([contents(caches) for caches in self._slots])

    def _by_layer(self) -> Iterator[tuple[Any, ...]]:
        return zip(*(kv_leaves(caches) for caches in self._slots), strict=True)


def worthwhile(lengths: Sequence[int], kv_bytes_per_token: int) -> bool:
    """Whether slots of these lengths should be decoded as a padded batch."""
    longest, slots = max(lengths), len(lengths)
    small = 0 < slots * (longest + STEP) * kv_bytes_per_token <= MOST_BYTES
    return slots > 1 and small and slots * longest - sum(lengths) <= _MOST_PADDING * slots * longest


def trial(model: Callable[..., Any], fresh: Callable[[], list[Any]], form: Form) -> str:
    """Why slots cannot be decoded as a padded batch; "" if they can. `fresh`: makes the caches of a slot.

    Their logits must be those of each alone, apart from rounding, also behind tokens that they got back.
    """
    if not form.planes:
        return ""
    try:
        alone, together = ([filled(model, fresh(), count) for count in _TRIED] for _ in range(2))
        padded, stacks, lengths = PaddedKV(together, _TRIED), Stacks(), list(_TRIED)
        for step in range(3):
            tokens = [length + step for length in _TRIED]
            due = [model(mx.array([[token]]), cache=one)[0, -1] for token, one in zip(tokens, alone, strict=True)]
            found, _ = decode(model, together, lengths, mx.array(tokens, mx.int32)[:, None], stacks, padded.layers)
            if not all(like(one, other) for one, other in zip(found, due, strict=True)):
                return "a padded batch of two gave other logits"
            lengths = [length + 1 for length in lengths]
            if step == 1:
                padded.give_back(STEP, form)
                padded = PaddedKV(together, lengths)
    except Exception as error:  # whatever a model does with its caches
        return f"{type(error).__name__}: {error}"
    return ""


_TRIED = (3, 37)  # tokens of the slots
