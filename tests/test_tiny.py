"""The tiny models prove something: small, reproducible, and what came early, in rows or in state, changes late logits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

import tiny
from tiny.layers import Part

LENGTH, BATCH = 700, 512
EARLY = 3
STATE_ONLY = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_small_and_reproducible(architecture: str, tmp_path: Path) -> None:
    first = tiny.write(tmp_path / "a.gguf", architecture).read_bytes()
    assert len(first) < 5_000_000
    assert tiny.write(tmp_path / "b.gguf", architecture).read_bytes() == first
    assert tiny.write(tmp_path / "c.gguf", architecture, seed=1).read_bytes() != first


def random_tokens(seed: int = 0, count: int = LENGTH) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(17, tiny.N_VOCAB, count)))


def changed(tokens: list[int], position: int) -> list[int]:
    return [*tokens[:position], (tokens[position] + 1) % tiny.N_VOCAB, *tokens[position + 1 :]]


class Sequence:
    """One sequence of a context of llama.cpp, driven by its own functions."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def append(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Computes them; the logits after the last."""
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            array = (llama_cpp.llama_token * len(part))(*part)
            assert llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(part))) == 0
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (tiny.N_VOCAB,)).copy()

    def state(self) -> bytes:
        """What llama.cpp saves beside rows; of a model that has rows only, these."""
        size = llama_cpp.llama_state_seq_get_size_ext(self._context, 0, STATE_ONLY)
        buffer = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data_ext(self._context, buffer, size, 0, STATE_ONLY) == size
        return bytes(buffer)

    def replace_state(self, state: bytes) -> None:
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        assert llama_cpp.llama_state_seq_set_data_ext(self._context, buffer, len(state), 0, STATE_ONLY) == len(state)


@contextmanager
def sequence(model: Any) -> Iterator[Sequence]:
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_threads, options.n_threads_batch = 1024, BATCH, BATCH, 1, 1
    options.swa_full = True
    context = llama_cpp.llama_init_from_model(model, options)
    assert context
    try:
        yield Sequence(context)
    finally:
        llama_cpp.llama_free(context)


@contextmanager
def loaded(path: Path) -> Iterator[Any]:
    """The model in llama.cpp."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model
    yield model
    llama_cpp.llama_model_free(model)


def late_logits(model: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    with sequence(model) as one:
        return one.append(tokens)


SOME = ("llama", "gemma3", "qwen35", "mamba2")


def some(architectures: Iterable[str]) -> list[Any]:
    """The others are `slow`: their weights do not change either."""
    return [kind if kind in SOME else pytest.param(kind, marks=pytest.mark.slow) for kind in architectures]


@pytest.mark.parametrize("architecture", some(tiny.ARCHITECTURES))
def test_early_tokens_change_late_logits(architecture: str, tmp_path: Path) -> None:
    tokens = random_tokens()
    with loaded(tiny.write(tmp_path / "model.gguf", architecture)) as model:
        usual = late_logits(model, tokens)
        assert np.isfinite(usual).all()
        assert usual.std() > 0.5
        assert late_logits(model, tokens).tobytes() == usual.tobytes()
        for position in (0, EARLY, 64, 200):
            assert np.abs(late_logits(model, changed(tokens, position)) - usual).max() > 0.1, position


@pytest.mark.parametrize("architecture", ["qwen35", "granitehybrid", "falcon-h1"])
def test_state_alone_remembers(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention made mute, early tokens reach late logits through recurrent state only."""

    def mute(part: Part) -> Part:
        return lambda dice: ((name, 0 * tensor if name == "attn_output.weight" else tensor) for name, tensor in part(dice))

    kind = tiny.ARCHITECTURES[architecture]
    pattern = tuple(tuple(map(mute, parts)) for parts in kind.pattern)
    monkeypatch.setitem(tiny.ARCHITECTURES, architecture, replace(kind, pattern=pattern))
    tokens = random_tokens()
    with loaded(tiny.write(tmp_path / "model.gguf", architecture)) as model:
        usual = late_logits(model, tokens)
        assert np.abs(late_logits(model, changed(tokens, EARLY)) - usual).max() > 0.1


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_what_has_state(architecture: str, tmp_path: Path) -> None:
    with loaded(tiny.write(tmp_path / "model.gguf", architecture)) as model:
        recurrent = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        assert (architecture in tiny.STATEFUL) == (recurrent or llama_cpp.llama_model_n_swa(model) > 0)


@pytest.mark.parametrize("architecture", some(tiny.STATEFUL))
def test_a_wrong_state_changes_logits(architecture: str, tmp_path: Path) -> None:
    """Rows of one history with the state of another, even of one that differs in an early token only, show, and stay."""
    tokens, more = random_tokens(), random_tokens(1, 64)

    def go_on(model: Any, state: bytes | None = None) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Logits one token later, and many later."""
        with sequence(model) as one:
            one.append(tokens)
            if state is not None:
                one.replace_state(state)
            return one.append(more[:1]), one.append(more[1:])

    def state_of(model: Any, history: list[int]) -> bytes:
        with sequence(model) as one:
            one.append(history)
            return one.state()

    with loaded(tiny.write(tmp_path / "model.gguf", architecture)) as model:
        soon, later = go_on(model)
        same = go_on(model, state_of(model, tokens))
        assert [logits.tobytes() for logits in same] == [soon.tobytes(), later.tobytes()]
        for history in (changed(tokens, EARLY), random_tokens(2)):
            wrong_soon, wrong_later = go_on(model, state_of(model, history))
            assert np.abs(wrong_soon - soon).max() > 0.1
            assert wrong_later.tobytes() != later.tobytes()
