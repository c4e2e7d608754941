"""Exactness: in exact mode the logits of a prompt and of the reply to it are those of a cold run, bit for bit; and the test
can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import tiny
from effort import SLOW
from harness import ask, check, system, user
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.engine import Engine
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from histories import Lab, canonical_chains, cold_blocks, cold_logits
from talks import talk

CTX, SLOTS = 1024, 2


def load(model: Path, *, slots: int, block_size: int | None = None, threads: int | None = 1) -> LlamaEngine:
    # Threads of a tiny model wait for each other more than they compute.
    settings = Settings(model=str(model), ctx=CTX, slots=slots, threads=threads, memory_budget=0)
    return LlamaEngine.load(settings.engine_options(), block_size=block_size)


def cold_one(model: Path, threads: int | None = 1) -> LlamaEngine:
    """For cold runs, which need no proofs: nothing is restored there."""
    return load(model, slots=1, block_size=64, threads=threads)


def budget(engine: Engine, blocks: int, states: int) -> int:
    """Bytes for so many blocks and checkpoints beside the engine's own buffer, as far as prompts of these histories grow it."""
    shape = engine.shape
    rows = min(shape.ctx * shape.kv_bytes_per_token, shape.transfer_bytes)
    return (
        blocks * engine.traits.block_size * shape.kv_bytes_per_token
        + states * shape.state_bytes
        + shape.transfer_bytes
        - rows * 5 // 8
    )


@contextmanager
def lab(
    warm: Engine, cold: Engine, *, blocks: int = 48, states: int = 24, reuse: Literal["fast", "exact"] = "exact", **options: Any
) -> Iterator[Lab]:
    """Closes the runtime with its engine, not the cold one."""
    with Runtime(lambda: warm, Settings(reuse=reuse, memory_budget=budget(warm, blocks, states))) as runtime:
        made = Lab(runtime, cold, **options)
        yield made
        check(runtime)


EVERYTHING = {"turn", "edit", "branch", "again", "abort", "neighbour", "live"}
SOME = {"turn", "again", "abort", "neighbour"}
"""What happens in a few histories already."""


def events(count: int) -> set[str]:
    """What must happen in so many histories."""
    return EVERYTHING if count >= 50 else EVERYTHING - {"live"} if count >= 20 else SOME


def assert_exact(made: Lab, wanted: set[str] = EVERYTHING) -> None:
    """No wrong bit, and everything that could have caused one did happen."""
    tally = made.tally
    assert tally.wrong == 0, f"{tally.wrong} of {tally.compared} differ"
    assert tally.wrong_replies == 0, f"{tally.wrong_replies} of {tally.compared} replies differ"
    assert tally.restoring >= 0.8 * tally.histories - 1, tally
    assert wanted <= {event for event, times in tally.events.items() if times}, tally
    assert made.runtime.cache.store.counters["evicted"] > 0, "the budget held everything"


@pytest.fixture(scope="module")
def cold_tiny(tiny_model: Path) -> Iterator[Engine]:
    engine = cold_one(tiny_model)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def cold_demo(demo_model: Path) -> Iterator[Engine]:
    engine = cold_one(demo_model, threads=None)
    yield engine
    engine.close()


def histories_on_state(model: Path, count: int, *, threads: int | None = 1, **options: Any) -> None:
    """A model with state: nothing may be sliced, so every restored prompt stands on a checkpoint."""
    cold = cold_one(model, threads=threads)
    with lab(load(model, slots=SLOTS, threads=threads), cold, **options) as made:
        assert made.runtime.engine.traits.stateful
        for seed in range(count):
            made.run(seed)
        assert_exact(made, events(count))
        assert made.runtime.cache.store.counters["thinned"] > 0 or count < 50
    cold.close()


def histories_on_tiny(tiny_model: Path, cold: Engine, count: int) -> None:
    with lab(load(tiny_model, slots=SLOTS), cold, blocks=48 if count > 30 else 24) as made:
        for seed in range(count):
            made.run(seed)
        assert_exact(made, events(count))


def histories_on_demo(demo_model: Path, cold: Engine, count: int) -> None:
    with lab(load(demo_model, slots=SLOTS, block_size=64, threads=None), cold, owners=2, blocks=min(15, count)) as made:
        for seed in range(count):
            made.run(seed)
        assert_exact(made, events(count))


def test_exact_on_a_tiny_model(tiny_model: Path, cold_tiny: Engine) -> None:
    histories_on_tiny(tiny_model, cold_tiny, 20)


# Of real models a history takes seconds. What is restored of the bundled one is compared by default in engines/test_llama.


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, pytest.param(60, marks=pytest.mark.timeout(1800))])
def test_exact_on_the_real_model(demo_model: Path, cold_demo: Engine, count: int) -> None:
    histories_on_demo(demo_model, cold_demo, count)


STATES = ["qwen35", "gemma3", "mamba2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lfm2", "granitehybrid"))]


@pytest.fixture(scope="module", params=STATES)
def tiny_state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("state") / f"{request.param}.gguf", request.param)


def test_exact_on_tiny_models_with_state(tiny_state: Path) -> None:
    histories_on_state(tiny_state, 15 if SLOW else 8, blocks=32, states=14)


@pytest.mark.parametrize("threads", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_exact_behind_a_window_with_several_threads(threads: int, tmp_path: Path) -> None:
    """Decoding then looks at where tokens lie, behind 512 cells and more."""
    model = tiny.write(tmp_path / "gemma3.gguf", "gemma3", window=512)
    histories_on_state(model, 10 if threads > 2 else 4, threads=threads, words=340, states=16)


@pytest.mark.slow
def test_exact_on_the_real_gemma(gemma_model: Path) -> None:
    histories_on_state(gemma_model, 20, threads=None, owners=2, blocks=34, states=8)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_exact_on_tiny_models_with_state_for_long(tiny_state: Path) -> None:
    histories_on_state(tiny_state, 10_000)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_exact_on_a_tiny_model_for_long(tiny_model: Path, cold_tiny: Engine) -> None:
    histories_on_tiny(tiny_model, cold_tiny, 10_000)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_exact_on_the_real_model_for_long(demo_model: Path, cold_demo: Engine) -> None:
    histories_on_demo(demo_model, cold_demo, 500)


def test_exact_on_the_fake() -> None:
    """The same histories on an engine whose numerics are stricter than any real one's: thousands of block boundaries."""
    shape = {"ctx": 8192, "block_size": 16, "batch": 128}
    with lab(FakeEngine(slots=SLOTS, **shape), FakeEngine(slots=1, **shape), blocks=1100) as made:
        for seed in range(60):
            made.run(seed)
        assert_exact(made)


# ── canonical blocks in fast mode ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "histories"),
    [("tiny", 5 if SLOW else 3), pytest.param("demo", 2, marks=pytest.mark.slow), ("fake", 12 if SLOW else 8)],
)
def test_canonical_blocks_of_fast_mode_are_cold_ones(model: str, histories: int, request: pytest.FixtureRequest) -> None:
    """Rows that call themselves canonical in fast mode, beside derived ones, are byte for byte what a cold run computes."""
    warm: Engine
    if model != "fake":
        path, cold = request.getfixturevalue(f"{model}_model"), request.getfixturevalue(f"cold_{model}")
        warm, blocks = load(path, slots=SLOTS, block_size=64, threads=1 if model == "tiny" else None), 200
    else:
        shape = {"ctx": 8192, "block_size": 16, "batch": 128}
        warm, cold, blocks = FakeEngine(slots=SLOTS, **shape), FakeEngine(slots=1, **shape), 1000
    with lab(warm, cold, reuse="fast", blocks=blocks, owners=20, longest=warm.traits.block_size + 16) as made:
        for seed in range(histories):
            made.run(seed)
        runtime, checked = made.runtime, 0
        runtime.scheduler.close()
        for chain in canonical_chains(runtime):
            for entry, rows in zip(chain, cold_blocks(cold, chain), strict=True):
                stored = runtime.cache.memory.read(entry.id)
                assert stored is not None
                assert stored[: len(rows)].tobytes() == rows
                checked += 1
        assert checked >= 10
        assert sum(not entry.canonical for entry in runtime.cache.index) >= 5, "no derived rows: nothing to confuse them with"


# ── the comparison can fail ──────────────────────────────────────────────────────────────────────────────────────────

SYSTEM, OTHERS = "Answer in one word. " * 40, ("Name a colour.", "And another one?")


def restored_again(runtime: Runtime, cold: Engine, spoil: bool) -> tuple[bytes, bytes]:
    """Logits of a prompt restored from memory (one byte of one row changed, if `spoil`), and those of a cold run."""
    ask(runtime, [system(SYSTEM), user("Name a colour.")], max_tokens=1)
    for slot in range(SLOTS):
        ask(runtime, [user(f"Something else entirely, {slot} times.")], max_tokens=1)
    chat = [system(SYSTEM), user("Name a fruit.")]
    prompt = runtime.chat_prompt(talk(chat))
    if spoil:
        first = next(entry for entry in runtime.cache.index if entry.start == 64 and entry.stop < len(prompt) - 64)
        rows = runtime.cache.memory.read(first.id)
        assert rows is not None
        rows[7 * 64 + 1] ^= 0x04
    answer = ask(runtime, chat, max_tokens=1, keep_logits=True)
    assert answer.report.restored >= 2 * runtime.engine.traits.block_size
    assert answer.logits is not None
    return answer.logits.tobytes(), cold_logits(cold, answer.prompt)


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("model", ["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def test_one_perturbed_row_shows(model: str, spoil: bool, request: pytest.FixtureRequest) -> None:
    path, cold = request.getfixturevalue(f"{model}_model"), request.getfixturevalue(f"cold_{model}")
    with lab(load(path, slots=SLOTS, block_size=64), cold, blocks=100) as made:
        warm, expected = restored_again(made.runtime, cold, spoil)
    assert (warm == expected) is not spoil


def test_a_grid_of_32_shows(tiny_model: Path) -> None:
    cold = load(tiny_model, slots=1, block_size=32)
    with lab(load(tiny_model, slots=SLOTS, block_size=32), cold) as made:
        for seed in range(8 if SLOW else 5):
            made.run(seed)
        assert made.tally.restoring > 0
        assert made.tally.wrong > 0
    cold.close()


@pytest.mark.parametrize("model", ["tiny", "fake"])
def test_a_derived_row_served_as_canonical_shows(model: str, tiny_model: Path, cold_tiny: Engine) -> None:
    """An engine that claims that decoding gives the bits of prefill, and does not: its derived rows are served as canonical."""
    if model == "tiny":
        warm, cold = load(tiny_model, slots=SLOTS), cold_tiny
    else:
        warm, cold = FakeEngine(slots=SLOTS, ctx=8192, block_size=16), FakeEngine(slots=1, ctx=8192, block_size=16)
    assert not warm.traits.decode_is_prefill
    warm.traits = dataclasses.replace(warm.traits, decode_is_prefill=True)
    with lab(warm, cold) as made:
        for seed in range(10 if SLOW else 6):
            made.run(seed)
        assert made.tally.wrong > 0


def test_cold_runs_agree(cold_tiny: Engine, tiny_model: Path) -> None:
    """The oracle itself: the same tokens in another context give the same bits, other tokens others."""
    other = load(tiny_model, slots=2)
    tokens = np.array(other.tokenizer.tokenize(SYSTEM * 2), np.int32)
    assert cold_logits(cold_tiny, tokens) == cold_logits(other, tokens)
    assert cold_logits(cold_tiny, tokens) != cold_logits(other, tokens[:-1])
    other.close()
