"""Decoding behind restored and rewound tokens has the bits of decoding behind live ones, with any number of threads.

With several threads llama.cpp gives each an equal share of the cells in use, so bits follow where tokens lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import tiny
from driving import checkpoint, export, fill, last_cells, tokens_of
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.engines.llama.blob import BlobLayout
from headstart.interfaces.engine import KVSegment, Step

SLOW_THREADS = [pytest.param(threads, marks=pytest.mark.slow) for threads in (3, 4)]
WINDOW = 512


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gemma3 with the window of the real one."""
    return tiny.write(tmp_path_factory.mktemp("windows") / "gemma3.gguf", "gemma3", window=WINDOW)


@contextmanager
def loaded(path: Path, **more: Any) -> Iterator[LlamaEngine]:
    settings = Settings(**{"model": str(path), "ctx": 2304, "slots": 2, "memory_budget": 0, **more})
    engine = LlamaEngine.load(settings.engine_options())
    yield engine
    engine.close()


def decoded(engine: LlamaEngine, slot: int, count: int = 8) -> list[str]:
    """Digests of the logits behind a short tail and behind each of `count` tokens: pytest would compare bytes for minutes."""
    fill(engine, slot, tokens_of(engine, 5, seed=3), logits=True)
    found = [digest(engine, slot)]
    for token in range(100, 100 + count):
        engine.decode([Step(slot, token)])
        found.append(digest(engine, slot))
    return found


def digest(engine: LlamaEngine, slot: int) -> str:
    return sha256(engine.logits(slot).tobytes()).hexdigest()


def saved(engine: LlamaEngine, slot: int) -> tuple[list[KVSegment], Any]:
    return export(engine, slot, 0, engine.length(slot)), checkpoint(engine, slot) if engine.traits.stateful else None


def put(engine: LlamaEngine, slot: int, rows: list[KVSegment], state: Any) -> None:
    if state is None:
        engine.import_kv(slot, rows)
    else:
        engine.import_checkpoint(slot, rows, state)


def back(engine: LlamaEngine, slot: int, length: int, state: Any) -> None:
    if state is None:
        engine.truncate(slot, length)
    else:
        engine.rewind(slot, length, state)


def assert_decoding_is_exact(engine: LlamaEngine, depths: tuple[int, ...] = (448, 640, 1216, 2048)) -> None:
    """Also of a slot that goes back behind where its own content came from, and when others are full."""
    tokens = tokens_of(engine, max(depths))
    engine.truncate(0, 0)
    kept: dict[int, tuple[list[KVSegment], Any, list[str]]] = {}
    for depth in depths:
        start = engine.length(0)
        fill(engine, 0, tokens[start:depth], *_calls(depth - start, engine.shape.batch))
        rows, state = saved(engine, 0)
        cold = decoded(engine, 0)
        back(engine, 0, depth, state)
        assert decoded(engine, 0) == cold, f"rewound to {depth}"
        back(engine, 0, depth, state)
        put(engine, 1, rows, state)
        assert decoded(engine, 1) == cold, f"restored to {depth}"
        kept[depth] = rows, state, cold
        for earlier, (_, before, due) in reversed(kept.items()):
            back(engine, 1, earlier, before)
            assert decoded(engine, 1) == due, f"restored to {depth}, rewound to {earlier}"


def _calls(count: int, most: int) -> list[int]:
    return [most] * (count // most) + ([count % most] if count % most else [])


@pytest.mark.parametrize(
    ("threads", "kv_type"),
    [
        (2, "f16"),
        pytest.param(1, "f16", marks=pytest.mark.slow),
        *(pytest.param(threads, kv_type, marks=pytest.mark.slow) for threads in (1, 2) for kv_type in ("bf16", "q8_0")),
        *(pytest.param(threads, kv_type, marks=pytest.mark.slow) for threads in (3, 4) for kv_type in ("f16", "bf16", "q8_0")),
    ],
)
def test_behind_a_window(windowed: Path, threads: int, kv_type: str) -> None:
    with loaded(windowed, threads=threads, kv_type=kv_type, reuse="exact") as engine:
        assert engine.traits.exact
        assert engine.facts.details["decode_threads"] == threads
        assert_decoding_is_exact(engine)


@pytest.mark.parametrize(
    "architecture",
    ["qwen35", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mamba2", "llama", "lfm2", "granitehybrid"))],
)
@pytest.mark.parametrize("threads", [2, *SLOW_THREADS])
def test_of_other_models(architecture: str, threads: int, tmp_path: Path) -> None:
    with loaded(tiny.write(tmp_path / "tiny.gguf", architecture), threads=threads) as engine:
        assert engine.traits.exact
        assert_decoding_is_exact(engine, (448, 1216))


@pytest.mark.slow
def test_with_an_adapter(windowed: Path, tiny_model: Path, tmp_path: Path) -> None:
    adapter = tiny.write_adapter(tmp_path / "adapter.gguf")
    with loaded(tiny_model, threads=2, lora=adapter) as engine:
        assert engine.traits.exact
        assert_decoding_is_exact(engine, (448, 1216))


@pytest.mark.slow
def test_of_the_real_gemma(gemma_model: Path) -> None:
    with loaded(gemma_model, threads=2) as engine:
        assert engine.traits.exact
        assert_decoding_is_exact(engine, (448, 1216))


# ── a fault of this kind is found ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def displaced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Windows are put back in whole tiles, but not into the cells where a cold run has them."""

    def join(form: BlobLayout, pieces: Any, state: Any, out: Any) -> int:
        size = rightly(form, pieces, state, out)
        if state is None or not form.blank(state):
            return size
        length, cells = (int(word) for word in state[:8].view("<u4"))
        blob = last_cells(out[:size], form, length, cells + (length - cells) % 64)
        out[: len(blob)] = blob
        return len(blob)

    rightly = BlobLayout.join
    monkeypatch.setattr(BlobLayout, "join", join)
    return monkeypatch.undo


def test_a_displaced_window_is_found(windowed: Path, displaced: Callable[[], None], tmp_path: Path) -> None:
    """Not by the logits of prompts, and not with one thread."""
    with loaded(windowed, threads=2, state_dir=tmp_path) as engine:
        assert engine.traits.canonical
        assert not engine.traits.decode_exact
        with pytest.raises(AssertionError, match="restored"):
            assert_decoding_is_exact(engine)
    with loaded(windowed, threads=1, state_dir=tmp_path) as engine:
        assert engine.traits.exact
    displaced()
    with loaded(windowed, threads=2, state_dir=tmp_path) as engine:
        assert not engine.traits.exact, "as it was proved: what moves rows looks the same"
    with loaded(windowed, threads=2, state_dir=tmp_path / "another") as engine:
        assert engine.traits.exact


def test_exact_mode_then_decodes_with_one_thread(windowed: Path, displaced: Callable[[], None], tmp_path: Path) -> None:
    with loaded(windowed, threads=2, reuse="exact", state_dir=tmp_path) as engine:
        assert engine.traits.exact
        assert engine.facts.details["decode_threads"] == 1
        assert "decoding with 1 thread" in engine.traits.notes[-1]
        assert_decoding_is_exact(engine, (640, 1216))


def test_one_thread_is_one_of_the_counts_that_agree(windowed: Path) -> None:
    """The kernels differ by threads, so there is something to find: else nothing here would be tested."""
    found = []
    for threads in (1, 2):
        with loaded(windowed, threads=threads) as engine:
            tokens = tokens_of(engine, 1216)
            fill(engine, 0, tokens, *_calls(1216, engine.shape.batch))
            found.append(decoded(engine, 0))
    assert found[0][0] == found[1][0], "the prompt's"
    assert found[0][1:] != found[1][1:]
