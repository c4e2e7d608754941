"""Sampler in numpy: draws tokens from logits on the host, in llama-server's order, for engines without a sampler of their own.

    logit bias → penalties → (grammar) → top-k → top-p → min-p → temperature → draw

Draws with the same seed differ from llama.cpp's, because the random numbers do. They are the same on every machine.
"""

from __future__ import annotations

import secrets
from collections import Counter

import numpy as np
import numpy.typing as npt

from headstart.engines.constraint import Constraint
from headstart.interfaces.engine import Logits
from headstart.interfaces.sampling import SEEDS, Sampling

Scores = npt.NDArray[np.float32] | npt.NDArray[np.float64]
_GROUP = 64  # scores
COLDEST = 1e-6
"""Below this temperature the most likely token is taken."""


class NumpySampler:
    """One reply's sampling state. Its penalties see the tokens that it drew itself, and no prompt.

    Args:
        constraint: limits the reply to a grammar.
    """

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None) -> None:
        self._sampling = sampling
        self._constraint = constraint
        seed = secrets.randbelow(SEEDS) if sampling.seed is None else sampling.seed % SEEDS
        self._random = np.random.default_rng(seed)
        self._drawn: list[int] = []

    def draw(self, logits: Logits) -> int:
        """Chooses a token and remembers it. Raises EngineError if the grammar became too expensive to follow."""
        scores = self._changed(logits)
        token = int(scores.argmax()) if self._sampling.temperature < COLDEST else self._choose(scores)
        if self._constraint is not None:
            self._constraint.take(token)
        self._drawn.append(token)
        return token

    def close(self) -> None:
        return

    def _changed(self, logits: Logits) -> Scores:
        """The logits after bias, penalties and grammar. Not a copy if there is none of them."""
        sampling = self._sampling
        penalties = (sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)
        if not (sampling.logit_bias or penalties or self._constraint):
            return logits
        scores = logits.astype(np.float64)
        for token, bias in sampling.logit_bias:
            if 0 <= token < len(scores):
                scores[token] += bias
        if penalties:
            self._penalise(scores)
        if self._constraint is not None:
            self._constraint.mask(scores)
        return scores

    def _penalise(self, scores: npt.NDArray[np.float64]) -> None:
        sampling = self._sampling
        last = sampling.penalty_last_n
        seen = Counter(self._drawn if last < 0 else self._drawn[len(self._drawn) - min(last, len(self._drawn)) :])
        for token, times in seen.items():
            score = scores[token]
            score = score * sampling.repeat_penalty if score <= 0 else score / sampling.repeat_penalty
            scores[token] = score - times * sampling.frequency_penalty - sampling.presence_penalty

    def _choose(self, scores: Scores) -> int:
        sampling = self._sampling
        tokens = largest(scores, sampling.top_k or len(scores))
        kept = scores[tokens].astype(np.float64)
        kept = kept[kept > -np.inf]
        odds = _odds(kept)
        if sampling.top_p < 1:
            kept = kept[: int(np.searchsorted(np.cumsum(odds), sampling.top_p)) + 1]
            odds = _odds(kept)
        if sampling.min_p > 0:
            kept = kept[odds >= sampling.min_p * odds[0]]
        return int(self._random.choice(tokens[: len(kept)], p=_odds(kept / sampling.temperature)))


def largest(scores: Scores, count: int) -> npt.NDArray[np.intp]:
    """Where the `count` largest scores are, the largest first, and equal ones in their order. Cheap for few of many."""
    tops = scores[: len(scores) // _GROUP * _GROUP].reshape(-1, _GROUP).max(axis=1)
    if len(tops) > count:
        least = np.partition(tops, len(tops) - count)[len(tops) - count]  # so many groups have a score that is not less
        found = np.flatnonzero(scores >= least)
    else:
        found = np.arange(len(scores))
    return found[np.argsort(-scores[found], kind="stable")][:count]


def _odds(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    odds: npt.NDArray[np.float64] = np.exp(scores - scores[0])
    odds /= odds.sum()
    return odds
