"""`headstart install-gpu`: the command that it prints, and what `--run` does with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from headstart.cli import install_gpu
from headstart.cli.install_gpu import BACKENDS, tried
from headstart.engines.llama.library import binding_version
from headstart.errors import ConfigError
from process import Here


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_prints_a_command_that_compiles_the_installed_version(backend: str, here: Here) -> None:
    found = here("install-gpu", backend)
    assert found.returncode == 0
    needs, command = found.stdout.splitlines()
    assert needs.startswith("# needs ")
    name = "HIP" if backend == "rocm" else backend.upper()
    assert command.startswith(f"CMAKE_ARGS=-DGGML_{name}=on {sys.executable} -m pip ")
    assert command.endswith(f" llama-cpp-python=={binding_version()}")
    assert "--no-cache-dir" in command


def test_another_backend_is_refused(here: Here) -> None:
    found = here("install-gpu", "abacus")
    assert found.returncode == 2
    assert found.stderr == "headstart: There is no backend 'abacus': there are cuda, metal, vulkan, rocm.\n"


@pytest.mark.parametrize("code", [0, 1])
def test_it_runs_what_it_prints(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[list[str], str]] = []

    def ran(command: list[str], env: dict[str, str]) -> Any:
        commands.append((command, env["CMAKE_ARGS"]))
        return SimpleNamespace(returncode=code)

    monkeypatch.setenv("CMAKE_ARGS", "-DOWN=1")
    monkeypatch.setattr(subprocess, "run", ran)
    monkeypatch.setattr(install_gpu, "tried", lambda model: True)
    with pytest.raises(ConfigError if code else typer.Exit):
        install_gpu.install_gpu("cuda", run=True)
    assert commands == [(install_gpu.pip_command(binding_version()), "-DOWN=1 -DGGML_CUDA=on")]


def test_a_build_that_sees_no_gpu_fails(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The build of a checkout has no GPU."""
    assert not tried(str(tiny_model))
    assert "The engine sees no GPU" in capfd.readouterr().out
