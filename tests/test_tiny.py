"""The tiny models prove something: they are small, reproducible, and early tokens change late logits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

import tiny

LENGTH = 640


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_small_and_reproducible(architecture: str, tmp_path: Path) -> None:
    tiny.vocabulary()
    before = time.process_time()
    first = tiny.write(tmp_path / "a.gguf", architecture).read_bytes()
    assert time.process_time() - before < 2
    assert len(first) < 5_000_000
    assert tiny.write(tmp_path / "b.gguf", architecture).read_bytes() == first
    assert tiny.write(tmp_path / "c.gguf", architecture, seed=1).read_bytes() != first


@pytest.fixture(params=tiny.ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[object]:
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    path = tiny.write(tmp_path / "model.gguf", request.param)
    loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    assert loaded
    yield loaded
    llama_cpp.llama_model_free(loaded)


def _last_logits(model: object, tokens: list[int]) -> npt.NDArray[np.float32]:
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_threads = 1024, 1024, 512, 1
    options.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, options)
    try:
        for start in range(0, len(tokens), 512):
            part = (llama_cpp.llama_token * 512)(*tokens[start : start + 512])
            batch = llama_cpp.llama_batch_get_one(part, len(tokens[start : start + 512]))
            assert llama_cpp.llama_decode(context, batch) == 0
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (tiny.N_VOCAB,)).copy()
    finally:
        llama_cpp.llama_free(context)


def test_early_tokens_change_late_logits(model: object) -> None:
    tokens = np.random.default_rng(0).integers(17, tiny.N_VOCAB, LENGTH).tolist()
    logits = _last_logits(model, tokens)
    assert logits.std() > 0.5
    for position in (0, 1, 63, 64, 200):
        changed = [*tokens[:position], (tokens[position] + 1) % tiny.N_VOCAB, *tokens[position + 1 :]]
        assert np.abs(_last_logits(model, changed) - logits).max() > 0.5, position
