"""Sampler: llama.cpp's sampler chain for one reply, in llama-server's order."""

from __future__ import annotations

import ctypes
import secrets
from typing import Any

import numpy as np

from headstart.engines.constraint import Constraint
from headstart.engines.llama.binding import lib, ready
from headstart.errors import EngineError
from headstart.interfaces.engine import Logits
from headstart.interfaces.sampling import SEEDS, Sampling

_COLDEST = 1e-6
"""At lower temperatures logits divided by the temperature would overflow, so sampling is greedy."""


class LlamaSampler:
    """One reply's chain. Its penalties see the tokens that it drew itself, and no prompt.

    Args:
        constraint: limits the reply to a grammar; only `draw` obeys it.
        ctx: tokens a sequence can hold, which a penalty over the whole reply looks at.
    """

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None, *, n_vocab: int, ctx: int) -> None:
        self.constraint = constraint
        self._candidates = np.zeros(n_vocab if constraint else 0, np.dtype(lib.llama_token_data))
        data = self._candidates.ctypes.data_as(lib.llama_token_data_p)
        self._array: Any = lib.llama_token_data_array(data=data)
        params = lib.llama_sampler_chain_default_params()
        params.no_perf = True
        self.chain: Any = lib.llama_sampler_chain_init(params)
        for link in _links(sampling, n_vocab, ctx):
            lib.llama_sampler_chain_add(self.chain, link)

    def draw(self, constraint: Constraint, logits: Logits) -> int:
        """Chooses among the tokens that the constraint allows, and lets it and the chain remember the choice.

        The chain sees those tokens only: often there are few, and then it is faster than without a constraint.
        Raises EngineError.
        """
        allowed = constraint.allowed()
        candidates = self._candidates[: len(allowed)]
        candidates["id"] = allowed
        candidates["logit"] = logits.take(allowed)
        array = self._array
        array.size, array.selected, array.sorted = len(allowed), -1, False
        lib.llama_sampler_apply(self.chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        lib.llama_sampler_accept(self.chain, token)
        constraint.take(token)
        return token

    def close(self) -> None:
        if self.chain is not None:
            lib.llama_sampler_free(self.chain)
            self.chain = None

    def __del__(self) -> None:
        self.close()


def _links(sampling: Sampling, n_vocab: int, ctx: int) -> list[Any]:
    links: list[Any] = []
    if sampling.logit_bias:
        biases = (lib.llama_logit_bias * len(sampling.logit_bias))(*sampling.logit_bias)
        links.append(lib.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))
    penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if penalties != (1.0, 0.0, 0.0) and sampling.penalty_last_n:
        last = sampling.penalty_last_n if 0 < sampling.penalty_last_n < ctx else ctx
        links.append(_penalise(n_vocab, last, penalties))
    if sampling.temperature < _COLDEST:
        return [*links, lib.llama_sampler_init_greedy()]
    if 0 < sampling.top_k < n_vocab:
        links.append(lib.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1:
        links.append(lib.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0:
        links.append(lib.llama_sampler_init_min_p(sampling.min_p, 1))
    links.append(lib.llama_sampler_init_temp(sampling.temperature))
    seed = secrets.randbelow(SEEDS) if sampling.seed is None else sampling.seed % SEEDS
    return [*links, lib.llama_sampler_init_dist(seed)]


def _penalise(n_vocab: int, last: int, penalties: tuple[float, float, float]) -> Any:
    penalise = ready().abi.penalise
    if penalise is None:
        raise EngineError("this build of llama.cpp cannot penalise repetition")
    return penalise(n_vocab, last, *penalties)
