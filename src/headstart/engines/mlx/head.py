"""Head: logits of a call's last token only.

mlx-lm's models compute logits for all tokens of a call. For 512 tokens and a vocabulary of 150,000 these are 300 MB, and much
of the work of a small model. The last layer of a model is a linear layer, `lm_head`, or the embedding the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

_LINEAR, _TIED = "__call__", "as_linear"
_TOLERANCE = 0.05  # of the standard deviation of the logits


def only_last(model: Any, fresh: Callable[[], list[Any]]) -> bool:
    """Lets the model compute logits of the last token only, if that gives the same ones apart from rounding.

    Args:
        fresh: makes the caches of a slot.
    """
    tokens = mx.arange(4)[None]
    due = model(tokens, cache=fresh())[0, -1].astype(mx.float32)
    heads = [(module, _LINEAR) for name, module in model.named_modules() if name.rpartition(".")[2] == "lm_head"]
    heads += [(module, _TIED) for _, module in model.named_modules() if hasattr(module, _TIED)]
    kinds = [type(module) for module, _ in heads]
    for (module, method), kind in zip(heads, kinds, strict=True):
        module.__class__ = _of_last_token(kind, method)
    found = model(tokens, cache=fresh())
    if found.shape[1] == 1 and (mx.abs(found[0, -1].astype(mx.float32) - due).max() < _TOLERANCE * mx.std(due)).item():
        return True
    for (module, _), kind in zip(heads, kinds, strict=True):
        module.__class__ = kind
    return False


def _of_last_token(kind: type, method: str) -> type:
    """A kind of layer that computes the last token only, in a call of `method`."""
    whole = getattr(kind, method)
    return type(kind.__name__, (kind,), {method: lambda layer, tokens: whole(layer, tokens[..., -1:, :])})
