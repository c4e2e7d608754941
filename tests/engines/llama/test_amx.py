"""Whether llama.cpp may multiply with the processor's tiles: a trial in a process of its own, with this machine's build."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tiny
from headstart.config import Settings
from headstart.engines.llama import amx, amx_trial
from headstart.engines.llama.amx import BATCHES, MATRICES
from headstart.engines.llama.binding import ready
from headstart.engines.llama.engine import LlamaEngine


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "_found", {})


def test_the_trial_of_this_build(tmp_path: Path) -> None:
    """Whatever this machine is: a build without tiles is not tried, and nothing that a trial says is doubted."""
    found = amx.works(tmp_path)
    assert found <= {MATRICES, BATCHES}
    assert found == amx.works(tmp_path)
    assert amx.built() or not (found or (tmp_path / amx.MEMO).exists())


def test_the_result_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Path] = []

    def tried(library: Path) -> str:
        trials.append(library)
        return MATRICES

    monkeypatch.setattr(amx, "built", lambda: True)
    monkeypatch.setattr(amx, "_tried", tried)
    assert amx.works(tmp_path) == {MATRICES}
    assert list(json.loads((tmp_path / amx.MEMO).read_text()).values()) == [MATRICES]
    amx._found.clear()
    assert amx.works(tmp_path) == {MATRICES}
    amx._found.clear()
    monkeypatch.setattr("platform.release", lambda: "another kernel")
    assert amx.works(tmp_path) == {MATRICES}
    assert trials == [ready().library.file] * 2


def test_a_trial_that_could_not_be_done_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "built", lambda: True)
    monkeypatch.setattr(amx, "_PATIENCE", 0.001)
    assert amx.works(tmp_path) == frozenset()
    assert not (tmp_path / amx.MEMO).exists()


def test_a_trial_that_crashes_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the library cannot even be loaded."""
    broken = tmp_path / "libllama.so"
    broken.write_bytes(b"none")
    assert amx._tried(broken) == ""


@pytest.mark.parametrize(("kind", "right", "allowed"), [
    ("llama", {MATRICES}, True),
    ("llama", set(), False),
    ("qwen35", {MATRICES}, False),
    ("qwen35", {MATRICES, BATCHES}, True),
])  # fmt: skip
def test_models_whose_products_have_a_third_dimension_need_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, right: set[str], allowed: bool
) -> None:
    monkeypatch.setattr(amx, "built", lambda: True)
    monkeypatch.setattr(amx, "works", lambda state_dir: frozenset(right))
    assert amx.extra_buffers(tiny.write(tmp_path / "model.gguf", kind)) is allowed


def test_a_build_without_tiles_needs_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "built", lambda: False)
    monkeypatch.setattr(amx, "_tried", lambda library: pytest.fail("it was tried"))
    assert amx.works(tmp_path) == frozenset()
    assert amx.extra_buffers(tmp_path / "no model")


def test_quantized_values() -> None:
    values = np.random.default_rng(1).standard_normal((4, 64), np.float32)
    blocks, meant = amx_trial.quantized(values)
    assert blocks.shape == (8, 2 + amx_trial.BLOCK)
    assert np.abs(values - meant).max() < np.abs(values).max() / 127


def test_a_model_says_whether_tiles_are_used(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "model.gguf", layers=1)
    engine = LlamaEngine.load(Settings(model=str(path), ctx=2304, slots=1, threads=1).engine_options(), block_size=64)
    used = engine.facts.details["amx"]
    assert used == (amx.extra_buffers(path) if amx.built() else None)
    assert engine.identity["extra_buffers"] == str(used is not False)
    engine.close()
