"""The first load with an untested library of llama.cpp: what it refuses, with which words, and what it remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import libraries
from headstart.engines.llama import first_load
from headstart.engines.llama import library as llama_library
from headstart.engines.llama.engine import LlamaEngine
from headstart.engines.options import EngineOptions
from headstart.errors import ConfigError, ModelError
from libraries import NEEDS_COMPILER
from process import run

SMALL = ("--ctx", "512", "--slots", "1", "--threads", "1")


@pytest.fixture(autouse=True)
def _nothing_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_load, "_accepted", set())


def prove(library: Path | None, model: Path, folder: Path, **more: Any) -> list[float]:
    """Runs the first load; returns what it reports."""
    shares: list[float] = []
    options = EngineOptions(str(model), ctx=512, slots=1, threads=1, state_dir=folder / "state", llama_lib=library)
    first_load.prove(options, [model], shares.append, **more)
    return shares


def refusal(library: Path | None, model: Path, folder: Path, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prove(library, model, folder, **more)
    assert not isinstance(caught.value, ModelError)
    assert "\n" not in caught.value.with_flags
    return caught.value.with_flags


def test_a_tested_library_needs_no_trial(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_library, "TESTED", (llama_library.binding_version(),))
    assert prove(None, tiny_model, tmp_path) == []
    assert not (tmp_path / "state").exists()


def test_an_untested_one_is_proved_once(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = libraries.copied(tmp_path / "copy")
    shares = prove(library, tiny_model, tmp_path)
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= first_load._SHARE
    assert set(json.loads((tmp_path / "state" / first_load.MEMO).read_text()).values()) == {"works"}
    monkeypatch.setattr(first_load, "_accepted", set())  # as in the next process
    assert prove(library, tiny_model, tmp_path) == []
    assert prove(library, tiny_model, tmp_path, anew=True)
    (library.parent / f"libggml-cpu{libraries.ENDING}").write_bytes(b"another build")
    assert "cannot be loaded" in refusal(library, tiny_model, tmp_path)


@NEEDS_COMPILER
def test_a_crash_is_a_refusal_that_is_remembered(tiny_model: Path, tmp_path: Path) -> None:
    library = libraries.shim(tmp_path / "shim", libraries.CRASH_AT_DECODE)
    words = refusal(library, tiny_model, tmp_path)
    assert f"The library '{library}' crashed (SIGABRT)" in words
    assert "GGML_ASSERT(shim) failed" in words
    assert "--llama-lib" in words
    again = refusal(library, tiny_model, tmp_path)
    assert again.startswith(words)
    assert "headstart doctor" in again
    assert refusal(library, tiny_model, tmp_path, anew=True) == words


@NEEDS_COMPILER
def test_a_crash_when_the_library_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    library = libraries.shim(tmp_path / "shim", libraries.CRASH_WHEN_LOADED)
    assert "crashed (SIGSEGV)" in refusal(library, tiny_model, tmp_path)


@NEEDS_COMPILER
def test_a_hang_is_a_refusal(tiny_model: Path, tmp_path: Path) -> None:
    library = libraries.shim(tmp_path / "shim", libraries.HANG_AT_DECODE)
    assert "gave no sign for 2 seconds" in refusal(library, tiny_model, tmp_path, patience=2.0)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (libraries.LARGER_CONTEXT_PARAMS, "llama_context_params has"),
        (libraries.OTHER_DEFAULTS % 160, "llama_context_params has"),
    ],
)
def test_other_structures_are_a_refusal(code: str, words: str, tiny_model: Path, tmp_path: Path) -> None:
    library = libraries.shim(tmp_path / "shim", code)
    found = refusal(library, tiny_model, tmp_path)
    assert words in found
    assert "differs from what llama-cpp-python" in found
    assert "vendor/llama.cpp" in found
    assert not (tmp_path / "state" / first_load.MEMO).exists()


def test_a_file_that_is_no_library(tiny_model: Path, tmp_path: Path) -> None:
    library = tmp_path / "libllama.so"
    library.write_bytes(b"no library " * 100)
    assert "name llama.cpp's libllama in --llama-lib" in refusal(library, tiny_model, tmp_path)


def test_functions_that_nothing_works_without(tiny_model: Path, tmp_path: Path) -> None:
    library = libraries.without(tmp_path / "copy", "llama_memory_seq_rm")
    assert "lacks slots (llama_memory_seq_rm)" in refusal(library, tiny_model, tmp_path)


def test_a_model_that_cannot_be_loaded_says_nothing_of_the_library(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF, but nothing else")
    library = libraries.copied(tmp_path / "copy")
    with pytest.raises(ModelError, match=r"llama.cpp cannot load .*broken.gguf"):
        prove(library, model, tmp_path)
    assert not (tmp_path / "state" / first_load.MEMO).exists()


def test_options_travel_to_the_trial(tmp_path: Path) -> None:
    options = EngineOptions("a", ctx=7, lora=tmp_path / "b", exact=True, state_dir=None, llama_lib=tmp_path, together=(1, 2))
    assert first_load.read(json.loads(json.dumps(first_load._written(options)))) == options


@pytest.mark.slow  # by default each of its parts is tested
def test_of_a_whole_program(tiny_model: Path, tmp_path: Path) -> None:
    """A library without adapters serves, and doctor says what is lacking; with an adapter it is refused."""
    library = libraries.without(tmp_path / "copy", "llama_set_adapters_lora")
    state = {"HEADSTART_STATE_DIR": str(tmp_path / "state")}
    less = ("--memory-budget", "16MiB", "--seconds", "0")
    given = ("doctor", str(tiny_model), *SMALL, *less, "--llama-lib", str(library.parent))
    found = run(*given, **state)
    assert found.returncode == 0, found.stderr
    text = " ".join(found.stdout.split())
    assert "no LoRA adapters: adapters are refused" in text
    assert "proved at its first load" in text
    assert "All is well." in text
    adapter = tmp_path / "adapter.gguf"
    adapter.write_bytes(b"GGUF adapter")
    refused = run(*given, "--lora", str(adapter), **state)
    assert refused.returncode == 2
    words = "This build of llama.cpp has no LoRA adapters: leave out --lora, or use another build."
    assert refused.stderr == f"headstart: {words}\n"


def test_a_process_has_one_library(tiny_model: Path, tmp_path: Path) -> None:
    options = EngineOptions(str(tiny_model), ctx=512, slots=1, threads=1, state_dir=tmp_path / "state")
    LlamaEngine.load(options, block_size=64).close()
    other = EngineOptions(str(tiny_model), llama_lib=libraries.copied(tmp_path / "copy"), state_dir=tmp_path / "state")
    with pytest.raises(ConfigError, match=r"This process uses the library of llama-cpp-python .* start another process"):
        LlamaEngine.load(other)
