"""`headstart top` says what is missing before it takes the screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import headstart
from headstart.cli.main import main
from headstart.cli.top import command
from process import run

SOURCE = Path(headstart.__file__).parent
IMPORT = re.compile(r"^\s*(from|import) textual\b", re.MULTILINE)


def complaint(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["top", *options])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_without_textual_it_names_the_mend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert complaint(capsys) == "headstart: `headstart top` needs textual: pip install 'headstart[top]'.\n"


def test_without_a_terminal_it_names_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs a terminal; GET /headstart/events has the same as data" in complaint(capsys)


def test_a_certificate_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Fault: the screen said `connecting` for ever."""
    assert "Cannot read --tls-cert" in complaint(capsys, "--tls-cert", str(tmp_path / "none.pem"))


def test_other_commands_do_not_load_textual() -> None:
    loaded = "import headstart.cli.main, sys; print([name for name in ('textual', 'rich.text') if name in sys.modules])"
    assert run(code=loaded).stdout == "[]\n"


def test_only_the_screen_imports_textual() -> None:
    """The rest of headstart works without it."""
    importers = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if IMPORT.search(path.read_text("utf-8"))}
    assert importers == {"cli/top/app.py"}
