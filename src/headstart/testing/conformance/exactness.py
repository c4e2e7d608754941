"""The same bits: the traits `canonical`, `chunking`, `decode_exact` and `decode_is_prefill`."""

from __future__ import annotations

import numpy as np

from headstart.interfaces.engine import Step
from headstart.testing.conformance.driver import DECODED, TAIL, EngineUnderTest, Snapshot, expect, expect_same


def the_same_calls_give_the_same_bits(subject: EngineUnderTest) -> None:
    tokens, tail = subject.tokens(subject.depth), subject.tokens(TAIL, seed=2)
    due = subject.cold(0, tokens, tail)
    for slot in (0, subject.other_slot):
        expect_same(subject.cold(slot, tokens, tail), due, f"the same prompt again, in slot {slot},")


def prefill_may_span_blocks(subject: EngineUnderTest) -> None:
    """In calls of one block, in the largest calls, and stopped at each block boundary on the way."""
    tokens, tail = subject.tokens(subject.depth), subject.tokens(TAIL, seed=2)
    due = subject.cold(0, tokens, tail)
    block, largest = subject.engine.traits.block_size, subject.engine.shape.batch
    ways = {(block,) * (subject.depth // block)}
    ways |= {(*_calls(stop, largest), *_calls(subject.depth - stop, largest)) for stop in subject.boundaries}
    for sizes in sorted(ways):
        subject.engine.truncate(0, 0)
        subject.feed(0, tokens, *sizes)
        expect_same(subject.after(0, tail), due, f"prefill in calls of {sizes} tokens")


def a_call_may_end_with_a_tail_that_fills_a_block(subject: EngineUnderTest) -> None:
    """A tail for which `fills_block` is true, in one call with the blocks before it, and in a call of its own."""
    engine, block = subject.engine, subject.engine.traits.block_size
    most = min(subject.depth, engine.shape.batch - block)
    tokens, tail = subject.tokens(subject.depth), subject.tokens(block, seed=2)
    for first in sorted({0, subject.depth - most, subject.depth - block}) if most else ():
        for count in sorted({1, TAIL, block // 2, block - 1, block} - {0}):
            if count > block or not engine.fills_block(subject.depth, count):
                continue
            due = subject.cold(0, tokens, tail[:count])
            kv = _kv(subject, 0)
            engine.truncate(0, 0)
            subject.feed(0, tokens[: max(first, subject.depth - most)])
            joined = np.concatenate([tokens[engine.length(0) :], tail[:count]])
            how = f"a call of {len(joined)} tokens behind {engine.length(0)}, of which {count} fill a block,"
            expect_same(subject.after(0, joined), due, how)
            expect(_kv(subject, 0) == kv, f"{how} leaves other KV")


def _kv(subject: EngineUnderTest, slot: int) -> bytes:
    """The KV and the state of a slot; nothing if they cannot be exported."""
    if not subject.engine.traits.movable:
        return b""
    saved = subject.save(slot)
    return saved.segments[0].data.tobytes() + saved.state.tobytes()


def _calls(tokens: int, largest: int) -> list[int]:
    return [min(largest, tokens - start) for start in range(0, tokens, largest)]


def restored_kv_continues_with_the_same_bits(subject: EngineUnderTest) -> None:
    """At every block boundary, behind other content, with work in a neighbour; the rest is computed."""
    engine, slot = subject.engine, subject.other_slot
    tokens, tail = subject.tokens(subject.depth), subject.tokens(TAIL, seed=2)
    due = subject.cold(0, tokens, tail)
    saved = subject.snapshots()
    expect_same(subject.after(0, tail), due, "exporting KV on the way")
    for length, snapshot in saved.items():
        subject.cold(slot, subject.tokens(subject.depth, seed=3)[: subject.boundaries.start], tail)
        subject.restore(slot, snapshot)
        expect(engine.length(slot) == length, f"length is {engine.length(slot)} after the import of {length} tokens")
        subject.feed(slot, tokens[length:])
        expect_same(subject.after(slot, tail), due, f"a prompt whose first {length} tokens were imported")


def decoding_does_not_depend_on_where_kv_came_from(subject: EngineUnderTest) -> None:
    """Behind KV that was computed in the slot, left there by going back, and restored."""
    engine, slot = subject.engine, subject.other_slot
    tail = subject.tokens(TAIL, seed=2)
    subject.feed(0, subject.tokens(subject.depth))
    nothing = np.empty(0, np.uint8)
    saved = subject.save(0) if engine.traits.movable else Snapshot(subject.depth, (), nothing)
    due = subject.reply(0, tail)
    if engine.traits.sliceable or engine.traits.stateful:
        subject.go_back(0, saved.tokens, saved.state)
        expect_same(subject.reply(0, tail), due, "decoding after going back")
    if engine.traits.movable:
        subject.restore(slot, saved)
        expect_same(subject.reply(slot, tail), due, "decoding after an import")


def decoded_kv_is_that_of_prefill(subject: EngineUnderTest) -> None:
    """The same bits from prefill in one call, in two calls off the block boundary, and from decode, alone and in batches."""
    engine, tail = subject.engine, subject.tokens(DECODED, seed=2)
    tokens = subject.tokens(subject.depth)
    due = subject.cold(0, tokens, tail)
    kv = _kv(subject, 0)

    def compare(how: str) -> None:
        expect_same(engine.logits(0), due, how)
        if kv:
            expect(_kv(subject, 0) == kv, f"{how} leaves other KV")

    for slots in (range(1), range(min(2, engine.shape.slots)), range(engine.shape.slots)):
        for slot in slots:
            engine.truncate(slot, 0)
            subject.feed(slot, tokens)
        for token in tail:
            engine.decode([Step(slot, int(token)) for slot in slots])
        compare(f"decode in a batch of {len(slots)}")
    engine.truncate(0, 0)
    subject.feed(0, tokens[:-1])
    subject.after(0, np.concatenate([tokens[-1:], tail]))
    compare("prefill in calls that end inside a block")
