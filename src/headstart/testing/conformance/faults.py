"""Faults: what an engine must do when a call fails, and that what is imported is really used."""

from __future__ import annotations

import numpy as np

from headstart.errors import EngineError
from headstart.interfaces.engine import KVSegment, Logits
from headstart.interfaces.tokens import Bytes
from headstart.testing.conformance.driver import TAIL, EngineUnderTest, Snapshot, expect, expect_same, refused


def changed_kv_changes_the_logits(subject: EngineUnderTest) -> None:
    """Otherwise no check of exactness could fail: an engine that computes again what it should import looks exact."""
    due, saved = _saved(subject)
    if not subject.engine.shape.kv_bytes_per_token:
        return
    changed = [KVSegment(_flipped(one.data), one.tokens, one.take) for one in saved.segments]
    found = _continued(subject, Snapshot(saved.tokens, tuple(changed), saved.state))
    expect(found is None or found.tobytes() != due.tobytes(), "KV with changed bytes gives the same logits")


def a_changed_checkpoint_changes_the_logits(subject: EngineUnderTest) -> None:
    due, saved = _saved(subject)
    half = len(saved.state) // 2
    changed = np.concatenate([saved.state[:half], _flipped(saved.state[half:])])
    found = _continued(subject, Snapshot(saved.tokens, saved.segments, changed))
    expect(found is None or found.tobytes() != due.tobytes(), "a checkpoint with changed bytes gives the same logits")


def a_checkpoint_that_was_cut_short_is_refused(subject: EngineUnderTest) -> None:
    engine, slot = subject.engine, subject.other_slot
    _, saved = _saved(subject)
    for state in (saved.state[:-1], saved.state[: len(saved.state) // 2]):
        with refused(f"import_checkpoint of {len(state)} of {len(saved.state)} bytes"):
            engine.import_checkpoint(slot, saved.segments, state.copy())
        expect(engine.length(slot) == 0, "import_checkpoint that is refused does not leave the slot empty")


def a_failed_call_leaves_other_slots_alone(subject: EngineUnderTest) -> None:
    """And its own slot can be used again after `truncate(slot, 0)`."""
    engine, tail = subject.engine, subject.tokens(TAIL, seed=2)
    due = subject.cold(0, subject.tokens(subject.depth), tail)
    engine.truncate(0, 0)
    subject.feed(0, subject.tokens(subject.depth))
    subject.feed(1, subject.tokens(subject.boundaries.start, seed=3))
    with refused(f"prefill of {engine.shape.batch + 1} tokens"):
        engine.prefill(1, subject.tokens(engine.shape.batch + 1), logits=True)
    expect(engine.length(0) == subject.depth, "a failed call in one slot changes the length of another")
    expect_same(subject.after(0, tail), due, "a prompt beside a failed call in another slot")
    expect_same(subject.cold(1, subject.tokens(subject.depth), tail), due, "a slot that was emptied after a failed call")


def _saved(subject: EngineUnderTest) -> tuple[Logits, Snapshot]:
    """The logits of the usual prompt, and what the slot held before its tail."""
    subject.engine.truncate(0, 0)
    subject.feed(0, subject.tokens(subject.depth))
    saved = subject.save(0)
    return subject.after(0, subject.tokens(TAIL, seed=2)), saved


def _continued(subject: EngineUnderTest, saved: Snapshot) -> Logits | None:
    """The logits after an import and the tail; None if the engine refuses to import."""
    try:
        subject.restore(subject.other_slot, saved)
    except EngineError:
        return None
    return subject.after(subject.other_slot, subject.tokens(TAIL, seed=2))


def _flipped(data: Bytes) -> Bytes:
    """The same bytes with the last bit changed in every third one. That moves floats, but makes none infinite."""
    changed = data.copy()
    changed[::3] ^= 1
    return changed
