"""The fake detects what it is for: wrong, stale or shuffled rows, and rows from another kernel."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.errors import EngineError
from headstart.interfaces.engine import KVSegment, Span, Step
from headstart.interfaces.sampling import GREEDY, Sampling
from headstart.testing.fake_engine import LOW, NOISE, FakeEngine

BLOCK_SIZE, WIDTH = 8, 16


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(**{"slots": 2, "ctx": 128, "block_size": BLOCK_SIZE, "batch": 64, "kv_bytes_per_token": WIDTH, **options})


def feed(fake: FakeEngine, slot: int, tokens: list[int], *sizes: int) -> bytes:
    """Prefills in calls of these sizes, the rest in a last one; returns the logits' bytes."""
    array, at = np.array(tokens, np.int32), 0
    for size in (*sizes, len(tokens) - sum(sizes)):
        fake.prefill(slot, array[at : at + size], logits=True)
        at += size
    return fake.logits(slot).tobytes()


def rows(fake: FakeEngine, slot: int, start: int, stop: int) -> Any:
    data = np.zeros((stop - start) * WIDTH, np.uint8)
    fake.export_kv(slot, [Span(start, stop, data)])
    return data


TEXT = list(range(40))


def test_cold_runs_agree_and_weights_matter() -> None:
    assert feed(engine(), 0, TEXT, 32) == feed(engine(), 1, TEXT, 32)
    assert feed(engine(), 0, TEXT, 32) != feed(engine(seed=1), 0, TEXT, 32)
    assert engine().fingerprint != engine(seed=1).fingerprint


@examples(50)
@given(st.data())
def test_restored_rows_give_the_same_bits(data: st.DataObject) -> None:
    """Any cut into pieces, a last one taken in part, another slot, another instance of the same model."""
    ours, theirs = engine(), engine()
    feed(ours, 0, TEXT, 32)
    cuts = sorted({0, 40, *data.draw(st.lists(st.integers(1, 39), max_size=4))})
    take = data.draw(st.integers(1, cuts[-1] - cuts[-2]))
    pieces = [KVSegment(rows(ours, 0, a, b), b - a, b - a) for a, b in pairwise(cuts)]
    pieces[-1] = KVSegment(pieces[-1].data, pieces[-1].tokens, take)
    theirs.import_kv(1, pieces)
    kept = cuts[-2] + take
    assert theirs.length(1) == kept
    ours.truncate(0, kept)
    assert feed(theirs, 1, [7, 8, 9]) == feed(ours, 0, [7, 8, 9])
    assert (theirs.imported, theirs.prefilled) == (kept, 3)


@examples(50)
@given(st.integers(0, 39), st.integers(0, WIDTH - 1), st.integers(1, 255))
def test_any_changed_byte_of_any_row_shows(token: int, byte: int, flip: int) -> None:
    fake = engine()
    feed(fake, 0, TEXT, 32)
    whole = rows(fake, 0, 0, 40)
    fake.import_kv(1, [KVSegment(whole, 40, 40)])
    clean = feed(fake, 1, [7])
    whole.reshape(-1)[token * WIDTH + byte] ^= flip
    fake.import_kv(1, [KVSegment(whole, 40, 40)])
    assert feed(fake, 1, [7]) != clean


def test_shuffled_pieces_show() -> None:
    fake = engine()
    feed(fake, 0, TEXT, 32)
    blocks = [KVSegment(rows(fake, 0, at, at + BLOCK_SIZE), BLOCK_SIZE, BLOCK_SIZE) for at in (0, 8, 16)]
    fake.import_kv(1, blocks)
    clean = feed(fake, 1, [7])
    fake.import_kv(1, [blocks[0], blocks[2], blocks[1]])
    assert feed(fake, 1, [7]) != clean


def test_bits_depend_on_the_calls_unless_they_are_canonical() -> None:
    canonical = feed(engine(), 0, TEXT, 32)
    assert feed(engine(), 0, TEXT, 8, 16, 8) == canonical, "whole blocks, however grouped"
    assert feed(engine(), 0, TEXT, 32, 4) != canonical, "the tail in two calls"
    assert feed(engine(), 0, TEXT, 4, 28) != canonical, "off the grid"
    assert feed(engine(chunking=False), 0, TEXT, 8, 8, 8, 8) != feed(engine(chunking=False), 0, TEXT, 32)
    assert feed(engine(decode_is_prefill=True), 0, TEXT, 3, 14) == feed(engine(decode_is_prefill=True), 0, TEXT)


def test_decoding_depends_on_the_batch_unless_it_is_prefill() -> None:
    for same in (False, True):
        fake = engine(decode_is_prefill=same)
        for slot in (0, 1):
            feed(fake, slot, TEXT, 32)
        fake.decode([Step(0, 65), Step(1, 65)])
        both = fake.logits(0)
        assert both.tobytes() == fake.logits(1).tobytes()
        fake.truncate(0, 40)
        fake.decode([Step(0, 65)])
        alone = fake.logits(0)
        fake.truncate(0, 40)
        assert (alone.tobytes() == both.tobytes()) == same
        assert (feed(fake, 0, [65]) == alone.tobytes()) == same
        assert np.abs(alone - both).max() <= NOISE
        assert alone.argmax() == both.argmax(), "greedy replies depend on tokens only"


def test_kernels_differ_in_low_bits_only() -> None:
    ours, theirs = engine(), engine()
    feed(ours, 0, TEXT, 32)
    feed(theirs, 0, TEXT, 5, 27)
    a, b = rows(ours, 0, 0, 40), rows(theirs, 0, 0, 40)
    high = 40 * (WIDTH - LOW)
    assert a[:high].tobytes() == b[:high].tobytes()
    assert a[high:].tobytes() != b[high:].tobytes()


def test_logits_last_until_the_next_call() -> None:
    fake = engine()
    feed(fake, 0, TEXT)
    fake.prefill(1, np.array([1], np.int32), logits=False)
    for slot in (0, 1):
        with pytest.raises(EngineError, match="no current logits"):
            fake.logits(slot)


def test_sampling() -> None:
    fake = engine()
    feed(fake, 0, TEXT)
    logits = fake.logits(0)
    assert fake.sample(0, fake.sampler(GREEDY)) == logits.argmax()
    draws = [[fake.sample(0, sampler) for _ in range(9)] for sampler in (fake.sampler(Sampling(seed=3)) for _ in range(2))]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 1
    assert fake.sample(0, fake.sampler(Sampling(temperature=0, logit_bias=((9, 1000.0),)))) == 9
    assert fake.sample(0, fake.sampler(Sampling(temperature=5e-324, logit_bias=((9, 1000.0),)))) == 9
    once = fake.sampler(Sampling(temperature=0, presence_penalty=1000.0))
    assert fake.sample(0, once) != fake.sample(0, once)


def test_limits_are_errors() -> None:
    fake = engine()
    for tokens in ([], list(range(65))):
        with pytest.raises(EngineError, match="do not fit"):
            fake.prefill(0, np.array(tokens, np.int32), logits=False)
    feed(fake, 0, TEXT)
    with pytest.raises(EngineError, match="cannot export"):
        rows(fake, 0, 0, 41)
    with pytest.raises(EngineError, match="cannot cut"):
        fake.truncate(0, 41)
    with pytest.raises(EngineError, match="cannot be imported"):
        fake.import_kv(0, [KVSegment(np.zeros(8, np.uint8), 1, 1)])
    assert fake.length(0) == 0


def stateful(**options: Any) -> FakeEngine:
    return engine(sliceable=False, **options)


def checkpoint(fake: FakeEngine, slot: int) -> Any:
    out = np.full(fake.shape.state_bytes + 3, 7, np.uint8)
    size = fake.export_checkpoint(slot, out)
    assert 0 < size <= fake.shape.state_bytes
    assert (out[fake.shape.state_bytes :] == 7).all()
    return out[:size]


def at(fake: FakeEngine, slot: int, length: int, tokens: list[int] = TEXT) -> tuple[KVSegment, Any]:
    """Rows and checkpoint of the first `length` tokens, computed in one call; the slot holds them."""
    fake.truncate(slot, 0)
    feed(fake, slot, tokens[:length])
    data = np.zeros(length * fake.shape.kv_bytes_per_token, np.uint8)
    fake.export_kv(slot, [Span(0, length, data)])
    return KVSegment(data, length, length), checkpoint(fake, slot)


WIDTHS = pytest.mark.parametrize("kv_bytes_per_token", [WIDTH, 0])


@WIDTHS
def test_a_state_of_other_tokens_or_calls_shows(kv_bytes_per_token: int) -> None:
    fake = stateful(kv_bytes_per_token=kv_bytes_per_token)
    piece, state = at(fake, 0, 16)
    cold = feed(fake, 0, [9])
    _, others = at(fake, 0, 16, [1, *TEXT])
    fake.truncate(0, 0)
    feed(fake, 0, TEXT[:16], 3)
    calls = checkpoint(fake, 0)
    assert calls.tobytes() != state.tobytes()
    changed = state.copy()
    for byte in range(4, len(state)):
        changed[byte] ^= 1
        fake.import_checkpoint(1, [piece], changed)
        changed[byte] ^= 1
        assert feed(fake, 1, [9]) != cold
    new = []
    for one in (state, calls, others):
        fake.import_checkpoint(1, [piece], one)
        assert (feed(fake, 1, [9]) == cold) == (one is state)
        new.append(np.zeros(kv_bytes_per_token, np.uint8))
        fake.export_kv(1, [Span(16, 17, new[-1])])
    if kv_bytes_per_token:
        high = [row[:-LOW].tobytes() for row in new]
        assert high[0] == high[1] != high[2], "rows are made of tokens, whatever the calls"
        assert len({row[-LOW:].tobytes() for row in new}) == 3


def test_rows_of_other_tokens_show_beside_the_right_state() -> None:
    fake = stateful()
    _, state = at(fake, 0, 16)
    cold = feed(fake, 0, [9])
    piece, _ = at(fake, 0, 16, [1, *TEXT])
    fake.import_checkpoint(1, [piece], state)
    assert feed(fake, 1, [9]) != cold


@WIDTHS
def test_a_checkpoint_of_another_length_is_refused(kv_bytes_per_token: int) -> None:
    fake = stateful(kv_bytes_per_token=kv_bytes_per_token)
    long, late = at(fake, 0, 40)
    piece, state = at(fake, 0, 16)
    bad = (late, state[:-1], np.concatenate([state, state[:1]]), np.zeros(0, np.uint8), np.full(len(state), 255, np.uint8))
    for wrong in bad:
        feed(fake, 1, TEXT)
        with pytest.raises(EngineError, match="was due"):
            fake.import_checkpoint(1, [piece], wrong)
        assert fake.length(1) == 0
        feed(fake, 1, TEXT)
        with pytest.raises(EngineError, match="was due"):
            fake.rewind(1, 16, wrong)
        assert fake.length(1) == 0
    feed(fake, 1, TEXT[:16])
    with pytest.raises(EngineError, match="cannot go back"):
        fake.rewind(1, 40, late)
    assert fake.length(1) == 0
    with pytest.raises(EngineError, match="was due"):
        fake.import_checkpoint(1, [long], state)
    with pytest.raises(EngineError, match="was due"):
        fake.import_checkpoint(1, [], state)
    fake.import_checkpoint(1, [piece], state)
    assert fake.length(1) == 16


def test_states_stay_live_and_are_emptied_with_their_slot() -> None:
    fake = stateful()
    cold = feed(fake, 0, TEXT, 32)
    feed(fake, 1, [1, 2, 3])
    fake.truncate(1, 3)
    with pytest.raises(EngineError, match="cannot cut"):
        fake.truncate(1, 2)
    fake.truncate(1, 0)
    assert feed(fake, 1, TEXT, 32) == cold, "nothing is left of the sequence before"
    assert feed(fake, 1, [65]) != feed(stateful(seed=1), 1, [*TEXT, 65])
    with pytest.raises(EngineError, match="without a checkpoint"):
        fake.import_kv(1, [KVSegment(rows(fake, 0, 0, 8), 8, 8)])
    assert fake.length(1) == 0
    with pytest.raises(EngineError, match="no checkpoint"):
        fake.export_checkpoint(1, np.empty(99, np.uint8))


def test_checkpoints_grow_up_to_what_the_shape_says() -> None:
    fake = stateful(state_bytes=40)
    sizes = [len(at(fake, 0, length)[1]) for length in range(1, 33)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-2] == sizes[-1] == fake.shape.state_bytes == 40
    assert engine().shape.state_bytes == 0


def test_what_cannot_be_moved() -> None:
    fake = stateful(movable=False)
    assert not fake.traits.stateful
    feed(fake, 0, TEXT)
    out = np.empty(999, np.uint8)
    for refused in (
        lambda: fake.truncate(0, 8),
        lambda: fake.export_kv(0, [Span(0, 1, out)]),
        lambda: fake.export_checkpoint(0, out),
    ):
        with pytest.raises(EngineError):
            refused()
    assert fake.length(0) == 40
    for refused in (
        lambda: fake.import_kv(0, [KVSegment(out, 1, 1)]),
        lambda: fake.import_checkpoint(0, [KVSegment(out, 1, 1)], out),
        lambda: fake.rewind(0, 1, out),
    ):
        feed(fake, 0, TEXT)
        with pytest.raises(EngineError):
            refused()
        assert fake.length(0) == 0
    sliceable = engine(movable=False)
    feed(sliceable, 0, TEXT)
    sliceable.truncate(0, 8)
    with pytest.raises(EngineError, match="moved"):
        rows(sliceable, 0, 0, 8)


def test_injected_failures_of_checkpoints() -> None:
    fake = stateful()
    piece, state = at(fake, 0, 16)
    fake.fail_next("export checkpoint")
    with pytest.raises(EngineError, match="export checkpoint"):
        checkpoint(fake, 0)
    assert checkpoint(fake, 0).tobytes() == state.tobytes()
    fake.fail_next("import checkpoint")
    with pytest.raises(EngineError, match="import checkpoint"):
        fake.import_checkpoint(1, [piece], state)
    assert fake.length(1) == 0
    fake.fail_next("rewind")
    with pytest.raises(EngineError, match="rewind"):
        fake.rewind(0, 16, state)
    assert fake.length(0) == 0
    fake.import_checkpoint(0, [piece], state)
    fake.fail_next("prefill")
    with pytest.raises(EngineError, match="prefill"):
        feed(fake, 0, [9])
    assert checkpoint(fake, 0).tobytes()[4:] != state.tobytes()[4:], "what is left behind is not to be used"


def test_injected_failures() -> None:
    fake = engine()
    feed(fake, 0, TEXT, 32)
    clean = rows(fake, 0, 0, 40)
    fake.fail_next("export")
    with pytest.raises(EngineError, match="export"):
        rows(fake, 0, 0, 40)
    fake.fail_next("import")
    with pytest.raises(EngineError, match="import"):
        fake.import_kv(1, [KVSegment(clean, 40, 40)])
    assert fake.length(1) == 0
    fake.fail_next("decode")
    with pytest.raises(EngineError, match="decode"):
        fake.decode([Step(0, 65)])
    assert rows(fake, 0, 0, 40).tobytes() != clean.tobytes(), "what is left behind is not to be used"
    fake.truncate(0, 0)
    assert fake.prefilled == 40
    assert fake.largest == 32


def test_two_threads_at_once_are_a_fault() -> None:
    fake = engine(delay=0.2)
    thread = threading.Thread(target=feed, args=(fake, 0, TEXT))
    thread.start()
    while fake._alone._busy.acquire(blocking=False):
        fake._alone._busy.release()
    with pytest.raises(RuntimeError, match="two threads"):
        fake.truncate(1, 0)
    thread.join()
