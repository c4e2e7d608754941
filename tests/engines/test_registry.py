"""The registry: which engine loads a model or its tokenizer."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

import tiny_hf
from headstart.engines import registry
from headstart.engines.llama.library import choose
from headstart.engines.options import EngineOptions
from headstart.engines.registry import EngineRow
from headstart.errors import ConfigError, ModelError
from process import run


class Whole:
    """An engine that cannot load a tokenizer alone."""


def row(name: str, module: str, loader: str) -> EngineRow:
    return EngineRow(name, module, loader, lambda model: model == name, lambda model: None, "fakes")


ROWS = (row("fake", "headstart.testing.fake_engine", "FakeEngine"), row("whole", __name__, "Whole"), *registry.ENGINES)


def test_the_engine_that_takes_a_model_loads_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ENGINES", ROWS)
    tokenizer = registry.load_tokenizer(EngineOptions("fake"))
    assert tokenizer.tokenize("Hi") == [*b"Hi"]
    tokenizer.close()
    tokenizer.close()


def test_the_tokenizer_of_a_folder_needs_no_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front of a fleet computes nothing."""
    for module in ("mlx", "mlx_lm", "headstart.engines.mlx"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tiny_hf.write_tokenizer(tmp_path)
    tokenizer = registry.load_tokenizer(EngineOptions(str(tmp_path)))
    assert [tokenizer.token_bytes(token) for token in tokenizer.tokenize("Hi")] == [b"H", b"i"]
    tokenizer.close()


def test_an_engine_without_a_tokenizer_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ENGINES", ROWS)
    with pytest.raises(ConfigError, match="engine 'whole' cannot load a tokenizer without its model"):
        registry.load_tokenizer(EngineOptions("whole"))


def test_a_missing_model_is_refused_as_at_a_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no model"):
        registry.load_tokenizer(EngineOptions(str(tmp_path / "none.gguf")))


def test_a_broken_model_is_refused_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"cannot read the vocabulary of '.*broken\.gguf'") as caught:
        registry.load_tokenizer(EngineOptions(str(broken)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("kv_type", "q8_0", "type of the model"),
        ("lora", Path("adapter.gguf"), "mlx_lm.fuse"),
        ("gpu_layers", 3, "one device"),
        ("threads", 2, "itself"),
        ("llama_lib", Path("lib"), "leave it out"),
    ],
)
def test_options_of_another_engine_are_refused(tmp_path: Path, option: str, value: object, hint: str) -> None:
    """Before anything is loaded, and by `load` too."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    options = EngineOptions(str(tmp_path), **{option: value})  # type: ignore[arg-type]
    for act in (registry.check, registry.load):
        with pytest.raises(
            ConfigError, match=rf"{option}= is for GGUF files, and '.*' is computed by the engine 'mlx': .*{hint}"
        ):
            act(options)
    assert registry.without_foreign(options) == EngineOptions(str(tmp_path))
    given = EngineOptions("a.gguf", **{option: value})  # type: ignore[arg-type]
    assert registry.without_foreign(given) == given


def test_every_option_of_an_engine_exists() -> None:
    names = {field.name for field in fields(EngineOptions)}
    assert all(row.options | row.instead.keys() <= names for row in registry.ENGINES)


AHEAD = """
import sys, threading
import headstart.models.child
from headstart.engines import registry
from headstart.engines.llama.library import choose
from headstart.engines.llama import library

tasks = threading.active_count()
registry.import_forkable()
print("headstart.engines.llama.engine" in sys.modules, "llama_cpp.llama_cpp" in sys.modules, threading.active_count() - tasks)
tested = library.choose().tested
registry.preload()
print(tested, ("llama_cpp.llama_cpp" in sys.modules) is tested)
"""


@pytest.mark.slow
def test_what_is_done_ahead_of_a_fork_loads_no_library_and_what_is_done_behind_it_a_tested_one() -> None:
    result = run(code=AHEAD)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["True False 0", "True True"]
    unknown = run(code=AHEAD, HEADSTART_LLAMA_LIB=str(choose().folder))  # the user's own counts as untested
    assert unknown.stdout.splitlines() == ["True False 0", "False True"]
