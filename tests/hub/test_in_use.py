from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from headstart.hub.in_use import program_name, users


def test_files_that_are_open_or_mapped(tmp_path: Path) -> None:
    opened, mapped, link, idle = (tmp_path / name for name in ("open", "mapped file", "link", "idle"))
    for path in (opened, mapped, idle):
        path.write_bytes(b"GGUF" * 4096)
    link.symlink_to(mapped)
    with opened.open("rb"):
        if sys.platform == "linux":
            with mapped.open("rb") as file:
                held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            found = users([opened, link, idle])
            held.close()
            assert [user.pid for user in found[link]] == [os.getpid()]
        else:
            found = users([opened, idle])
        assert [user.pid for user in found[opened]] == [os.getpid()]
        assert found[idle] == []
    assert users([opened, link])[opened] == []


def test_of_one_file_under_two_names_both_are_found(tmp_path: Path) -> None:
    """Fault: only one of the names was among the answers."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"GGUF")
    link.symlink_to(file)
    with file.open("rb"):
        found = users(path for path in (link, file))
    assert [[user.pid for user in found[path]] for path in (link, file)] == [[os.getpid()]] * 2


@pytest.mark.parametrize("paths", [[], [Path("/nowhere/at/all")]])
def test_what_nobody_can_have_open(paths: list[Path]) -> None:
    assert not any(users(paths).values())


@pytest.mark.parametrize(
    ("program", "words", "name"),
    [
        ("python3.11", ["python", "-m", "headstart.models.child", "7"], "headstart"),
        ("python3", ["python3", "/usr/bin/headstart", "serve"], "headstart"),
        ("python3", ["python3", "other.py", "-m", "headstarts"], "python3"),
        ("ollama", ["ollama", "serve"], "ollama"),
        ("headstart", ["headstart"], "headstart"),
    ],
)
def test_a_program_that_python_runs_has_its_own_name(program: str, words: list[str], name: str) -> None:
    assert program_name(program, words) == name
