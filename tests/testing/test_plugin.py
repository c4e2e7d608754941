"""`pytest --engine`: the checks as an author of an engine runs them, in a folder of their own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny

ROOT = Path(__file__).resolve().parents[2]
FAULTY = """
from headstart.testing.fake_engine import FakeEngine

class Faulty(FakeEngine):
    def length(self, slot):
        return super().length(slot) + 1
"""


def run(folder: Path, engine: str, *more: str) -> subprocess.CompletedProcess[str]:
    """As after an installation, which names the plugin (`pyproject.toml`). Other plugins take ten seconds to load."""
    plugins = ("--disable-plugin-autoload", "-p", "headstart.testing.plugin")
    command = [sys.executable, "-m", "pytest", *plugins, "--engine", engine, "-q", *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


def test_one_run_says_which_promise_is_broken(tmp_path: Path) -> None:
    """The user's own tests in the folder are left out."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "test_mine.py").write_text("def test_mine(): assert False")
    result = run(tmp_path, "faulty", "-k", "lengths or shape or mine")
    assert result.returncode == 1
    assert "lengths_follow_the_calls: the contract is broken: length is 1 in an empty slot; 0 is right" in result.stdout
    assert "1 failed, 1 passed" in result.stdout


def test_an_installation_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"headstart.testing.plugin": "headstart.testing.plugin"}
    assert project["optional-dependencies"]["testing"] == ["pytest>=8.4"]


def own(folder: Path) -> str:
    return str(ROOT / "examples" / "own_engine.py")


def llama(folder: Path) -> str:
    return str(tiny.write(folder / "model.gguf"))


def llama_stateful(folder: Path) -> str:
    return str(tiny.write(folder / "model.gguf", "lfm2"))


def mlx(folder: Path) -> str:
    import tiny_hf

    return str(tiny_hf.write(folder / "model", "llama"))


def mlx_stateful(folder: Path) -> str:
    import tiny_hf

    return str(tiny_hf.write(folder / "model", "lfm2"))


@pytest.mark.slow
@pytest.mark.parametrize("make", [own, llama, llama_stateful, mlx, mlx_stateful], ids=lambda make: make.__name__)
def test_all_engines_pass(make: Callable[[Path], str], tmp_path: Path) -> None:
    result = run(tmp_path, make(tmp_path), "--engine-prompts", "200", "-ra", "-p", "no:cacheprovider")
    print(result.stdout)
    assert result.returncode == 0, result.stdout
    assert " failed" not in result.stdout
