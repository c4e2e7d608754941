"""Engines by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.errors import ConfigError, ModelError
from headstart.testing.fake_engine import FakeEngine
from headstart.testing.named_engine import engine_maker

TWO = "from headstart.testing.fake_engine import FakeEngine\nclass One(FakeEngine): ...\nclass Two(FakeEngine): ...\n"


@pytest.mark.parametrize("name", ["headstart.testing.fake_engine", "headstart.testing.fake_engine:FakeEngine"])
def test_a_module_names_its_engine(name: str) -> None:
    assert engine_maker(name) is FakeEngine


def test_a_file_names_its_engine(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    assert type(engine_maker(f"{tmp_path / 'two.py'}:Two")()).__name__ == "Two"
    with pytest.raises(ConfigError, match="defines 2 engines, not one"):
        engine_maker(str(tmp_path / "two.py"))
    with pytest.raises(ConfigError, match="no class or function 'Three'"):
        engine_maker(f"{tmp_path / 'two.py'}:Three")


def test_a_path_of_a_model_is_loaded_by_headstart(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"none")
    with pytest.raises(ModelError, match=r"model\.gguf"):
        engine_maker(str(tmp_path / "model.gguf"))()


@pytest.mark.parametrize(("name", "reason"), [("no_such_engine", "neither a module nor"), ("none.py", "There is no file")])
def test_what_is_not_there_is_said(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine_maker(name)
