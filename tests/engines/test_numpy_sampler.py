"""The sampler in numpy chooses what llama.cpp's chain would choose from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headstart.engines.numpy_sampler import NumpySampler, largest
from headstart.interfaces.sampling import GREEDY, Sampling

LOGITS = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def drawn(sampling: Sampling, times: int = 400) -> set[int]:
    return {NumpySampler(replace(sampling, seed=seed)).draw(LOGITS) for seed in range(times)}


@pytest.mark.parametrize(
    ("change", "possible"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.45}, {0}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"logit_bias": ((0, -np.inf), (1, -np.inf))}, {2, 3, 4}),
        ({"temperature": 0.0}, {0}),
        ({"temperature": 1e-8}, {0}),
        ({"top_k": 3, "min_p": 0.35}, {0, 1}),
    ],
)
def test_what_can_be_drawn(change: dict[str, object], possible: set[int]) -> None:
    assert drawn(replace(PLAIN, **change)) == possible  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 7, 40, 150, 999, 1000])
def test_largest_is_a_sort(count: int) -> None:
    dice = np.random.default_rng(count)
    for scores in (dice.normal(size=1000), dice.integers(0, 5, 1000), np.where(dice.random(1000) < 0.01, 1.0, -np.inf)):
        found = largest(scores.astype(np.float32), count)
        assert np.array_equal(found, np.argsort(-scores, kind="stable")[:count])


def test_odds() -> None:
    sampler = NumpySampler(PLAIN)
    times = np.bincount([sampler.draw(LOGITS) for _ in range(4_000)], minlength=5) / 4_000
    assert np.abs(times - np.exp(LOGITS)).max() < 0.04


def test_a_seed_repeats_its_draws() -> None:
    first, second = NumpySampler(PLAIN), NumpySampler(PLAIN)
    assert [first.draw(LOGITS) for _ in range(50)] == [second.draw(LOGITS) for _ in range(50)]


def test_penalties_look_at_the_reply() -> None:
    sampler = NumpySampler(replace(GREEDY, frequency_penalty=1.0, presence_penalty=5.0))
    assert [sampler.draw(LOGITS) for _ in range(4)] == [0, 1, 2, 3]
    sampler = NumpySampler(replace(GREEDY, repeat_penalty=100.0, penalty_last_n=1))
    assert [sampler.draw(LOGITS) for _ in range(4)] == [0, 1, 0, 1], "it forgets what is not among the last tokens"
