"""Completion in real shells: what Tab offers for commands, options, their values and models."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.cli.completion import joined, models, take_line, whole_words, words
from process import environment, run

CASES = (
    ("", {"serve", "doctor", "cache", "version"}),
    ("cache p", {"pin"}),
    ("serve --reu", {"--reuse"}),
    ("serve --reuse ", {"exact", "fast"}),
    ("serve --log-format j", {"json"}),
    ("serve --isolate ", {"key", "none", "user"}),
    ("serve --chat-template llama", {"llama2", "llama3", "llama4"}),
    ("serve d", {"demo"}),
    ("warm talk.txt --role s", {"system"}),
)
"""Words behind `headstart`, and what is offered for the last one, perhaps with more."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a command `headstart` of this interpreter in its `bin`."""
    command = tmp_path / "bin" / "headstart"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headstart "$@"\n')
    command.chmod(0o755)
    return tmp_path


def shell(name: str, code: str, home: Path, *arguments: str) -> str:
    """What a shell prints for `code`, without the user's own set-up."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    found = subprocess.run(
        [program, "-c", code, *arguments], capture_output=True, text=True, timeout=60, env=at_home(home), cwd=home
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    return found.stdout


def at_home(home: Path) -> dict[str, str]:
    return environment(HOME=str(home), PATH=f"{home / 'bin'}:{os.environ['PATH']}", TERM="xterm", ZDOTDIR=str(home))


def offered(line: str, **given: str) -> set[str]:
    """What headstart itself answers to bash. Bash hands on the words of a line, one below the other."""
    parts = f"headstart {line}".split(" ")
    asked = {"_HEADSTART_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(parts), "COMP_CWORD": str(len(parts) - 1)}
    result = run(**asked, **given)
    assert (result.returncode, result.stderr) == (0, "")
    return set(result.stdout.split())


@pytest.mark.parametrize(("line", "wanted"), [CASES[0], CASES[3], CASES[7]])
def test_commands_values_and_models_are_offered(line: str, wanted: set[str]) -> None:
    assert offered(line) >= wanted


def test_a_strange_variable_is_not_reported_into_the_answer() -> None:
    assert offered("serve --reuse f", HEADSTART_REUSED="x") == {"fast"}


def test_an_empty_word_offers_the_model_files_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen.gguf").touch()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert models("") == ["demo", "qwen.gguf"]
    assert models("de") == ["demo"]
    assert models("qw") == []  # the shell completes paths


def test_the_names_of_models_on_this_machine_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".lmstudio/models/owner/Tiny-GGUF"
    folder.mkdir(parents=True)
    for quantization in ("Q4_K_M", "Q8_0"):
        (folder / f"Tiny-{quantization}.gguf").touch()
    assert models("own") == ["owner/Tiny-GGUF:Q4_K_M", "owner/Tiny-GGUF:Q8_0"]
    assert models("owner/Tiny-GGUF:Q8") == ["owner/Tiny-GGUF:Q8_0"]
    assert models("mine=owner/Tiny-GGUF:Q8") == ["mine=owner/Tiny-GGUF:Q8_0"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("serve owner/name : Q8", "serve owner/name:Q8"),
        ("serve owner/name :", "serve owner/name:"),
        ("serve mine = owner/name : Q8 --ctx = 5 x", "serve mine=owner/name:Q8 --ctx=5 x"),
        ("serve a := b", "serve a:=b"),
        ("serve --reuse fast", "serve --reuse fast"),
    ],
)
def test_words_that_bash_has_broken_are_joined(parts: str, words: str) -> None:
    assert joined(parts.split()) == words.split()


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ("headstart serve owner/Tiny-GGUF : Q8", "headstart serve Q8 behind owner/Tiny-GGUF:"),
        ("headstart serve --model = owner/Tiny-GGUF :", "headstart serve --model  behind owner/Tiny-GGUF:"),
        ("headstart serve --ctx = 512 mine = own", "headstart serve --ctx=512 own behind mine="),
        ("headstart serve --reuse = f", "headstart serve --reuse f behind "),
    ],
)
def test_of_a_broken_word_the_end_is_completed(parts: str, wanted: str) -> None:
    broken = parts.split()
    environ = {"_HEADSTART_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(broken), "COMP_CWORD": str(len(broken) - 1)}
    take_line(environ)
    words = environ["COMP_WORDS"].split("\n")
    assert f"{' '.join(words)} behind {environ['_HEADSTART_KEPT']}" == wanted
    assert int(environ["COMP_CWORD"]) == len(words) - 1


@pytest.mark.parametrize(
    ("shell", "line", "printed"),
    [
        ("zsh", "headstart serve --reuse=e", "compset -P --reuse=;\nexact\n"),
        ("fish", "headstart serve --reuse=e", "--reuse=exact\n"),
        ("fish", "headstart serve --reuse e", "exact\n"),
        ("fish", "headstart serve mine=e", "exact\n"),
        ("bash", "headstart serve --reuse=e", "exact\n"),
    ],
)
def test_an_answer_fits_a_word_of_an_option_and_its_value(
    shell: str, line: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with whole_words({"_HEADSTART_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}):
        print("exact")
    assert capsys.readouterr().out == printed


def test_words_are_sorted() -> None:
    assert words(["b1", "a", "b0"])("b") == ["b0", "b1"]


BASH = """
source ~/.bashrc
COMP_WORDS=(headstart {line}); COMP_CWORD={last}
completer=$(complete -p headstart | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$completer headstart
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.slow
def test_bash_completes_after_installation(home: Path) -> None:
    assert "bash completion installed" in shell("bash", "headstart --install-completion; true", home)
    for line, wanted in CASES:
        parts = [f"'{part}'" for part in line.split(" ")]
        code = BASH.format(line=" ".join(parts), last=len(parts))
        assert set(shell("bash", code, home).split()) >= wanted, line


@pytest.mark.slow
def test_fish_completes_after_installation(home: Path) -> None:
    assert "fish completion installed" in shell("fish", "headstart --install-completion; true", home)
    for line, wanted in (*CASES, ("serve --reuse=e", {"--reuse=exact"})):
        found = shell("fish", 'complete -C "$argv[1]"', home, f"headstart {line}")
        assert {offer.partition("\t")[0] for offer in found.splitlines()} >= wanted, line


TYPED = (
    ("headstart serve --reuse e", "--reuse exact"),
    ("headstart doc", "headstart doctor"),
    ("headstart serve owner/Tiny-GGUF:Q8", "serve owner/Tiny-GGUF:Q8_0 "),
    ("headstart serve mine=owner/Tiny-GGUF:Q8", "serve mine=owner/Tiny-GGUF:Q8_0 "),
    ("headstart serve --reuse=e", "--reuse=exact"),
)
"""What is typed before Tab, and what the line then ends with."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("bash", ["--noprofile", "-i"]), ("zsh", ["-i"])], ids=["bash", "zsh"])
def test_tab_completes_what_is_typed(name: str, options: list[str], home: Path) -> None:
    """In a terminal: the shell breaks the line into words itself."""
    assert f"{name} completion installed" in shell(name, "headstart --install-completion; true", home)
    folder = home / ".lmstudio/models/owner/Tiny-GGUF"
    folder.mkdir(parents=True)
    for quantization in ("Q4_K_M", "Q8_0"):
        (folder / f"Tiny-{quantization}.gguf").touch()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(home)
        os.execvpe(name, [name, *options], at_home(home))
    try:
        os.write(terminal, b"PS1='rea''dy>'\n")
        until(terminal, "ready>")
        for typed, wanted in TYPED:
            os.write(terminal, f"{typed}\t".encode())
            until(terminal, wanted)
            os.write(terminal, b"\x15")  # clears the line
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)


def until(terminal: int, wanted: str) -> None:
    """Waits until a terminal has shown a text, whatever moves its cursor in between."""
    shown = ""
    while wanted not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\r]", "", shown):
        assert select.select([terminal], [], [], 60)[0], shown
        shown += os.read(terminal, 4096).decode("utf-8", "replace")
