"""Short calls that are computed as a tile: what is kept of them is what an unpadded tile would have had there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp import llama_cpp as lib

from headstart.config import Settings
from headstart.engines.base import GREEDY, Rows, Span, Step
from headstart.engines.llama import LlamaEngine
from headstart.engines.llama.batch import Batch
from headstart.engines.llama.identity import devices
from headstart.engines.llama.padding import NO_PADDING, TILE, Padding
from headstart.errors import EngineError

DEEP = 512
SMOLLM = Padding(30 * 576, 134_515_008)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(Settings(model=str(tiny_model), ctx=1024, slots=2, threads=1))
    if devices() or engine.traits.decode_is_prefill:
        pytest.skip("llama.cpp has one kernel for all calls here, or others than a processor's")
    yield engine
    engine.close()


@given(st.integers(0, 10**6), st.integers(1, 600), st.integers(1, 10**6), st.integers(1, 10**12))
def test_it_fills_a_tile_or_does_nothing(start: int, n: int, attention: int, weights: int) -> None:
    padding = Padding(attention, weights)
    added = padding.of(start, n)
    assert added in ({0, TILE - n} if n < TILE else {0})
    assert not added or padding.of(start + 1, n), "deeper it pays more"
    assert not added or n + 1 == TILE or padding.of(start, n + 1), "and longer too"
    assert NO_PADDING.of(start, n) == 0


@pytest.mark.parametrize(("start", "fewest"), [(0, 64), (512, 58), (2048, 50), (7168, 43), (100_000, 39)])
def test_where_it_pays(start: int, fewest: int) -> None:
    assert [SMOLLM.of(start, n) > 0 for n in range(1, 65)] == [fewest <= n < 64 for n in range(1, 65)]


def test_padding_is_the_last_token_again_and_has_no_logits() -> None:
    """So a call is a function of its tokens alone, also where others of it have a say (experts)."""
    struct = Batch(16, 2).prompt(1, np.array([5, 6, 7], np.int32), 10, logits=True, padding=4)
    assert struct.n_tokens == 7
    assert struct.token[:7] == [5, 6, 7, 7, 7, 7, 7]
    assert struct.pos[:7] == list(range(10, 17))
    assert struct.logits[:7] == [0, 0, 1, 0, 0, 0, 0]
    assert [struct.seq_id[number][0] for number in range(7)] == [1] * 7


@pytest.mark.parametrize("n", [48, 55, 63])
def test_what_is_kept_is_the_beginning_of_a_tile(engine: LlamaEngine, n: int) -> None:
    """Whatever stands behind it there: rows, logits, and what goes on from them, also in a slot that never held more."""
    dice = np.random.default_rng(n)
    tokens, others = (dice.integers(3, 250, size).astype(np.int32) for size in (DEEP + n, TILE - n))
    assert engine._padding.of(DEEP, n) == TILE - n

    def begin() -> None:
        engine.truncate(0, 0)
        engine.prefill(0, tokens[:DEEP], logits=False)

    def went_on(slot: int) -> bytes:
        engine.decode([Step(slot, 7)])
        engine.prefill(slot, tokens[:TILE], logits=True)
        return engine.logits(slot).tobytes()

    def rows(stop: int) -> Rows:
        data = np.empty(stop * engine.shape.row_bytes, np.uint8)
        engine.export_rows(0, [Span(0, stop, data)])
        return Rows(data, stop, stop)

    begin()
    engine.prefill(0, tokens[DEEP:], logits=True)
    logits, kept = engine.logits(0), rows(DEEP + n)
    further = went_on(0)

    begin()
    tile = engine._batch.prompt(0, np.concatenate([tokens[DEEP:], others]), DEEP, logits=False)
    tile.logits[n - 1] = 1
    engine._run(tile, [0])
    engine._lengths[0], engine._outputs = DEEP + TILE, {0: n - 1}
    assert engine.logits(0).tobytes() == logits.tobytes()
    assert rows(DEEP + n).data.tobytes() == kept.data.tobytes()

    engine.truncate(1, 0)
    engine.import_rows(1, [kept])
    assert went_on(1) == further


@pytest.mark.parametrize("n", [48, 63])
def test_it_is_another_kernel(engine: LlamaEngine, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(n).integers(3, 250, DEEP + n).astype(np.int32)
    found = []
    for padding in (engine._padding, NO_PADDING):
        monkeypatch.setattr(engine, "_padding", padding)
        engine.truncate(0, 0)
        engine.prefill(0, tokens[:DEEP], logits=False)
        engine.prefill(0, tokens[DEEP:], logits=True)
        found.append(engine.logits(0))
    assert found[0].tobytes() != found[1].tobytes()
    assert np.corrcoef(*found)[0, 1] > 0.99


def test_what_cannot_be_cut_off_is_an_error_and_leaves_nothing(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(1).integers(3, 250, DEEP + 63).astype(np.int32)
    engine.truncate(0, 0)
    engine.prefill(0, tokens[:DEEP], logits=False)
    with monkeypatch.context() as patched:
        patched.setattr(lib, "llama_memory_seq_rm", lambda *_: False)
        with pytest.raises(EngineError, match="could not cut"):
            engine.prefill(0, tokens[DEEP:], logits=True)
    with pytest.raises(EngineError, match="no logits"):
        engine.logits(0)
    engine.truncate(0, 0)
    assert engine.length(0) == 0


def test_a_grid_that_is_no_tile_is_not_padded(tiny_model: Path) -> None:
    engine = LlamaEngine.load(Settings(model=str(tiny_model), ctx=1024, slots=1, threads=1), grid=32)
    assert engine._padding is NO_PADDING
    engine.close()


def test_at_the_end_of_the_context_there_is_no_room_for_it(engine: LlamaEngine) -> None:
    tokens = np.random.default_rng(1).integers(3, 250, 1024).astype(np.int32)
    engine.truncate(0, 0)
    for start in (0, 485):
        engine.prefill(0, tokens[start : start + 485], logits=False)
    assert engine._padding.of(970, 50) > 0
    engine.prefill(0, tokens[970:1020], logits=True)
    assert engine.length(0) == 1020
    sampler = engine.sampler(GREEDY)
    assert engine.sample(0, sampler) == int(np.argmax(engine.logits(0)))
    sampler.close()
    engine.prefill(0, tokens[1020:], logits=True)
    assert engine.length(0) == 1024
    engine.truncate(0, 0)


def test_only_where_there_are_two_kernels_and_rows_can_be_cut(tiny_model: Path, tmp_path: Path) -> None:
    import tiny

    settings = Settings(model=str(tiny_model), ctx=1024, slots=1, threads=1)
    windows = tiny.write(tmp_path / "gemma3.gguf", "gemma3")
    for other in (replace(settings, kv_type="bf16"), replace(settings, kv_type="q8_0"), replace(settings, model=str(windows))):
        engine = LlamaEngine.load(other)
        assert engine._padding is NO_PADDING
        engine.close()
