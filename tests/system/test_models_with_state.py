"""Models with state in llama.cpp: checkpoints beside rows, of every kind of state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from driving import SMALL, checkpoint, empty, export, fill, tokens_of
from effort import SLOW
from headstart.engines.llama import LlamaEngine, kv_transfer
from headstart.engines.llama import part as llama_part
from headstart.engines.llama.binding import lib
from headstart.engines.llama.blob import BlobLayout
from headstart.errors import EngineError
from headstart.interfaces.engine import KVSegment, Span, Step
from headstart.serving.memory_budget import MemoryBudget

WINDOWS = ("gemma3", "gpt-oss")
STATE_ONLY = ("mamba2", "rwkv7")
WINDOWED_LFM2 = "lfm2 with windows"
"""State and windows in one model, and no layer that keeps all rows."""
MAIN = ("gemma3", "qwen35", "mamba2", WINDOWED_LFM2)
"""A window, a recurrent state beside KV, one without, and one with a window. The others are slow."""
OTHERS = tuple(kind for kind in tiny.STATEFUL if kind not in MAIN)
WINDOW = tiny.WINDOW


def write(folder: Path, kind: str, window: int = WINDOW) -> Path:
    """A tiny model of this kind; `window` is that of sliding windows."""
    name = "lfm2" if kind == WINDOWED_LFM2 else kind
    path = folder / f"{kind}-{window}.gguf"
    return tiny.write(path, name, window=None if name == kind and window == WINDOW else window)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stateful")


@pytest.fixture(scope="module", params=[*MAIN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[LlamaEngine]:
    loaded = LlamaEngine.load(replace(SMALL, model=str(write(folder, request.param))).engine_options())
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def kind(engine: LlamaEngine) -> str:
    name = str(engine.facts.details["architecture"])
    return WINDOWED_LFM2 if engine.facts.details["path"].endswith(f"{WINDOWED_LFM2}-{WINDOW}.gguf") else name


@pytest.fixture(autouse=True)
def _empty_slots(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("engine", "gemma"):
        if name in request.fixturenames:
            empty(request.getfixturevalue(name))


def cold(engine: LlamaEngine, tokens: Any, slot: int = 0) -> bytes:
    """Logits behind the tokens, computed canonically."""
    engine.truncate(slot, 0)
    return on(engine, tokens, slot)


def on(engine: LlamaEngine, tokens: Any, slot: int) -> bytes:
    """Logits behind the tokens, of which the slot holds the first ones: whole blocks, then the tail."""
    last = (len(tokens) - 1) // 64 * 64
    held = engine.length(slot)
    for start in range(held, last, engine.shape.batch):
        fill(engine, slot, tokens[start : min(start + engine.shape.batch, last)])
    fill(engine, slot, tokens[last:], logits=True)
    return engine.logits(slot).tobytes()


def checkpoints(engine: LlamaEngine, tokens: Any, points: tuple[int, ...], slot: int = 0) -> dict[int, tuple[KVSegment, Any]]:
    """Rows and checkpoints at these lengths, taken on the way; the slot then holds the tokens up to the last point."""
    engine.truncate(slot, 0)
    taken = {}
    for start, stop in pairwise((0, *points)):
        for at in range(start, stop, engine.shape.batch):
            fill(engine, slot, tokens[at : min(at + engine.shape.batch, stop)])
        taken[stop] = checkpoint(engine, slot)
    return {point: (export(engine, slot, 0, point)[0], taken[point]) for point in points}


# ── what it is ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_traits_and_sizes(engine: LlamaEngine, kind: str) -> None:
    traits, shape = engine.traits, engine.shape
    assert traits.stateful
    assert traits.canonical, traits.notes
    assert traits.chunking
    assert traits.block_size == 64
    assert not traits.decode_is_prefill
    assert (shape.kv_bytes_per_token == 0) == (kind in (*STATE_ONLY, WINDOWED_LFM2))
    assert [engine.length(slot) for slot in range(shape.slots)] == [0, 0, 0]
    assert engine.facts.details["state_bytes"] == shape.state_bytes
    sizes = []
    for length in (1, WINDOW, shape.ctx):
        fill(engine, 0, tokens_of(engine, length - engine.length(0))[: shape.batch])
        while engine.length(0) < length:
            fill(engine, 0, tokens_of(engine, min(shape.batch, length - engine.length(0))))
        sizes.append(len(checkpoint(engine, 0)))
    assert sizes[1] == sizes[2] == shape.state_bytes, "what the shape says is had when the window is full"
    assert (sizes[0] < sizes[1]) == (kind in (*WINDOWS, WINDOWED_LFM2))
    assert shape.transfer_bytes >= shape.ctx * shape.kv_bytes_per_token + shape.state_bytes
    with pytest.raises(EngineError, match="no room"):
        engine.export_checkpoint(0, np.empty(shape.state_bytes - 1, np.uint8))
    with pytest.raises(EngineError, match="no checkpoint of 0 tokens"):
        engine.export_checkpoint(1, np.empty(shape.state_bytes, np.uint8))


# ── exactness ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("plans", [3 if SLOW else 1, pytest.param(100, marks=pytest.mark.slow)])
def test_random_plans_equal_cold(engine: LlamaEngine, plans: int) -> None:
    """Sequences in random calls at block boundaries, left and taken up again at random points in random slots."""
    dice = np.random.default_rng(plans)
    for _ in range(plans):
        tokens = tokens_of(engine, int(dice.integers(130, 1000)), seed=int(dice.integers(1 << 30)))
        expected = cold(engine, tokens)
        blocks = (len(tokens) - 1) // 64
        empty(engine)
        saved: dict[int, tuple[KVSegment, Any]] = {}
        slot = 0
        for _ in range(6):
            if saved and dice.random() < 0.8:
                point = int(dice.choice(list(saved)))
                if engine.length(slot) >= point and dice.random() < 0.5:
                    engine.rewind(slot, point, saved[point][1])
                else:
                    slot = int(dice.integers(3))
                    engine.import_checkpoint(slot, [saved[point][0]], saved[point][1])
            else:
                engine.truncate(slot, 0)
            while (at := engine.length(slot)) < blocks * 64 and dice.random() < 0.8:
                size = 64 * int(dice.integers(1, min(8, blocks - at // 64) + 1))
                fill(engine, slot, tokens[at : at + size])
                if dice.random() < 0.7:
                    saved[at + size] = (export(engine, slot, 0, at + size)[0], checkpoint(engine, slot))
            if dice.random() < 0.5:
                assert on(engine, tokens, slot) == expected
                # What lies there now belongs to this sequence, up to the last block, and is to be rewound first.
                if not (usable := [point for point in saved if point <= blocks * 64]):
                    engine.truncate(slot, 0)
                else:
                    engine.rewind(slot, max(usable), saved[max(usable)][1])
        if engine.length(slot) > blocks * 64:
            engine.truncate(slot, 0)
        assert on(engine, tokens, slot) == expected


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def refused(engine: LlamaEngine, slot: int, tokens: Any, expected: bytes, match: str | None = None) -> Iterator[None]:
    """What is tried fails, and leaves an empty slot that is as good as new."""
    with pytest.raises(EngineError, match=match):
        yield
    assert engine.length(slot) == 0
    assert on(engine, tokens, slot) == expected


def test_a_checkpoint_of_another_length_is_refused(engine: LlamaEngine) -> None:
    tokens = tokens_of(engine, 200)
    expected = cold(engine, tokens)
    taken = checkpoints(engine, tokens, (64, 192))
    for point, wrong in ((64, 192), (192, 64)):
        rows, state = taken[point][0], taken[wrong][1]
        with refused(engine, 1, tokens, expected, "was due"):
            engine.import_checkpoint(1, [rows], state)
        with refused(engine, 1, tokens, expected, "was due"):
            engine.rewind(1, point, state)
        if recurrence(engine):  # it says itself where it is from
            state[:4].view("<u4")[0] = point
            with refused(engine, 1, tokens, expected, r"recurrent state|in its window"):
                engine.import_checkpoint(1, [rows], state)
            state[:4].view("<u4")[0] = wrong
    rows, state = taken[64]
    with refused(engine, 1, tokens, expected, "was due"):
        engine.import_checkpoint(1, [], state)
    fill(engine, 2, tokens[:63])
    with refused(engine, 2, tokens, expected, "cannot go back"):
        engine.rewind(2, 64, state)
    with refused(engine, 2, tokens, expected, "without its checkpoint"):
        engine.import_kv(2, [rows])
    short_rows = replace(rows, data=rows.data[:-1], take=64 if len(rows.data) else 65)
    with refused(engine, 2, tokens, expected, "do not hold"):
        engine.import_checkpoint(2, [short_rows], state)


def test_broken_checkpoints_are_refused(engine: LlamaEngine, kind: str) -> None:
    tokens = tokens_of(engine, 200)
    expected = cold(engine, tokens)
    rows, state = checkpoints(engine, tokens, (128,))[128]
    noise = np.random.default_rng(0).integers(0, 256, len(state), np.uint8)
    broken = [state[:-1], np.concatenate([state, state[:1]]), state[: len(state) // 2], state[:4], state[:0], noise]
    if kind not in WINDOWS:  # of a window all but the head is numbers
        behind = len(state) - recurrence(engine) + 12  # its position: the rest only llama.cpp itself looks at
        broken.append(np.concatenate([state[:8], noise[8:]]))
        broken.append(np.concatenate([state[:behind], noise[behind:]]))
    for bad in broken:
        with refused(engine, 1, tokens, expected):
            engine.import_checkpoint(1, [rows], bad)
        with refused(engine, 1, tokens, expected):
            engine.rewind(1, 128, bad)
    engine.import_checkpoint(1, [rows], state)
    assert on(engine, tokens, 1) == expected


def recurrence(engine: LlamaEngine) -> int:
    assert engine._kv_transfer is not None
    return engine._kv_transfer._form.recurrence


def test_a_set_that_fails_halfway_leaves_nothing(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp has taken the rows already, and stumbles over a state that ends early."""
    tokens = tokens_of(engine, 200)
    expected = cold(engine, tokens)
    rows, state = checkpoints(engine, tokens, (128,))[128]
    join = BlobLayout.join
    for missing in (1, len(state) // 2, len(state) - 9):
        # A window that is all there is of the state, and still live, is gone back to where it lies.
        for attempt in (engine.import_checkpoint, *([engine.rewind] if recurrence(engine) else [])):
            engine.truncate(1, 0)
            fill(engine, 1, tokens[:150])
            with refused(engine, 1, tokens, expected, "could not load"), monkeypatch.context() as patched:
                patched.setattr(BlobLayout, "join", lambda *given, missing=missing: join(*given) - missing)
                attempt(1, *(([rows], state) if attempt == engine.import_checkpoint else (128, state)))


def test_the_state_of_a_later_point_beside_shorter_rows_would_show(engine: LlamaEngine, kind: str) -> None:
    """Why positions are checked: with a forged one llama.cpp takes it, and computes something else."""
    tokens = tokens_of(engine, 300)
    expected = cold(engine, tokens)
    taken = checkpoints(engine, tokens, (192, 256))
    rows, forged = taken[192][0], taken[256][1].copy()
    forged[:4].view("<u4")[0] = 192
    if size := recurrence(engine):
        forged[len(forged) - size :][:12].view("<u4")[1] = 191
    engine.import_checkpoint(1, [rows], forged)
    assert on(engine, tokens, 1) != expected


def test_a_sequence_is_never_cut(engine: LlamaEngine, kind: str) -> None:
    tokens = tokens_of(engine, 300)
    expected = cold(engine, tokens)
    fill(engine, 1, tokens[:256])
    for length in (255, 300, -1):
        with pytest.raises(EngineError, match="cannot be cut"):
            engine.truncate(1, length)
    engine.truncate(1, 256)
    assert on(engine, tokens, 1) == expected
    # What a server does that takes every model for one with rows only.
    fill(engine, 2, tokens[:256])
    fill(engine, 2, tokens_of(engine, 9, seed=5))
    cut = lib.llama_memory_seq_rm(lib.llama_get_memory(engine._context), 2, 256, -1)
    assert cut == (kind in WINDOWS), "with a state it fails; with windows it depends on what is still there"


# ── nothing of one request is left for another ───────────────────────────────────────────────────────────────────────


def test_an_emptied_slot_holds_no_state(engine: LlamaEngine) -> None:
    tokens = tokens_of(engine, 150)
    expected = cold(engine, tokens)
    rows, state = checkpoints(engine, tokens_of(engine, 300, seed=9), (256,))[256]
    for neighbour in (None, 0, 2):
        empty(engine)
        if neighbour is not None:
            fill(engine, neighbour, tokens_of(engine, 33, seed=7))
        fill(engine, 1, tokens_of(engine, 200, seed=8))
        engine.decode([Step(1, 50)])
        assert cold(engine, tokens, 1) == expected
        engine.import_checkpoint(1, [rows], state)
        assert cold(engine, tokens, 1) == expected
        with pytest.raises(EngineError):
            engine.prefill(1, np.array([5, 10**6], np.int32), logits=True)
        assert cold(engine, tokens, 1) == expected
        with pytest.raises(EngineError):
            engine.import_checkpoint(1, [rows], state[:-1])
        assert on(engine, tokens, 1) == expected
        if neighbour is not None:
            assert engine.length(neighbour) == 33


def test_a_state_without_rows_goes_too(engine: LlamaEngine) -> None:
    """llama.cpp takes a state into an empty slot and counts no tokens there, as after a call that failed halfway."""
    tokens = tokens_of(engine, 150)
    expected = cold(engine, tokens)
    _, state = checkpoints(engine, tokens_of(engine, 300, seed=9), (256,))[256]
    assert engine._kv_transfer is not None
    blob = np.zeros(len(state) + (1 << 20), np.uint8)
    blob = blob[: engine._kv_transfer._form.join(None, state, blob)]
    assert kv_transfer.write(engine._context, 1, blob, kv_transfer.PARTIAL) == len(blob)
    engine.truncate(1, 0)
    assert on(engine, tokens, 1) == expected


def test_not_to_empty_it_would_show(engine: LlamaEngine) -> None:
    tokens = tokens_of(engine, 150)
    expected = cold(engine, tokens)
    fill(engine, 1, tokens_of(engine, 64, seed=8))
    fill(engine, 1, tokens[:128])
    fill(engine, 1, tokens[128:], logits=True)
    assert engine.logits(1).tobytes() != expected


# ── other shapes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_form_that_is_not_known_moves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_part, "_EXTRAS", (4,))
    engine = LlamaEngine.load(replace(SMALL, model=str(write(folder, "qwen35"))).engine_options())
    assert not engine.traits.movable
    assert not engine.traits.canonical
    assert not engine.traits.stateful
    assert "nothing can be moved" in engine.traits.notes[0]
    tokens = tokens_of(engine, 300)
    expected = cold(engine, tokens, 1)
    engine.decode([Step(1, 50)])
    out = np.empty(9999, np.uint8)
    for attempt in (
        lambda: engine.truncate(1, 200),
        lambda: engine.export_kv(1, [Span(0, 1, out)]),
        lambda: engine.export_checkpoint(1, out),
    ):
        with pytest.raises(EngineError):
            attempt()
    assert engine.length(1) == 301
    with refused(engine, 1, tokens, expected):
        engine.import_kv(1, [KVSegment(out, 1, 1)])
    with refused(engine, 1, tokens, expected):
        engine.import_checkpoint(1, [KVSegment(out, 1, 1)], out)
    with refused(engine, 1, tokens, expected):
        engine.rewind(1, 1, out)
    engine.close()


@pytest.mark.parametrize(("window", "depth"), [(100, 320), pytest.param(1100, 1216, marks=pytest.mark.slow)])
def test_a_window_off_the_boundaries(folder: Path, window: int, depth: int) -> None:
    """Its cells are restored into the tiles in which they were computed; one that is too long to be proved too."""
    path = write(folder, "gemma3", window)
    engine = LlamaEngine.load(replace(SMALL, model=str(path), ctx=2048).engine_options())
    assert engine.traits.canonical
    assert engine.traits.chunking
    tokens = tokens_of(engine, depth + 200)
    expected = cold(engine, tokens)
    rows, state = checkpoints(engine, tokens, (depth,))[depth]
    engine.import_checkpoint(1, [rows], state)
    assert on(engine, tokens, 1) == expected
    engine.rewind(1, depth, state)
    assert checkpoint(engine, 1).tobytes() == state.tobytes()
    assert on(engine, tokens, 1) == expected
    engine.close()


@pytest.mark.parametrize("ctx", [256, 512])
def test_a_context_shorter_than_the_window(folder: Path, ctx: int) -> None:
    engine = LlamaEngine.load(replace(SMALL, model=str(write(folder, "gemma3", 600)), ctx=ctx, slots=1).engine_options())
    assert engine.shape.ctx == ctx
    assert engine.traits.stateful
    assert engine.traits.canonical
    tokens = tokens_of(engine, ctx)
    expected = cold(engine, tokens)
    engine.truncate(0, 0)
    rows, state = checkpoints(engine, tokens, (ctx - 64,))[ctx - 64]
    engine.import_checkpoint(0, [rows], state)
    assert on(engine, tokens, 0) == expected
    assert len(checkpoint(engine, 0)) == engine.shape.state_bytes
    engine.close()


@pytest.mark.parametrize("kv_type", [pytest.param("bf16", marks=pytest.mark.slow), "q8_0"])
def test_other_types_of_rows(folder: Path, kv_type: Any) -> None:
    for kind in ("gemma3", "qwen35"):
        engine = LlamaEngine.load(replace(SMALL, model=str(write(folder, kind)), kv_type=kv_type).engine_options())
        assert engine.traits.stateful
        tokens = tokens_of(engine, 300)
        expected = cold(engine, tokens)
        rows, state = checkpoints(engine, tokens, (192,))[192]
        engine.import_checkpoint(1, [rows], state)
        assert (on(engine, tokens, 1) == expected) or not engine.traits.canonical
        engine.close()


# ── the real Gemma 3 ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def gemma(gemma_model: Path) -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(replace(SMALL, model=str(gemma_model), threads=2).engine_options())
    yield engine
    engine.close()


@pytest.mark.slow
def test_gemma_is_exact_beyond_its_window(gemma: LlamaEngine) -> None:
    assert gemma.traits.stateful
    assert gemma.traits.exact, gemma.traits.notes
    tokens = tokens_of(gemma, 770)
    fill(gemma, 2, tokens_of(gemma, 33, seed=3))  # a neighbour
    taken = checkpoints(gemma, tokens, (576, 704))
    expected = on(gemma, tokens, 0)
    for point, (rows, state) in taken.items():
        gemma.import_checkpoint(1, [rows], state)
        assert on(gemma, tokens, 1) == expected
        gemma.rewind(1, point, state)
    assert on(gemma, tokens, 1) == expected
    with pytest.raises(EngineError, match="was due"):
        gemma.import_checkpoint(1, [taken[576][0]], taken[704][1])
    assert gemma.length(1) == 0
    forged = taken[704][1].copy()
    forged[:4].view("<u4")[0] = 576
    gemma.import_checkpoint(1, [taken[576][0]], forged)
    assert on(gemma, tokens, 1) != expected


def test_what_moving_takes_is_counted_whole(engine: LlamaEngine) -> None:
    """Windows and recurrent state are as large in a short conversation as in a long one."""
    shape = engine.shape
    options = {"ctx": shape.ctx, "kv_bytes_per_token": shape.kv_bytes_per_token, "transfer_bytes": shape.transfer_bytes}
    anything: Any = None
    memory_budget = MemoryBudget(
        anything, anything, anything, anything, anything, anything, anything, release=engine.release, keeps_on="", **options
    )
    empty(engine)
    for tokens in (1, 63, 200, 300):
        fill(engine, 0, tokens_of(engine, tokens))
        assert kv_transfer.size(engine._context, 0) <= memory_budget.transfer(engine.length(0)) <= shape.transfer_bytes
        engine.truncate(0, 0)
    assert kv_transfer.size(engine._context, 0, kv_transfer.PARTIAL) <= memory_budget.transfer(0)
    assert memory_budget.transfer(shape.ctx) == pytest.approx(shape.transfer_bytes, rel=0.01)
