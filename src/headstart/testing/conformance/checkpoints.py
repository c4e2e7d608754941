"""Checkpoints: what a model with a state promises, the trait `stateful`."""

from __future__ import annotations

from headstart.testing.conformance.driver import TAIL, EngineUnderTest, Snapshot, expect, expect_same, refused


def _saved_at(subject: EngineUnderTest, *lengths: int) -> list[Snapshot]:
    """What the first slot holds at these lengths of the usual prompt."""
    found = []
    for length in lengths:
        subject.engine.truncate(0, 0)
        subject.feed(0, subject.tokens(subject.depth + 1)[:length])
        found.append(subject.save(0))
    return found


def imported_checkpoints_come_out_again(subject: EngineUnderTest) -> None:
    engine, slot = subject.engine, subject.other_slot
    for length in (subject.engine.traits.block_size, subject.depth):
        engine.truncate(0, 0)
        subject.feed(0, subject.tokens(length))
        saved = subject.save(0, 1) if length > 1 else subject.save(0)
        engine.release()
        subject.restore(slot, saved)
        expect(engine.length(slot) == length, f"length is {engine.length(slot)} after the import of a checkpoint of {length}")
        again = subject.save(slot, 1) if length > 1 else subject.save(slot)
        expect(again.same(saved), f"KV and a checkpoint of {length} tokens come out with other bytes than they were imported")


def a_rewound_slot_continues_with_the_same_bits(subject: EngineUnderTest) -> None:
    """From each block boundary to the ones before it, after decoding, in a computed slot and in a restored one."""
    engine, tokens, tail = subject.engine, subject.tokens(subject.depth), subject.tokens(TAIL, seed=2)
    due = subject.cold(0, tokens, tail)
    saved = subject.snapshots()
    subject.restore(subject.other_slot, saved[subject.depth])
    for slot in sorted({0, subject.other_slot}):
        subject.reply(slot, subject.tokens(TAIL, seed=3))
        for length, snapshot in sorted(saved.items(), reverse=True):
            for _ in range(2):
                engine.rewind(slot, length, snapshot.state)
                expect(engine.length(slot) == length, f"length is {engine.length(slot)} after rewind to {length}")
                with refused("logits after rewind"):
                    engine.logits(slot)
            expect(subject.save(slot).same(snapshot), f"a slot that was rewound to {length} holds other KV or another state")
            subject.feed(slot, tokens[length:])
            expect_same(subject.after(slot, tail), due, f"a prompt that continues after rewind to {length}")


def a_checkpoint_of_another_length_is_refused(subject: EngineUnderTest) -> None:
    engine, slot, block = subject.engine, subject.other_slot, subject.engine.traits.block_size
    early, late = _saved_at(subject, block, block + 1)

    def filled() -> None:
        engine.truncate(slot, 0)
        subject.feed(slot, subject.tokens(subject.depth + 1)[: block + 1], block, 1)

    for kv, state in ((early, late.state), (late, early.state)):
        filled()
        with refused(f"import_checkpoint of KV of {kv.tokens} tokens with a checkpoint of another length"):
            engine.import_checkpoint(slot, kv.segments, state)
        expect(engine.length(slot) == 0, "import_checkpoint that is refused does not leave the slot empty")
        filled()
        with refused(f"rewind to {kv.tokens} tokens with a checkpoint of another length"):
            engine.rewind(slot, kv.tokens, state)
        expect(engine.length(slot) == 0, "a rewind that is refused does not leave the slot empty")
    engine.truncate(slot, 0)
    subject.feed(slot, subject.tokens(block))
    with refused("rewind to more tokens than the slot holds"):
        engine.rewind(slot, late.tokens, late.state)
    expect(engine.length(slot) == 0, "a rewind that is refused does not leave the slot empty")
    subject.restore(slot, early)
    expect(engine.length(slot) == block, "a slot cannot be used after a refused checkpoint")
