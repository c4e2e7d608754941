"""What every engine promises: sizes, lengths, refusals, slots that do not disturb each other."""

from __future__ import annotations

import numpy as np

from headstart.interfaces.engine import Step
from headstart.testing.conformance.driver import TAIL, EngineUnderTest, expect, expect_same, refused


def sizes_fit_together(subject: EngineUnderTest) -> None:
    engine = subject.engine
    shape, traits = engine.shape, engine.traits
    expect(shape.slots > 0, "shape.slots is not positive")
    expect(subject.depth > 0, "the context is too short")
    expect(
        shape.batch >= traits.block_size > 0 and shape.batch % traits.block_size == 0,
        f"shape.batch ({shape.batch}) is not a multiple of traits.block_size ({traits.block_size})",
    )
    expect(shape.kv_bytes_per_token > 0 or not traits.sliceable, "KV without bytes needs a state")
    expect(
        (shape.state_bytes > 0) == traits.stateful,
        f"traits.stateful is {traits.stateful}, but shape.state_bytes is {shape.state_bytes}",
    )
    expect(isinstance(engine.fingerprint, bytes) and len(engine.fingerprint) >= 16, "the fingerprint is no digest")


def lengths_follow_the_calls(subject: EngineUnderTest) -> None:
    engine, last = subject.engine, subject.engine.shape.slots - 1

    def holds(tokens: int, when: str) -> None:
        expect(engine.length(last) == tokens, f"length is {engine.length(last)} {when}; {tokens} is right")

    holds(0, "in an empty slot")
    subject.feed(last, subject.tokens(subject.depth))
    holds(subject.depth, "after prefill")
    subject.after(last, subject.tokens(TAIL))
    holds(subject.depth + TAIL, "after a shorter prefill")
    engine.decode([Step(last, int(subject.tokens(1)[0]))])
    holds(subject.depth + TAIL + 1, "after decode")
    engine.truncate(last, 0)
    holds(0, "after truncate(slot, 0)")


def calls_that_do_not_fit_are_refused(subject: EngineUnderTest) -> None:
    engine, shape = subject.engine, subject.engine.shape
    with refused(f"prefill of {shape.batch + 1} tokens, with a batch of {shape.batch},"):
        engine.prefill(0, subject.tokens(shape.batch + 1), logits=False)
    engine.truncate(0, 0)
    with refused("prefill of no tokens"):
        engine.prefill(0, np.empty(0, np.int32), logits=False)
    engine.truncate(0, 0)
    tokens = subject.tokens(shape.ctx)
    for start in range(0, shape.ctx, shape.batch):
        engine.prefill(0, tokens[start : start + shape.batch], logits=False)
    expect(engine.length(0) == shape.ctx, f"a slot holds {engine.length(0)} tokens where shape.ctx ({shape.ctx}) were put")
    with refused("decode in a full slot"):
        engine.decode([Step(0, int(tokens[0]))])
    engine.truncate(0, 0)
    for start in range(0, shape.ctx, shape.batch):
        engine.prefill(0, tokens[start : start + shape.batch], logits=False)
    with refused("prefill into a full slot"):
        engine.prefill(0, tokens[:1], logits=False)
    engine.truncate(0, 0)
    subject.after(0, tokens[:TAIL])
    expect(engine.length(0) == TAIL, "a slot cannot be used after a refused call and truncate(slot, 0)")


def every_token_counts(subject: EngineUnderTest) -> None:
    tokens, tail = subject.tokens(subject.depth), subject.tokens(TAIL, seed=2)
    usual = subject.cold(0, tokens, tail)
    for place in (len(tokens) - 1, len(tokens) - 2):
        changed = tokens.copy()
        changed[place] = next(token for token in subject.tokens(99, seed=3) if token != tokens[place])
        expect(subject.cold(0, changed, tail).tobytes() != usual.tobytes(), f"token {place} does not change the logits")


def an_emptied_slot_is_as_new(subject: EngineUnderTest) -> None:
    tokens, tail = subject.tokens(subject.depth), subject.tokens(TAIL, seed=2)
    due = subject.cold(0, tokens, tail)
    for slot in {0, subject.other_slot}:
        subject.cold(slot, subject.tokens(subject.depth, seed=3), tail)
        subject.engine.decode([Step(slot, int(tail[0]))])
        expect_same(subject.cold(slot, tokens, tail), due, "a prompt in a slot that was used and emptied")


def slots_do_not_disturb_each_other(subject: EngineUnderTest) -> None:
    engine, tail = subject.engine, subject.tokens(TAIL, seed=2)
    due = subject.cold(0, subject.tokens(subject.depth), tail)
    engine.truncate(0, 0)
    subject.feed(0, subject.tokens(subject.depth))
    subject.cold(1, subject.tokens(subject.depth, seed=3), tail)
    engine.decode([Step(1, int(tail[0]))])
    expect(engine.length(0) == subject.depth, "work in one slot changes the length of another")
    expect_same(subject.after(0, tail), due, "a prompt that another slot's prompt interrupted")
    engine.truncate(0, 0)
    expect(engine.length(1) == subject.depth + TAIL + 1, "truncate in one slot changes the length of another")


def closing_twice_is_fine(subject: EngineUnderTest) -> None:
    engine = subject.another()
    engine.close()
    engine.close()
