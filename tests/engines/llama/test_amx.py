"""Whether llama.cpp may multiply with AMX: a trial in a process of its own, with this machine's build."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from headstart.cli import doctor
from headstart.config import Settings
from headstart.engines.llama import amx, amx_trial
from headstart.engines.llama import identity as llama_identity
from headstart.engines.llama.binding import LoadedLibrary, ready
from headstart.engines.llama.engine import LlamaEngine
from headstart.engines.llama.ggml import Array, Ggml


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "_found", {})


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_the_trial_of_this_build(tmp_path: Path) -> None:
    """Whatever this machine is, the trial has a result; without AMX it is that nothing was right."""
    found = amx.tried(amx.command(ready().library.file))
    assert found is not None
    assert found <= amx.built()
    assert amx.works(tmp_path) is found
    if amx.built():
        assert list(json.loads((tmp_path / amx.MEMO).read_text()).values()) == [found]
    else:
        assert amx.layout(Ggml(ready())) is None


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (f"raise SystemExit({amx.RIGHT})", True),
        (f"raise SystemExit({amx.WRONG})", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", False),
        ("import os; os.abort()", False),
        ("raise ImportError", None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None),
        ("import time; time.sleep(60)", None),
    ],
)
def test_only_what_the_library_does_is_a_result(monkeypatch: pytest.MonkeyPatch, text: str, result: bool | None) -> None:
    monkeypatch.setattr(amx, "_PATIENCE", 3.0 if "sleep" not in text else 0.2)
    assert amx.tried(script(text)) is result


def test_a_program_that_contains_python_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert amx.tried(["program"]) is None


def test_the_result_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[list[str]] = []

    def tried(trial: list[str]) -> bool:
        trials.append(trial)
        return True

    monkeypatch.setattr(amx, "built", lambda: True)
    monkeypatch.setattr(amx, "tried", tried)
    assert amx.works(tmp_path)
    assert amx.works(tmp_path)
    amx._found.clear()
    assert amx.works(tmp_path)
    assert len(trials) == 1
    amx._found.clear()
    assert amx.works(tmp_path, anew=True)
    amx._found.clear()
    monkeypatch.setattr("platform.release", lambda: "another kernel")
    assert amx.works(tmp_path)
    assert trials == [amx.command(ready().library.file)] * 3


def test_a_trial_that_could_not_be_done_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "built", lambda: True)
    monkeypatch.setattr(amx, "tried", lambda trial: None)
    assert not amx.works(tmp_path)
    assert not (tmp_path / amx.MEMO).exists()


@pytest.mark.parametrize(
    ("kind", "works", "tested", "allowed"),
    [
        ("llama", True, True, True),
        ("llama", False, True, False),
        ("llama", True, False, False),
        ("qwen35", True, True, False),  # its products have a third dimension
    ],
)
def test_which_models_are_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, works: bool, tested: bool, allowed: bool
) -> None:
    monkeypatch.setattr(amx, "built", lambda: True)
    monkeypatch.setattr(amx, "works", lambda state_dir, anew: works)
    library = ready()
    monkeypatch.setattr(
        amx, "ready", lambda: SimpleNamespace(library=SimpleNamespace(tested=tested), function=library.function)
    )
    assert amx.extra_buffers(tiny.write(tmp_path / "model.gguf", kind)) is allowed
    assert not amx.extra_buffers(tmp_path / "no model")


def test_weights_that_take_longer_are_not_laid_out(tmp_path: Path) -> None:
    """What is asked of the header is what the file says."""
    import gguf

    path = tmp_path / "model.gguf"
    for file_type in (gguf.LlamaFileType.MOSTLY_Q6_K, gguf.LlamaFileType.MOSTLY_Q4_K_M):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_file_type(file_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        assert amx.header(path) == amx.GgufHeader("llama", file_type)
        assert amx._suits(amx.header(path)) is (file_type != gguf.LlamaFileType.MOSTLY_Q6_K)


def test_a_build_without_amx_needs_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "built", lambda: False)
    monkeypatch.setattr(amx, "tried", lambda trial: pytest.fail("it was tried"))
    assert not amx.works(tmp_path)
    assert amx.extra_buffers(tmp_path / "no model")
    assert not amx.used(True)


def test_the_architectures_are_llama_cpps() -> None:
    import gguf

    assert set(gguf.MODEL_ARCH_NAMES.values()) >= amx.PLAIN


def test_the_trial_sees_wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def right(library: LoadedLibrary, kind: int, weights: Array, tokens: Array) -> Array:
        return tokens @ weights.T

    def wrong(library: LoadedLibrary, kind: int, weights: Array, tokens: Array) -> Array:
        return (tokens[::-1] if len(tokens) == amx_trial.TOKENS[-1] else tokens) @ weights.T

    monkeypatch.setattr(amx_trial, "product", right)
    assert amx_trial.right(ready())
    monkeypatch.setattr(amx_trial, "product", wrong)
    assert not amx_trial.right(ready())


def test_a_model_says_whether_amx_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may refuse it to one process, so what is computed is of another fingerprint."""
    path = tiny.write(tmp_path / "model.gguf", layers=1)

    def load() -> LlamaEngine:
        return LlamaEngine.load(Settings(model=str(path), ctx=2304, slots=1, threads=1).engine_options(), block_size=64)

    engine = load()
    used = engine.facts.details["amx"]
    assert used == (amx.extra_buffers(path) if amx.built() else None)
    assert ("amx" in engine.identity) is (used is True)
    engine.close()
    monkeypatch.setattr(amx, "layout", lambda library: None)
    other = load()
    assert (other.fingerprint != engine.fingerprint) is (used is True)
    other.close()


@pytest.mark.parametrize(("kind", "experts", "suits"), [("Q4_1", None, True), ("Q4_K_M", "0", True), ("Q5_1", None, False),
                                                        ("MXFP4", None, False), ("Q8_0", "8", False)])  # fmt: skip
def test_whose_weights_are_cheap(monkeypatch: pytest.MonkeyPatch, kind: str, experts: str | None, suits: bool) -> None:
    monkeypatch.setattr(llama_identity, "describe", lambda model: "")
    monkeypatch.setattr(llama_identity, "quantization", lambda description: kind)
    monkeypatch.setattr(llama_identity, "metadata", lambda model, key: experts if key.endswith("expert_count") else "llama")
    assert llama_identity.suits_amx(None) is suits


def test_what_doctor_says() -> None:
    def engine(**details: Any) -> Any:
        return SimpleNamespace(facts=SimpleNamespace(details=details))

    def says(engine: Any, *, tested: bool = True, works: bool = True) -> str:
        return doctor._amx(engine, tested=tested, works=works, version="0.3.36")

    assert says(engine(amx=True)) == "used"
    assert says(None) == "works with this build"
    assert "this architecture" in says(engine(amx=False))
    assert "GPU" in says(engine(amx=False, gpu_layers=3))
    assert "not a tested one" in says(engine(amx=False), tested=False)
    assert amx.FLAGS in says(engine(amx=False), works=False)
    assert "--no-cache-dir" in says(None, works=False)
