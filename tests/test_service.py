"""packaging/headstart.service: systemd understands it, it is locked down, and a server works under its limits."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from headstart.cli.completion import VARIABLE
from process import HEADSTART, SHARED, run, started

ROOT = Path(__file__).resolve().parents[1]
UNIT = (ROOT / "packaging" / "headstart.service").read_text("utf-8")


def test_its_command_has_options_that_exist() -> None:
    command = re.search(r"^ExecStart=((?:.*\\\n)*.*)", UNIT, re.MULTILINE)
    assert command is not None
    options = re.findall(r"--[\w-]+", command[1])
    assert "--api-key-file" in options
    asked = ["headstart", "serve", "--"]
    answer = run(**{VARIABLE: "complete_bash", "COMP_WORDS": "\n".join(asked), "COMP_CWORD": "2"})
    assert set(options) <= set(answer.stdout.split())


def test_the_docs_name_all_settings_that_keep_a_port_closed() -> None:
    closing = re.findall(r"^(PrivateNetwork|IPAddressDeny|RestrictAddressFamilies)=", UNIT, re.MULTILINE)
    assert len(closing) == 3
    docs = (ROOT / "docs" / "service.md").read_text("utf-8")
    (line,) = (line for line in docs.splitlines() if line.startswith("* With a port"))
    assert all(f"`{setting}=" in line for setting in closing)


@pytest.mark.slow
def test_systemd_accepts_it_and_finds_it_safe(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "headstart.service"
    unit.write_text(UNIT.replace("/opt/headstart/bin/headstart", sys.executable), "utf-8")
    understood = subprocess.run(
        ["systemd-analyze", "--man=no", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert (understood.returncode, understood.stderr) == (0, "")
    rated = ["systemd-analyze", "security", "--offline=true", "--threshold=10", "--no-pager", str(unit)]
    result = subprocess.run(rated, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


LOCKED = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that may not write memory and execute it: what MemoryDenyWriteExecute=yes is for a process."""


@pytest.mark.slow
def test_a_server_needs_no_memory_that_is_written_and_executed(demo_model: Path) -> None:
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(66, 0, 0, 0, 0) < 0:
        pytest.skip("this kernel cannot deny memory that is written and executed (Linux 6.3)")
    assert "MemoryDenyWriteExecute=yes" in UNIT
    command = [sys.executable, "-c", LOCKED, *HEADSTART, "serve", str(demo_model), *SHARED, "--no-disk", "--port", "0"]
    with started(command) as server:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "response_format": {"type": "json_object"}}
        answer = httpx.post(f"{server.address()}/v1/chat/completions", json=asked, timeout=120)
        assert 0 < answer.json()["usage"]["completion_tokens"] <= 4  # `{}` is two
        assert server.end() == 0
