"""The MLX engine keeps the contract, and its cached answers are those of a cold run, on tiny models of each kind of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.utils import load_model

import tiny_hf
from effort import SLOW
from headstart.config import Settings
from headstart.engines import registry
from headstart.engines.mlx import MlxEngine
from headstart.engines.mlx import padded as padding
from headstart.engines.mlx.ahead import StepAhead
from headstart.engines.mlx.batch import PerSlot, SlotsKV
from headstart.engines.mlx.layers import STEP, Form, Plane, Ring, kv_leaves, view
from headstart.engines.mlx.padded import PaddedKV, worthwhile
from headstart.engines.options import EngineOptions
from headstart.engines.proof import ordinary_tokens
from headstart.engines.proven import STILL
from headstart.errors import ConfigError, EngineError, ModelError
from headstart.interfaces.engine import KVSegment, Logits, Span, Step
from headstart.interfaces.tokens import Bytes
from headstart.serving.runtime import Runtime
from headstart.testing.conformance import CHECKS, BrokenPromise, ConformanceCheck, EngineUnderTest
from histories import Lab, Tally
from promises import PROMISES

MODELS = [
    pytest.param(name, marks=() if name in ("llama", "lfm2") else pytest.mark.slow)  # KV alone; KV and state
    for name in tiny_hf.MODELS
]
BLOCK_SIZES = {"granitemoehybrid": 256, "falcon_h1": 256}
"""Where 64 tokens are too few: mlx-lm computes these recurrent layers in steps of 256 tokens."""
SLICEABLE = ("llama", "qwen3", "qwen3-4bit")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest, folders: Path) -> Iterator[EngineUnderTest]:
    options = EngineOptions(str(tiny_hf.named(folders, request.param)), ctx=512, slots=2)
    found = EngineUnderTest(lambda: MlxEngine.load(options, block_size=BLOCK_SIZES.get(request.param, 64)))
    assert found.engine.traits.sliceable == (request.param in SLICEABLE)
    assert found.engine.traits.movable
    yield found
    found.close()


@pytest.mark.parametrize("check", PROMISES)
def test_mlx_conforms(check: ConformanceCheck, subject: EngineUnderTest) -> None:
    check(subject)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", MODELS)
def test_warm_answers_are_cold_ones(kind: str, folders: Path) -> None:
    """In exact mode, with a memory that does not hold everything. `-s` shows what happened."""
    model = str(tiny_hf.named(folders, kind))

    def load(slots: int) -> MlxEngine:
        return MlxEngine.load(EngineOptions(model, ctx=4096, slots=slots), block_size=BLOCK_SIZES.get(kind, 64))

    cold, histories = load(1), 300 if SLOW else 4
    shape = cold.shape
    budget = 48 * 64 * shape.kv_bytes_per_token + 24 * shape.state_bytes
    # mlx's streams belong to threads: the engine under test is loaded on the thread that uses it.
    with Runtime(lambda: load(2), Settings(reuse="exact", memory_budget=budget)) as runtime:
        tally = Tally()
        made = Lab(runtime, cold, words=150 if SLOW else 80, tally=tally)  # each letter is a token
        long = Lab(runtime, cold, words=430, tally=tally)
        for seed in range(histories):
            (long if SLOW and seed % 8 == 7 else made).run(seed)
        print(f"{kind}: {tally}")
        assert (tally.wrong, tally.wrong_replies) == (0, 0), tally
        assert tally.restoring >= histories / 4, tally
        if SLOW:
            assert sum(length > 1_500 for length in tally.prompts) >= 30, tally
            assert runtime.cache.store.counters["evicted"] > 0
    cold.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny_hf.MODELS)
def test_exactness_is_proved_at_load(kind: str, folders: Path) -> None:
    engine = registry.load(EngineOptions(str(tiny_hf.named(folders, kind)), ctx=2048, slots=2))
    assert engine.traits.exact, engine.traits.notes
    assert engine.traits.chunking or kind in BLOCK_SIZES
    engine.close()


def test_exact_mode_needs_a_context_in_which_positions_do_not_depend_on_calls(tmp_path: Path) -> None:
    """Fault: with `dynamic` scaling KV behind the trained length depends on where a call ends. The proof ends before."""
    trained, end, block = 2048, 2048 + STEP, 64
    sizes = {"max_position_embeddings": trained, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    tiny_hf.write(tmp_path / "model", "llama", **sizes)
    options = EngineOptions(str(tmp_path / "model"), ctx=trained, slots=2, state_dir=tmp_path)
    short = MlxEngine.load(options)
    assert short.traits.exact, short.traits.notes
    short.close()
    engine = MlxEngine.load(replace(options, ctx=end))
    assert not engine.traits.exact
    assert not engine.traits.decode_is_prefill
    assert f"exact mode needs a context of at most {trained} tokens" in engine.traits.notes[-1]
    tokens = ordinary_tokens(engine.tokenizer, end)
    kv = np.empty((2, 3, block * engine.shape.kv_bytes_per_token), np.uint8)
    starts = [trained - 2 * block, trained - block, trained]
    for slot, last in enumerate((end, trained)):  # the second slot passes the trained length within a call
        for start, stop in pairwise([*range(0, last, block), end]):
            engine.prefill(slot, tokens[start:stop], logits=False)
        engine.export_kv(slot, [Span(at, at + block, out) for at, out in zip(starts, kv[slot], strict=True)])
    assert [np.array_equal(*kv[:, number]) for number in range(3)] == [True, False, False]
    assert engine.fingerprint != short.fingerprint, "a block before the trained length has other bits too"
    engine.close()
    again = MlxEngine.load(replace(options, ctx=end))
    assert STILL in again.traits.notes
    assert not again.traits.exact
    again.close()


def ring_in_another_order(patch: pytest.MonkeyPatch) -> None:
    put = Ring.put

    def turned(ring: Ring, cache: RotatingKVCache, length: int, data: Bytes) -> int:
        size = put(ring, cache, length, data)
        cache.keys, cache.values = mx.roll(cache.keys, 1, 2), mx.roll(cache.values, 1, 2)
        return size

    patch.setattr(Ring, "put", turned)


def ring_one_row_short(patch: pytest.MonkeyPatch) -> None:
    put = Ring.put

    def short(ring: Ring, cache: RotatingKVCache, length: int, data: Bytes) -> int:
        size = put(ring, cache, length, data)
        keys, values, *_ = cache.state
        cache.state = (keys[:, :, 1:], values[:, :, 1:], length, 0, ring.window, keys.shape[2] - 1)
        return size

    patch.setattr(Ring, "put", short)


def state_of_another_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Form, "check_state", lambda form, state, length: None)


def kv_of_another_slot(patch: pytest.MonkeyPatch) -> None:
    take = Plane.take
    patch.setattr(Plane, "take", lambda plane, array, parts, out: take(plane, mx.roll(array, 1, 1), parts, out))


def nothing_else(patch: pytest.MonkeyPatch) -> None:
    """The block size alone is wrong."""


@pytest.mark.parametrize(
    ("fault", "kind", "check"),
    [
        (ring_in_another_order, "gemma3_text", "restored_kv_continues_with_the_same_bits"),
        (ring_one_row_short, "gemma3_text", "imported_checkpoints_come_out_again"),
        (state_of_another_length, "gemma3_text", "a_checkpoint_of_another_length_is_refused"),
        (kv_of_another_slot, "llama", "restored_kv_continues_with_the_same_bits"),
        (nothing_else, "granitemoehybrid", "prefill_may_span_blocks"),
    ],
)
def test_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], kind: str, check: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks can fail, and the proof at load uses the same calls."""
    options = EngineOptions(str(tiny_hf.named(folders, kind)), ctx=512, slots=2)
    fault(monkeypatch)
    faulty = EngineUnderTest(lambda: MlxEngine.load(options, block_size=64))
    with pytest.raises((BrokenPromise, EngineError)):
        next(one for one in CHECKS if str(one) == check)(faulty)
    faulty.close()


Filled = Callable[[str, int], MlxEngine]


@pytest.fixture
def filled(folders: Path) -> Iterator[Filled]:
    """Loads an engine: (model, slots). Its slots have prompts of different lengths. It is closed after the test."""
    with ExitStack() as closing:

        def load(kind: str, slots: int) -> MlxEngine:
            options = EngineOptions(str(tiny_hf.named(folders, kind)), ctx=512, slots=slots)
            engine = MlxEngine.load(options, block_size=64)
            closing.callback(engine.close)
            for slot, count in enumerate((200, 64, 7, 130)[:slots]):
                engine.prefill(slot, ordinary_tokens(engine.tokenizer, count), logits=True)
            return engine

        yield load


def replies(engine: MlxEngine, groups: Sequence[Sequence[int]], *, together: bool) -> list[list[Logits]]:
    """Logits of each slot in each step, in which the slots of a group are decoded, in one batch or one by one."""
    found: list[list[Logits]] = [[] for _ in range(engine.shape.slots)]
    for number, slots in enumerate(groups):
        steps = [Step(slot, (31 * number + slot) % 256) for slot in slots]
        for batch in [steps] if together else [[step] for step in steps]:
            engine.decode(batch)
            for step in batch:
                found[step.slot].append(engine.logits(step.slot))
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_says_what_each_slot_says_alone(kind: str, filled: Filled) -> None:
    """Also when slots join, leave, are emptied and change places."""
    groups = [(0, 1, 2, 3)] * 3 + [(0, 2)] * 2 + [(3, 2, 1, 0), (1,)] + [(0, 1, 2, 3)] * 2
    found = []
    for together in (True, False):
        engine = filled(kind, 4)
        assert engine.traits.notes == ("the block size of 64 was given, not proved",), "the model is not decoded in batches"
        first = replies(engine, groups, together=together)
        engine.truncate(1, 0)
        engine.prefill(1, ordinary_tokens(engine.tokenizer, 30), logits=False)
        found.append([a + b for a, b in zip(first, replies(engine, groups, together=together), strict=True)])
    for batched, alone in zip(*found, strict=True):
        # A fast BLAS rounds a batch in another way. Exact mode decodes alone, unless the proof finds the same bits.
        np.testing.assert_allclose(batched, alone, atol=1e-3 if kind in tiny_hf.KINDS else 0.1)


def interrupted(engine: MlxEngine) -> list[bytes]:
    """Logits of steps of decoding, and what other calls between them take out of the slots."""
    found = []
    for number, slots in enumerate([(0, 1, 2, 3)] * 6 + [(1, 3), (2,), (2,), (2,), (3, 1)]):
        found += [row.tobytes() for reply in replies(engine, [slots], together=True) for row in reply]
        slot, length = slots[0], engine._slots[slots[0]].length
        if number % 3 == 0:
            kv = np.empty(length * engine.shape.kv_bytes_per_token, np.uint8)
            engine.export_kv(slot, [Span(0, length, kv)])
            state = np.empty(engine.shape.state_bytes, np.uint8)
            size = engine.export_checkpoint(slot, state) if engine.traits.stateful else 0
            found += [kv.tobytes(), state[:size].tobytes()]
        elif number % 3 == 1:
            engine.prefill(slots[-1], ordinary_tokens(engine.tokenizer, 5 + number), logits=False)
    return found


def repeats(engine: MlxEngine, due: list[bytes]) -> bool:
    """Not in an assert: with CI=true pytest compares all bytes for its message, which takes minutes."""
    return interrupted(engine) == due


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_built_ahead_changes_no_bit(kind: str, filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another call comes first."""
    due, undone, undo = interrupted(filled(kind, 4)), [], StepAhead.undo
    with monkeypatch.context() as patch:
        patch.setattr(MlxEngine, "_build_ahead", lambda engine, numbers: None)
        assert repeats(filled(kind, 4), due)
    monkeypatch.setattr(StepAhead, "undo", lambda step: (undone.append(step), undo(step)))
    assert repeats(filled(kind, 4), due)
    assert len(undone) >= 6
    engine = filled(kind, 4)
    monkeypatch.setattr(StepAhead, "undo", lambda step: None)
    with pytest.raises((AssertionError, EngineError)):  # the test can fail
        assert repeats(engine, due)


def exported(engine: MlxEngine, slot: int) -> bytes:
    kv = np.empty(engine.length(slot) * engine.shape.kv_bytes_per_token, np.uint8)
    engine.export_kv(slot, [Span(0, engine.length(slot), kv)])
    return kv.tobytes()


def test_short_slots_are_padded_together(filled: Filled) -> None:
    """While the same ones are decoded. Each has its tokens when another call wants one of them."""
    engine = filled("llama", 4)
    replies(engine, [(0, 1, 2, 3)] * 3, together=True)
    assert list(engine._padded) == [(0, 1, 2, 3)]
    assert [next(kv_leaves(held.caches)).offset for held in engine._slots] == [200, 64, 7, 130]
    replies(engine, [(2,)], together=True)
    assert not engine._padded
    assert [engine.length(slot) for slot in range(4)] == [203, 67, 11, 133]
    replies(engine, [(0, 1), (2, 3)], together=True)  # two batches at a time
    assert list(engine._padded) == [(0, 1), (2, 3)]
    replies(engine, [(1, 2)], together=True)
    assert list(engine._padded) == [(1, 2)]
    engine.truncate(1, 3)
    assert not engine._padded


@pytest.mark.parametrize(
    ("lengths", "kv_bytes", "padded"),
    [
        ((60, 64, 58, 70), 50_000, True),
        ((2_000, 2_000, 2_000, 2_000), 50_000, False),  # 400 MB
        ((300, 300), 50_000, True),
        ((300, 20, 20, 20), 1_000, False),  # 840 tokens are padding, and 360 are not
        ((64,), 1_000, False),
        ((64, 64), 0, False),  # states alone
    ],
)
def test_long_and_unlike_slots_are_not_padded(lengths: tuple[int, ...], kv_bytes: int, padded: bool) -> None:
    assert worthwhile(lengths, kv_bytes) == padded


def test_a_batch_that_grows_too_large_is_padded_no_more(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = filled("llama", 2)
    monkeypatch.setattr(padding, "MOST_BYTES", 2 * (200 + STEP + 3) * engine.shape.kv_bytes_per_token)
    seen = []
    for _ in range(6):
        replies(engine, [(0, 1)], together=True)
        seen.append(bool(engine._padded))
    assert seen == [True] * 4 + [False] * 2
    assert engine.length(0) == 206


def test_what_is_proved_of_decoding_is_never_padded(folders: Path) -> None:
    """The proof of `decode_is_prefill` does not see padded batches."""
    engine = MlxEngine.load(EngineOptions(str(tiny_hf.named(folders, "llama")), ctx=512, slots=2))
    assert engine.traits.decode_is_prefill
    for slot in range(2):
        engine.prefill(slot, ordinary_tokens(engine.tokenizer, 20), logits=False)
    replies(engine, [(0, 1)] * 2, together=True)
    assert not engine._padded
    engine.close()


def test_a_failed_step_leaves_the_other_slots_whole(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    due, engine = filled("llama", 3), filled("llama", 3)
    for one in (due, engine):
        replies(one, [(0, 1)] * 3, together=True)
    with monkeypatch.context() as patch:
        patch.setattr(llama.Model, "__call__", lambda *given, **options: mx.zeros((1, 1))[5, 5])
        patch.setattr(MlxEngine, "_part", lambda *given: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(EngineError, match="mlx could not compute"):
            engine.decode([Step(1, 5), Step(2, 5)])
    assert [engine.length(slot) for slot in (2, 1, 0)] == [0, 0, 203]
    assert exported(engine, 0) == exported(due, 0)


def test_a_slot_can_be_emptied_when_its_batch_cannot_be_ended(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: it raised an error that is none of the engine's, and the scheduler ended."""
    due, engine = filled("llama", 2), filled("llama", 2)
    for one in (due, engine):
        replies(one, [(0, 1)] * 3, together=True)
    with monkeypatch.context() as patch:
        patch.setattr(padding, "reserve", lambda *given: (_ for _ in ()).throw(RuntimeError("no memory")))
        for refused in (lambda: engine.truncate(0, 3), lambda: exported(engine, 1)):
            with pytest.raises(EngineError, match="no memory"):
                refused()
        engine.truncate(0, 0)
        kv = np.arange(256 * engine.shape.kv_bytes_per_token, dtype=np.uint8) % 64  # no float that is none
        engine.import_kv(0, [KVSegment(kv, 256, 256)])
    assert [engine.length(slot) for slot in range(2)] == [256, 67]
    assert exported(engine, 0) == kv.tobytes(), "the batch gave its tokens back to what was restored"
    assert exported(engine, 1) == exported(due, 1)


def test_a_padded_batch_that_mixes_slots_is_found_at_load(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = PaddedKV.give_back

    def mixed(batch: PaddedKV, most: int, form: Form) -> None:
        batch._slots.reverse()
        give_back(batch, most, form)
        batch._slots.reverse()

    monkeypatch.setattr(PaddedKV, "give_back", mixed)
    engine = filled("llama", 2)
    assert "batches are not padded: a padded batch of two gave other logits" in engine.traits.notes
    replies(engine, [(0, 1)] * 2, together=True)
    assert not engine._padded


def test_a_model_that_looks_at_its_tokens_is_found_at_load(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it builds its graph: the step's tokens are not known yet."""
    call = llama.Model.__call__

    def looking(model: llama.Model, tokens: mx.array, **options: Any) -> mx.array:
        return call(model, mx.array(tokens.tolist()), **options)

    due = replies(filled("llama", 2), [(0, 1)] * 3, together=True)
    monkeypatch.setattr(llama.Model, "__call__", looking)
    engine = filled("llama", 2)
    assert "no step is built while the last one is computed: it gave other logits" in engine.traits.notes
    assert np.array_equal(replies(engine, [(0, 1)] * 3, together=True), due)


def test_a_batch_that_mixes_slots_is_found_at_load(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    append = SlotsKV.update_and_fetch

    def mixed(layer: SlotsKV, keys: mx.array, values: mx.array) -> tuple[PerSlot, PerSlot]:
        return append(layer, keys[::-1], values[::-1])

    monkeypatch.setattr(SlotsKV, "update_and_fetch", mixed)
    engine = filled("llama", 2)
    assert "decoded one by one, not in batches: a batch of two gave other logits" in engine.traits.notes[0]
    found = replies(engine, [(0, 1)], together=True)
    monkeypatch.undo()
    assert np.array_equal(found, replies(filled("llama", 2), [(0, 1)], together=False))


@pytest.mark.parametrize("kind", ["llama", pytest.param("lfm2", marks=pytest.mark.slow)])  # with a head, and without one
def test_logits_are_those_of_mlx_lm(kind: str, filled: Filled, folders: Path) -> None:
    """The head sees the last token of a call only."""
    engine = filled(kind, 1)
    model, _ = load_model(tiny_hf.named(folders, kind))
    whole = model(mx.array(ordinary_tokens(engine.tokenizer, 200))[None])
    np.testing.assert_allclose(engine.logits(0), np.array(whole[0, -1])[: engine.tokenizer.n_vocab], atol=1e-4)
    assert engine._model(mx.array([[1, 2, 3]])).shape[1] == 1


def test_bytes_of_kv_are_a_view_of_the_slot(filled: Filled) -> None:
    """Nothing is copied but what is wanted, and an import writes into the memory that the slot has."""
    engine = filled("llama", 2)
    before = [view(leaf.keys) for leaf in engine._slots[0].caches]
    assert all(np.shares_memory(one, view(leaf.keys)) for one, leaf in zip(before, engine._slots[0].caches, strict=True))
    kv = np.empty(64 * engine.shape.kv_bytes_per_token, np.uint8)
    engine.export_kv(1, [Span(0, 64, kv)])
    engine.import_kv(0, [KVSegment(kv, 64, 60)])
    assert all(np.shares_memory(one, view(leaf.keys)) for one, leaf in zip(before, engine._slots[0].caches, strict=True))
    del before
    engine.prefill(0, np.arange(4, dtype=np.int32), logits=False)
    again = np.empty(60 * engine.shape.kv_bytes_per_token, np.uint8)
    engine.export_kv(0, [Span(0, 60, again)])
    engine.import_kv(1, [KVSegment(kv, 64, 60)])
    due = np.empty_like(again)
    engine.export_kv(1, [Span(0, 60, due)])
    assert np.array_equal(again, due)


def test_nothing_is_compiled_on_a_cpu(filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx would load compiled code from a folder that other users may have made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine = filled("lfm2", 2)
    replies(engine, [(0, 1), (0,)], together=True)
    assert not list(tmp_path.iterdir())
    if SLOW:  # the test can fail
        mx.enable_compile()
        engine.prefill(0, np.arange(5, dtype=np.int32), logits=True)
        mx.disable_compile()
        assert list(tmp_path.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_5"])  # rows; rings; arrays
def test_memory_stays_flat(kind: str, folders: Path) -> None:
    """Over 2,000 requests that prefill, export, decode together, rewind or cut, and import."""
    engine = MlxEngine.load(EngineOptions(str(tiny_hf.named(folders, kind)), ctx=256, slots=4), block_size=64)
    dice, process, sizes = np.random.default_rng(0), psutil.Process(), []
    tokens = ordinary_tokens(engine.tokenizer, 256)
    state, kv = np.empty(engine.shape.state_bytes, np.uint8), np.empty(256 * engine.shape.kv_bytes_per_token, np.uint8)
    for number in range(2_000):
        slot, count = number % 4, int(dice.integers(1, 200))
        engine.truncate(slot, 0)
        engine.prefill(slot, tokens[:count], logits=True)
        engine.export_kv(slot, [Span(0, count, kv)])
        segments = [KVSegment(kv, count, count)]
        for _ in range(2):
            engine.decode([Step(one, 5) for one in range(4) if engine.length(one) < 256])
        if engine.traits.stateful:
            engine.truncate(slot, 0)
            engine.prefill(slot, tokens[:count], logits=False)
            saved = state[: engine.export_checkpoint(slot, state)]
            engine.decode([Step(slot, 5)])
            engine.rewind(slot, count, saved)
            engine.import_checkpoint((slot + 1) % 4, segments, saved)
        else:
            engine.truncate(slot, count)
            engine.import_kv((slot + 1) % 4, segments)
        if number % 100 == 99:
            sizes.append(process.memory_info().rss >> 10)
    half = len(sizes) // 2
    assert max(sizes[half:]) <= max(sizes[:half]) + (8 << 10), f"KiB after every 100 requests: {sizes}"
    engine.close()


def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"no model\*\.safetensors"):
        registry.check(EngineOptions(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no language model"):
        registry.check(EngineOptions(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "x", "model_file": "code.py"}')
    with pytest.raises(ModelError, match="code of its own"):
        registry.check(EngineOptions(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "t9", "auto_map": {"AutoModel": "code.Model"}}')
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    with pytest.raises(ModelError, match=r"does not know models of the kind 't9' .* code of its own"):
        registry.load(EngineOptions(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"take 0\.0 GiB, and 0\.0 GiB of memory are available"):
        registry.load(EngineOptions(str(tmp_path), memory=1 << 19))
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        registry.load(EngineOptions(str(tmp_path)))
