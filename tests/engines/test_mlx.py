"""The MLX engine keeps the contract, and its cached answers are those of a cold run, on tiny models of each kind of cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import tiny_hf
from effort import SLOW
from headstart.config import Settings
from headstart.engines import registry
from headstart.engines.mlx import MlxEngine
from headstart.engines.mlx.layers import Form
from headstart.engines.options import EngineOptions
from headstart.errors import EngineError, ModelError
from headstart.interfaces.engine import KVSegment, Span
from headstart.serving.runtime import Runtime
from headstart.testing.conformance import CHECKS, ConformanceCheck, EngineUnderTest
from histories import Lab

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


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_mlx_conforms(check: ConformanceCheck, subject: EngineUnderTest) -> None:
    check(subject)


@pytest.mark.parametrize("kind", MODELS)
def test_warm_answers_are_cold_ones(kind: str, folders: Path) -> None:
    """In exact mode, with a memory that does not hold everything."""
    model = str(tiny_hf.named(folders, kind))

    def load(slots: int) -> MlxEngine:
        return MlxEngine.load(EngineOptions(model, ctx=4096, slots=slots), block_size=BLOCK_SIZES.get(kind, 64))

    cold, histories = load(1), 300 if SLOW else 4
    shape = cold.shape
    budget = 48 * 64 * shape.kv_bytes_per_token + 24 * shape.state_bytes
    # mlx's streams belong to threads: the engine under test is loaded on the thread that uses it.
    with Runtime(lambda: load(2), Settings(reuse="exact", memory_budget=budget)) as runtime:
        made = Lab(runtime, cold, words=150 if SLOW else 80)  # each letter is a token
        for seed in range(histories):
            made.run(seed)
        tally = made.tally
        assert (tally.wrong, tally.wrong_replies) == (0, 0), tally
        assert tally.restoring >= histories / 4, tally
        assert runtime.cache.store.counters["evicted"] > 0 or not SLOW
    cold.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny_hf.MODELS)
def test_exactness_is_proved_at_load(kind: str, folders: Path) -> None:
    engine = registry.load(EngineOptions(str(tiny_hf.named(folders, kind)), ctx=2048, slots=2))
    assert engine.traits.exact, engine.traits.notes
    assert engine.traits.chunking or kind in BLOCK_SIZES
    engine.close()


def test_a_ring_that_is_restored_in_another_order_is_found(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail."""
    engine = MlxEngine.load(EngineOptions(str(tiny_hf.named(folders, "gemma3_text")), ctx=512, slots=2), block_size=64)
    tokens = np.arange(100, dtype=np.int32) % 200
    engine.prefill(0, tokens, logits=False)
    kv, state = np.empty(100 * engine.shape.kv_bytes_per_token, np.uint8), np.empty(engine.shape.state_bytes, np.uint8)
    engine.export_kv(0, [Span(0, 100, kv)])
    state = state[: engine.export_checkpoint(0, state)]
    engine.prefill(0, tokens[:9], logits=True)
    due = engine.logits(0)

    def restored() -> bool:
        engine.import_checkpoint(1, [KVSegment(kv, 100, 100)], state)
        engine.prefill(1, tokens[:9], logits=True)
        return bool(np.array_equal(engine.logits(1), due))

    assert restored()
    put = Form.import_state

    def turned(form: Form, caches: list[object], length: int, data: object) -> None:
        put(form, caches, length, data)  # type: ignore[arg-type]
        for cache in caches:
            if hasattr(cache, "_idx"):
                cache.keys, cache.values = mx.roll(cache.keys, 1, 2), mx.roll(cache.values, 1, 2)

    monkeypatch.setattr(Form, "import_state", turned)
    assert not restored()
    with pytest.raises(EngineError, match="no checkpoint at 99"):
        engine.import_checkpoint(1, [KVSegment(kv, 100, 99)], state)
    assert engine.length(1) == 0
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
