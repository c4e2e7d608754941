"""Processes that have used MLX end with code 0: what it keeps for a thread is freed before Python ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tiny_hf
from headstart.testing import start_and_stop

STARTS = 50


@pytest.mark.slow
def test_fifty_of_fifty_processes_end_with_code_0(tmp_path: Path) -> None:
    """Half of them close the engine, and half leave that to the end of the process."""
    model = str(tiny_hf.write(tmp_path / "model", "gemma3_text"))  # its windows use functions that MLX compiles
    codes = []
    for number in range(STARTS):
        command = [sys.executable, "-m", start_and_stop.__name__, model, start_and_stop.WAYS[number % 2]]
        codes.append(subprocess.run(command, capture_output=True, timeout=120).returncode)
    assert codes == [0] * STARTS
