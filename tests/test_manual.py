"""The man page that docs/manual.py makes of the help."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headstart.config import SETTINGS
from headstart.names import as_variable

PAGE = Path(__file__).resolve().parents[1] / "packaging" / "headstart.1"
READERS = {
    "man": ["man", "--warnings=w", "-l", str(PAGE)],
    "groff": ["groff", "-man", "-Tutf8", "-ww", "-z", str(PAGE)],
    "mandoc": ["mandoc", "-T", "lint", "-W", "error", str(PAGE)],
}
"""Programs that read man pages, and complain on what they cannot read."""


def test_every_setting_of_a_server_is_in_the_page() -> None:
    page = PAGE.read_text("utf-8")
    assert [name for name in SETTINGS if as_variable(name) not in page] == []


@pytest.mark.parametrize("reader", READERS)
def test_the_page_is_read_without_a_warning(reader: str) -> None:
    if shutil.which(reader) is None:
        pytest.skip(f"{reader} is not installed")
    result = subprocess.run(READERS[reader], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    if reader == "mandoc":
        assert result.stdout == ""
    if reader == "man":
        shown = re.sub(r".\x08", "", result.stdout)
        assert re.search(r"^ +--reuse fast\|exact$", shown, re.MULTILINE)
        assert "serve qwen.gguf --ctx 32768" in shown
        assert "`" not in shown
