"""The engine's tests with other versions of llama-cpp-python: the oldest that is taken, one in between, and the newest one.

A version is compiled once, into a folder beside the environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.engines.llama.library import BINDING, OLDEST

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / BINDING
NEWEST = "newest"
TESTS = (
    "tests/engines/test_llama.py",
    "tests/engines/llama",
    "tests/system/test_llama_conformance.py",
    "tests/system/test_models_with_state.py",
)
BETWEEN = "0.3.30"
LEFT_OUT = dict.fromkeys((OLDEST, BETWEEN), "not mamba2")
"""Tests that a version cannot pass. Both expect weights of another shape in Mamba-2 models."""


def installed(version: str) -> Path:
    """A folder with this version."""
    folder = FOLDER / version
    if version == NEWEST:
        shutil.rmtree(folder, ignore_errors=True)  # it may be older now
    if not (folder / "llama_cpp").exists():
        wanted = BINDING if version == NEWEST else f"{BINDING}=={version}"
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--target"]
        subprocess.run([*pip, f"{folder}.part", wanted], check=True, timeout=3000)
        Path(f"{folder}.part").rename(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("version", [OLDEST, BETWEEN, NEWEST])
def test_the_engine_with_another_version(version: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(installed(version)), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "HEADSTART_STATE_DIR": str(tmp_path / "state")}
    environment.pop("HEADSTART_SLOW", None)  # what is tested by default: a version is to work, not to be tested for hours
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-k", LEFT_OUT.get(version, ""), *TESTS]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=3000)
    assert found.returncode == 0, found.stdout[-6000:]
    print(version, found.stdout.splitlines()[-1])
