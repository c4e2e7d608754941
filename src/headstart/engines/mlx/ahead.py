"""Ahead: a step of decoding whose graph is built while the step before it is computed.

mlx computes a graph, and Python builds it. For a small model, and beside a fast device, building takes as long as computing. A
graph depends on where its tokens stand, and not on what they are: it reads them from an array that is filled when they are
drawn. So a step is built before its tokens are known, whoever draws them.

Building appends to the caches. If another call wants a cache first, `undo` takes that back.

A model whose code looks at numbers while it builds its graph, to choose experts for example, would choose by a token that is
not there yet. It is found by a trial.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, BatchKVCache, RotatingKVCache

from headstart.engines.mlx.batch import filled, like
from headstart.engines.mlx.layers import contents, leaves

Graph = tuple[Any, list[Any]]
"""Logits of each slot, and all else that must be computed. Nothing is computed yet."""


class StepAhead:
    """One step of some slots. Its graph is built at once. Then call `start` or `undo`, once.

    Args:
        build: appends the tokens of an int32 array, (slots, 1), to the caches.
        caches: all that it appends to, without lists.
        slots: how many there are.
    """

    def __init__(self, build: Callable[[Any], Graph], caches: Sequence[Any], slots: int) -> None:
        self._held = [(leaf, _content(leaf)) for leaf in caches]
        # Not `mx.zeros`, which the device would compute after what it is doing.
        tokens = mx.array([[0]] * slots, mx.int32)
        self._tokens = np.array(tokens, copy=False)
        self._rows, self._rest = build(tokens)

    def start(self, tokens: Sequence[int]) -> Any:
        """Lets the device compute the step with these tokens. Returns the logits, which are there when they are evaluated."""
        self._held.clear()  # what nobody else holds is written in place
        self._tokens[:, 0] = tokens
        mx.async_eval(self._rows, *self._rest)  # type: ignore[no-untyped-call]
        return self._rows

    def undo(self) -> None:
        """Gives the caches what they held before."""
        for leaf, content in self._held:
            _put(leaf, content)


def _content(leaf: Any) -> Any:
    """What a cache holds. mlx changes an array object where a part of it is assigned, so these are objects of their own."""
    if isinstance(leaf, ArraysCache):
        return list(leaf.cache)
    if isinstance(leaf, RotatingKVCache | BatchKVCache):
        return [copy.copy(part) for part in leaf.state]
    return copy.copy(leaf.keys), copy.copy(leaf.values), leaf.offset


def _put(leaf: Any, content: Any) -> None:
    if isinstance(leaf, ArraysCache):
        leaf.cache = content
    elif isinstance(leaf, RotatingKVCache | BatchKVCache):
        leaf.state = content
    else:
        leaf.keys, leaf.values, leaf.offset = content


def trial(model: Callable[..., Any], fresh: Callable[[], list[Any]]) -> str:
    """Why no step of the model can be built ahead; "" if it can. `fresh`: makes the caches of a slot, of a known kind."""
    try:
        due, found = (filled(model, fresh(), _HELD) for _ in range(2))
        for token in _TRIED:
            for last in (False, True):
                step = StepAhead(lambda tokens: (model(tokens, cache=found)[:, -1], contents(found)), list(leaves(found)), 1)
                if not last:
                    step.undo()
            if not like(step.start([token])[0], model(mx.array([[token]]), cache=due)[0, -1]):
                return "it gave other logits"
    except Exception as error:  # whatever a model does with its caches
        return f"{type(error).__name__}: {error}"
    return ""


_HELD = 3  # tokens before the first step
_TRIED = (5, 37, 111)  # tokens of steps
