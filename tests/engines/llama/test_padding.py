"""Short calls that are computed as a tile: what is kept of them is what an unpadded tile would have had there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.engines.llama.batch import Batch
from headstart.engines.llama.binding import lib
from headstart.engines.llama.identity import devices, work
from headstart.engines.llama.load import open_model
from headstart.engines.llama.padding import (
    ALIGNED,
    AMX_USED,
    COMPUTES_IN_F16,
    NO_PADDING,
    PROCESSORS,
    TILE,
    Padding,
    Work,
    processor,
    tiles,
)
from headstart.errors import EngineError
from headstart.interfaces.engine import KVSegment, Span, Step
from headstart.interfaces.sampling import GREEDY

DEEP = 512
SMOLLM = Work(weights=134_515_008 - 49_152 * 576, layers=30, heads=9, key=64, value=64)
AVX2, OTHER = "CPU : AVX2 = 1 | F16C = 1 | ", "CPU : NEON = 1 | "
AVX512 = AVX2 + "AVX512 = 1 | AVX512_VNNI = 1 | "
ALIGNED_AVX512 = AVX512 + f"{ALIGNED} = 1 | "
AMX = AVX512 + "AMX_INT8 = 1 | "
WITH_AMX = AMX + f"{AMX_USED} = 1 | "
F16_WITH_AMX, F16_AMX = (one + f"{COMPUTES_IN_F16} = 1 | " for one in (WITH_AMX, AMX))
"""What builds of llama.cpp say of themselves. The last features are headstart's own."""


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(Settings(model=str(tiny_model), ctx=1024, slots=2, threads=1).engine_options())
    if devices() or engine.traits.decode_is_prefill:
        pytest.skip("llama.cpp has one kernel for all calls here, or others than a processor's")
    yield engine
    engine.close()


WORKS = st.builds(
    Work,
    weights=st.integers(1, 10**12),
    layers=st.integers(1, 200),
    heads=st.integers(1, 128),
    key=st.integers(1, 576),
    value=st.integers(1, 576),
)


@given(
    WORKS,
    st.sampled_from([F16_WITH_AMX, F16_AMX, WITH_AMX, AMX, ALIGNED_AVX512, AVX512, AVX2, OTHER]),
    st.integers(1, 200),
    st.integers(0, 10**6),
    st.integers(1, 600),
)
def test_it_fills_a_tile_or_does_nothing(work: Work, system: str, threads: int, start: int, n: int) -> None:
    padding = Padding.estimated(work, system, threads)
    added = padding.of(start, n)
    assert added in ({0, TILE - n} if n < TILE else {0})
    assert not added or padding.of(start + 1, n), "deeper it pays more"
    assert not added or n + 1 == TILE or padding.of(start, n + 1), "and longer too"
    assert not added or padding.full(start) < padding.bare(start, n)
    assert NO_PADDING.of(start, n) == 0


@pytest.mark.parametrize(
    ("system", "name"),
    [
        (F16_WITH_AMX, "AMX, used, F16"),
        (WITH_AMX, "AMX, used"),
        (F16_AMX, "AMX, F16"),
        (AVX512 + f"{COMPUTES_IN_F16} = 1 | ", "AVX-512, F16"),
        (AMX, "AMX"),
        (ALIGNED_AVX512, "AVX-512, aligned"),
        (AVX512, "AVX-512"),
        (AVX2, "AVX2"),
        (OTHER, "another"),
        ("AVX512 = 0 | ", "another"),
    ],
)
def test_the_class_is_what_the_build_says_of_itself(system: str, name: str) -> None:
    assert processor(system).name == name


def test_only_where_amx_is_used_weights_cost_less() -> None:
    assert processor(AMX, {AMX_USED}) == processor(WITH_AMX)
    assert processor(AVX512, {AMX_USED}) == processor(AVX512)


def test_f16_costs_more_where_elements_do_not_fill_a_step() -> None:
    with_f16, with_f32 = processor(AMX, {COMPUTES_IN_F16}), processor(AMX)
    assert with_f16.query(64, 64) > 3 * with_f32.query(64, 64)
    assert with_f16.query(128, 128) < with_f32.query(128, 128)


def test_this_build_has_a_class() -> None:
    assert processor(lib.llama_print_system_info().decode()) in PROCESSORS


@given(st.integers(1, 130), st.integers(1, 130))
def test_tiles_are_those_that_ggml_computes(heads: int, threads: int) -> None:
    """As in `ggml_compute_forward_flash_attn_ext_f16` and `_tiled`, loop by loop."""
    rows = TILE * heads
    chunk = (rows + 4 * threads - 1) // (4 * threads)
    chunks = (rows + chunk - 1) // chunk
    if threads == 1 or chunks < threads:
        chunks = threads
    step, count = (rows + chunks - 1) // chunks, 0
    for current in range(chunks):
        row, stop = step * current, min(step * current + step, rows)
        while row < stop:
            row += min(TILE, stop - row, TILE - row % TILE)
            count += 1
    assert tiles(heads, threads) == count


CALLS = (8, 16, 32, 48, 63)
MEASURED = {
    # Behind so many tokens: what calls of so many tokens took, and a tile (docs/method.md; ms, two threads).
    WITH_AMX: {
        512: ((19.8, 33.2, 62.5, 96.6, 119.2), 78.2),
        2048: ((55.0, 97.0, 186.3, 281.7, 356.6), 206.5),
        7000: ((239.3, 452.7, 871.6, 1279.0, 1634.7), 651.8),
    },
    AMX: {
        512: ((41.2, 72.2, 133.2, 189.9, 254.1), 214.4),
        2048: ((74.3, 133.3, 247.6, 371.0, 476.1), 330.1),
        7000: ((254.8, 487.1, 927.5, 1420.1, 1934.6), 770.4),
    },
    F16_WITH_AMX: {
        512: ((59.5, 113.5, 222.4, 332.3, 430.3), 95.1),
        2048: ((201.6, 399.7, 787.2, 1151.5, 1610.1), 241.3),
        7000: ((691.1, 1383.9, 2546.4, 3935.1, 5214.4), 721.9),
    },
    F16_AMX: {
        512: ((69, 131, 257, 387, 505), 216),
        2048: ((192, 376, 743, 1108, 1468), 335),
        7168: ((619, 1218, 2441, 3663, 4748), 747),
    },
    ALIGNED_AVX512: {
        512: ((46, 77, 144, 214, 279), 238),
        2048: ((82, 151, 294, 439, 572), 430),
        7168: ((183, 353, 705, 1055, 1388), 824),
    },
    AVX512: {
        512: ((108, 176, 286, 443, 548), 503),
        2048: ((151, 287, 557, 797, 1204), 819),
        7168: ((383, 773, 1507, 2445, 3385), 2619),
    },
}


@pytest.mark.parametrize("system", MEASURED)
def test_it_reckons_with_what_was_measured(system: str) -> None:
    """And pads every short call that takes longer than a tile by a third, and none that takes less."""
    padding = Padding.estimated(SMOLLM, system, 2)
    for start, (bare, full) in MEASURED[system].items():
        for n, took in zip(CALLS, bare, strict=True):
            assert n < 16 or padding.full(start) / padding.bare(start, n) == pytest.approx(full / took, rel=0.35)
            assert padding.of(start, n) or took < 4 / 3 * full
            assert not padding.of(start, n) or took > full


@pytest.mark.parametrize(
    ("system", "threads", "fewest"),
    [
        (WITH_AMX, 2, (64, 47, 36, 32, 31)),
        (WITH_AMX, 16, (64, 64, 64, 64, 64)),
        (AMX, 2, (64, 55, 42, 36, 33)),
        (AMX, 16, (64, 64, 64, 64, 64)),
        (F16_WITH_AMX, 2, (60, 20, 13, 11, 10)),
        (F16_WITH_AMX, 16, (64, 46, 41, 40, 39)),
        (F16_AMX, 2, (64, 29, 16, 12, 11)),
        (F16_AMX, 16, (64, 50, 43, 41, 40)),
        (ALIGNED_AVX512, 1, (64, 56, 42, 33, 29)),
        (ALIGNED_AVX512, 2, (64, 62, 52, 46, 43)),
        (AVX512, 1, (64, 58, 45, 38, 34)),
        (AVX512, 2, (64, 64, 59, 55, 53)),
        (AVX512, 8, (64, 64, 64, 64, 64)),
        (AVX2, 2, (64, 64, 57, 53, 51)),
        (OTHER, 2, (64, 64, 56, 51, 49)),
    ],
)
def test_where_it_pays(system: str, threads: int, fewest: tuple[int, ...]) -> None:
    padding = Padding.estimated(SMOLLM, system, threads)
    found = [next((n for n in range(1, 64) if padding.of(start, n)), 64) for start in (0, 512, 1792, 4096, 7168)]
    assert tuple(found) == fewest


def test_heads_that_fill_no_step_are_padded_early() -> None:
    """Their elements are computed one by one where tokens are, and not in a tile."""
    even, odd = (Padding.estimated(Work(10**8, 30, 32, size, size), AVX512, 8) for size in (64, 96))
    assert even.of(4096, 16) == 0
    assert odd.of(4096, 16) == TILE - 16


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss"])
def test_what_a_token_is_multiplied_with_is_in_the_file(tmp_path: Path, architecture: str) -> None:
    import gguf

    import tiny
    from tiny.layers import EXPERTS, HEAD, HEADS, USED

    path = tiny.write(tmp_path / "model.gguf", architecture)
    model = open_model(path, 0, lambda _: None)
    found = work(model)
    lib.llama_model_free(model)
    sizes = {tensor.name: int(tensor.n_elements) for tensor in gguf.GGUFReader(path).tensors}
    del sizes["token_embd.weight"]  # looked up
    used = sum(size * USED // EXPERTS if "_exps.weight" in name else size for name, size in sizes.items())
    assert found.weights == pytest.approx(used, rel=0.01)
    assert (found.layers, found.heads, found.key, found.value) == (tiny.LAYERS, HEADS, HEAD, HEAD)


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

    def rows(stop: int) -> KVSegment:
        data = np.empty(stop * engine.shape.kv_bytes_per_token, np.uint8)
        engine.export_kv(0, [Span(0, stop, data)])
        return KVSegment(data, stop, stop)

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
    engine.import_kv(1, [kept])
    assert went_on(1) == further


@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_that_comes_later_sees_it(tiny_model: Path, threads: int) -> None:
    """What decoding and whole blocks give behind rows of which padding was cut off: the same bits as where there never was any.

    Decoding is cut into parts by threads, and by how many cells there seem to be.
    """
    engine = LlamaEngine.load(Settings(model=str(tiny_model), ctx=1024, slots=2, threads=threads).engine_options())
    if engine._padding is NO_PADDING:
        engine.close()
        pytest.skip("nothing is padded here")
    tokens = np.random.default_rng(threads).integers(3, 250, 1024).astype(np.int32)

    def rows(slot: int, start: int, stop: int) -> bytes:
        data = np.empty((stop - start) * engine.shape.kv_bytes_per_token, np.uint8)
        engine.export_kv(slot, [Span(start, stop, data)])
        return data.tobytes()

    def continued(slot: int, start: int) -> bytes:
        found = []
        for token in tokens[:8]:
            engine.decode([Step(slot, int(token))])
            found.append(engine.logits(slot).tobytes())
        engine.truncate(slot, start)
        engine.prefill(slot, tokens[start : start + 2 * TILE], logits=True)
        return b"".join([*found, engine.logits(slot).tobytes(), rows(slot, start, start + 2 * TILE)])

    def begun(slot: int) -> None:
        engine.truncate(slot, 0)
        engine.prefill(slot, tokens[:DEEP], logits=False)

    begun(0)
    engine.prefill(0, tokens[DEEP : DEEP + 60], logits=False)
    assert engine._padding.of(DEEP, 60)
    stop = DEEP + 60
    begun(1)
    engine.truncate(0, DEEP)
    assert continued(0, DEEP) == continued(1, DEEP)

    begun(0)
    engine.prefill(0, tokens[DEEP:stop], logits=False)
    kept = np.frombuffer(rows(0, 0, stop), np.uint8)
    engine.truncate(1, 0)
    engine.import_kv(1, [KVSegment(kept, stop, stop)])
    assert continued(0, stop) == continued(1, stop)
    engine.close()


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
    engine = LlamaEngine.load(Settings(model=str(tiny_model), ctx=1024, slots=1, threads=1).engine_options(), block_size=32)
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

    def padding(chosen: Settings) -> Padding:
        engine = LlamaEngine.load(chosen.engine_options(), block_size=TILE)
        engine.close()
        return engine._padding

    for other in (replace(settings, kv_type="bf16"), replace(settings, kv_type="q8_0"), replace(settings, model=str(windows))):
        assert padding(other) is NO_PADDING
    assert padding(settings) is not NO_PADDING or devices()
