"""KV that goes out and in again: the traits `sliceable` and `movable`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np

from headstart.testing.conformance.driver import TAIL, EngineUnderTest, expect, expect_same


def truncation_works_at_any_token(subject: EngineUnderTest) -> None:
    engine, block = subject.engine, subject.engine.traits.block_size
    tokens, tail = subject.tokens(subject.depth), subject.tokens(TAIL, seed=2)
    for length in sorted({1, block - 1, block, block + 1, subject.depth - 1, subject.depth} & set(range(1, subject.depth + 1))):
        engine.truncate(0, 0)
        subject.feed(0, tokens)
        subject.after(0, tail)
        engine.truncate(0, length)
        expect(engine.length(0) == length, f"length is {engine.length(0)} after truncate(slot, {length})")
        if engine.traits.canonical and length % block == 0:
            subject.feed(0, tokens[length:])
            found = subject.after(0, tail)
            expect_same(found, subject.cold(0, tokens, tail), f"a prompt that continues after truncate(slot, {length})")


def truncation_keeps_the_kv_before_it(subject: EngineUnderTest) -> None:
    tokens, slot = subject.tokens(subject.depth), subject.other_slot
    for length in (1, subject.depth - 1, subject.depth):
        subject.engine.truncate(slot, 0)
        subject.feed(slot, tokens)
        before = subject.save(slot, length) if length < subject.depth else subject.save(slot)
        subject.engine.truncate(slot, length)
        expect(
            subject.save(slot).segments[0].data.tobytes() == before.segments[0].data.tobytes(),
            f"truncate(slot, {length}) changes the KV of the tokens before {length}",
        )


def imported_kv_comes_out_again(subject: EngineUnderTest) -> None:
    """In several segments, in one, and again after the host memory for moving was released."""
    engine, slot, cut = subject.engine, subject.other_slot, max(1, subject.depth - 3)
    subject.feed(0, subject.tokens(subject.depth))
    saved, whole = subject.save(0, 1, cut), subject.save(0)
    engine.release()
    subject.restore(slot, saved)
    expect(engine.length(slot) == saved.tokens, f"length is {engine.length(slot)} after the import of {saved.tokens} tokens")
    expect(subject.save(slot, 1, cut).same(saved), "KV that was imported comes out with other bytes")
    expect(subject.save(slot).same(whole), "KV that was imported in segments comes out with other bytes as a whole")


def segments_are_taken_in_part(subject: EngineUnderTest) -> None:
    """`take` is less than `tokens`, and the data is longer than both."""
    engine, slot = subject.engine, subject.other_slot
    take = max(1, subject.depth // 2 - 1)
    subject.feed(0, subject.tokens(subject.depth))
    due = subject.save(0, 1, 1 + take).segments
    first, rest = subject.save(0, 1).segments
    longer = replace(rest, data=np.concatenate([rest.data, np.full(9, 9, np.uint8)]), take=take)
    engine.import_kv(slot, [first, longer])
    found = engine.length(slot)
    expect(found == 1 + take, f"length is {found} after segments of which {1 + take} tokens are to be taken (KVSegment.take)")
    came = subject.save(slot, 1).segments
    expect(
        [one.data.tobytes() for one in came] == [one.data.tobytes() for one in due[:2]],
        "a segment of which fewer tokens are taken (KVSegment.take) arrives with other KV",
    )


def an_import_replaces_what_was_there(subject: EngineUnderTest) -> None:
    engine, slot = subject.engine, subject.other_slot
    subject.feed(0, subject.tokens(subject.depth))
    (first, _) = subject.save(0, subject.depth - 1).segments
    engine.truncate(slot, 0)
    subject.feed(slot, subject.tokens(subject.depth, seed=3))
    engine.import_kv(slot, [first])
    expect(engine.length(slot) == subject.depth - 1, "import_kv into a slot with longer content leaves some of it")
    expect(subject.save(slot).segments[0].data.tobytes() == first.data.tobytes(), "import_kv leaves KV that was there before")
    engine.import_kv(slot, [])
    expect(engine.length(slot) == 0, "import_kv of no segments does not empty the slot")


def engines_of_one_fingerprint_share_kv(subject: EngineUnderTest) -> None:
    engine, tail = subject.engine, subject.tokens(TAIL, seed=2)
    due = subject.cold(0, subject.tokens(subject.depth), tail)
    engine.truncate(0, 0)
    subject.feed(0, subject.tokens(subject.depth))
    saved = subject.save(0)
    with closing(subject.another()) as other:
        expect(other.fingerprint == engine.fingerprint, "two engines of the same model have different fingerprints")
        subject.restore(0, saved, other)
        other.prefill(0, tail, logits=True)
        expect_same(other.logits(0), due, "another engine with the same fingerprint, with imported KV,")
