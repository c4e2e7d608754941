"""Logits and sampling."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from headstart.interfaces.engine import Logits, Step
from headstart.interfaces.sampling import GREEDY, Sampling
from headstart.testing.conformance.driver import TAIL, EngineUnderTest, expect, expect_same

_DRAWS = 12


def logits_have_their_shape(subject: EngineUnderTest) -> None:
    found = subject.after(0, subject.tokens(TAIL))
    due = (subject.engine.tokenizer.n_vocab,)
    expect(isinstance(found, np.ndarray) and found.dtype == np.float32, "logits are no array of float32")
    expect(found.shape == due, f"logits have the shape {found.shape}; (n_vocab,) is {due}")
    expect(not np.isnan(found).any(), "logits are not numbers")


def logits_are_a_copy(subject: EngineUnderTest) -> None:
    found = subject.after(0, subject.tokens(TAIL))
    kept = found.copy()
    subject.engine.decode([Step(0, int(subject.tokens(1)[0]))])
    expect(found.tobytes() == kept.tobytes(), "the next call changes logits that were returned before it")
    now = subject.engine.logits(0)
    kept = now.copy()
    now[:] = 0
    expect_same(subject.engine.logits(0), kept, "writing into returned logits")


def each_slot_has_its_own_logits(subject: EngineUnderTest) -> None:
    """Decoding in a batch may differ in the last bits from decoding alone, but not by as much as two prompts do."""
    tail = subject.tokens(TAIL)

    def decoded(*slots: int) -> dict[int, Logits]:
        """The logits of each slot's own prompt and a token, decoded in one call."""
        for slot in slots:
            subject.cold(slot, subject.tokens(subject.boundaries.start, seed=2 + slot), tail)
        subject.engine.decode([Step(slot, int(tail[slot])) for slot in slots])
        return {slot: subject.engine.logits(slot) for slot in slots}

    alone = decoded(0) | decoded(1)
    for slots in ((0, 1), (1, 0)):
        for slot, found in decoded(*slots).items():
            own, other = (float(np.abs(found - alone[which]).sum()) for which in (slot, 1 - slot))
            expect(own < other, f"decode of slots {slots} gives slot {slot} the logits of the other slot")


def sampling_leaves_the_logits_alone(subject: EngineUnderTest) -> None:
    kept = subject.after(0, subject.tokens(TAIL))
    for sampling in (GREEDY, Sampling(seed=1)):
        with closing(subject.engine.sampler(sampling)) as sampler:
            subject.engine.sample(0, sampler)
        expect_same(subject.engine.logits(0), kept, f"sample with a temperature of {sampling.temperature}")


def greedy_takes_the_most_likely_token(subject: EngineUnderTest) -> None:
    for seed in range(3):
        subject.engine.truncate(0, 0)
        logits = subject.after(0, subject.tokens(TAIL, seed))
        with closing(subject.engine.sampler(GREEDY)) as sampler:
            drawn = subject.engine.sample(0, sampler)
        expect(logits[drawn] == logits.max(), f"with a temperature of 0 it draws {drawn}, but {logits.argmax()} is more likely")


def a_seed_repeats_its_draws(subject: EngineUnderTest) -> None:
    subject.after(0, subject.tokens(TAIL))
    options = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    draws = []
    for seed in (1, 1, 2):
        with closing(subject.engine.sampler(Sampling(seed=seed, **options))) as sampler:  # type: ignore[arg-type]
            draws.append([subject.engine.sample(0, sampler) for _ in range(_DRAWS)])
    expect(draws[0] == draws[1], "samplers with the same seed draw different tokens from the same logits")


def samplers_close_twice(subject: EngineUnderTest) -> None:
    sampler = subject.engine.sampler(GREEDY)
    sampler.close()
    sampler.close()
