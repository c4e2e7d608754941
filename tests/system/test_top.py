"""`headstart top` in a real terminal (tmux), for a real server that is killed and started again.

docs/top.svg and docs/stats.svg are pictures of this run. They are drawn again by
`HEADSTART_PICTURES=docs python -m pytest --slow tests/system/test_top.py`.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest
from rich.console import Console
from rich.text import Text

from process import HEADSTART, SHARED, environment, run, serving
from stores import free_port

pytestmark = pytest.mark.slow

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "top.svg"
WORDS = "the house water garden letter market window bridge captain summer winter travel music paper stone river".split()
FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {terminal_width} {terminal_height}" role="img"
aria-label="headstart top">
<style>.{unique_id}-matrix {{ font: {char_height}px monospace; line-height: {line_height}px }} {styles}</style>
<rect fill="#121212" width="100%" height="100%" rx="6"/>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="100%" height="100%"/></clipPath>{lines}</defs>
<g transform="translate(9, 0)" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""As rich draws terminals, but without a frame, and without a font of another host."""


class Terminal:
    """A program in tmux, on a server of its own."""

    def __init__(self, socket: Path, command: Sequence[str], size: tuple[int, int], **variables: str) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", os.devnull]
        env = environment(**variables)
        for name in ("COLUMNS", "LINES"):  # a caller may set them, and programs take them for the terminal's size
            env.pop(name, None)
        self.run("new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), *command, env=env)

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        return subprocess.run([*self._tmux, *arguments], check=True, capture_output=True, text=True, env=env).stdout

    def screen(self, *options: str) -> str:
        return self.run("capture-pane", "-p", *options)

    def wait(self, pattern: str) -> str:
        """Waits until the screen shows something, and returns the screen."""
        deadline = time.monotonic() + 90
        while not re.search(pattern, shown := self.screen()):
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{shown}"
            time.sleep(0.05)
        return shown

    def keys(self, *names: str) -> None:
        self.run("send-keys", *names)

    def resize(self, width: int, height: int) -> None:
        self.run("resize-window", "-x", str(width), "-y", str(height))

    def ended(self) -> bool:
        return subprocess.run([*self._tmux, "has-session"], capture_output=True, check=False).returncode != 0

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)


@contextmanager
def top(url: str, folder: Path, *, size: tuple[int, int], **variables: str) -> Iterator[Terminal]:
    assert shutil.which("tmux"), "this test needs tmux: apt-get install tmux"
    variables = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8", **variables}
    terminal = Terminal(folder / "tmux", [*HEADSTART, "top", "--url", url], size, **variables)
    try:
        yield terminal
    finally:
        terminal.close()


def ask(url: str, question: str, handbook: int, **more: object) -> None:
    system = "You answer from this handbook. " + " ".join(WORDS[at * at % len(WORDS)] for at in range(handbook))
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, **more}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


def drawn(screen: str, width: int) -> str:
    """A screen with its colours as SVG."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(screen.rstrip("\n")), soft_wrap=True, end="")
    return console.export_svg(title="", code_format=FORMAT, unique_id="top")


def test_a_server_is_watched_killed_and_watched_again(demo_model: Path, tmp_path: Path) -> None:
    port, wide = free_port(), 132
    url = f"http://127.0.0.1:{port}"
    options = (str(demo_model), *SHARED, "--port", str(port), "--cache-dir", str(tmp_path / "cache"))
    with top(url, tmp_path, size=(wide, 26)) as terminal:
        terminal.wait(r"No server answers at http://127\.0\.0\.1:\d+ \(.*refused\). Trying again")
        with serving(*options) as server:
            server.line("listening")
            terminal.wait("0 idle")
            for question in ("Where is the garden?", "Who is the captain?", "What is in the letter?"):
                ask(url, question, 900)
            terminal.wait(r"(?s)(stop|length) .*(stop|length) .*(stop|length) ")
            ask(url, "Where is the garden now?", 901)
            terminal.wait("message_changed|system_changed")
            thread = threading.Thread(target=ask, args=(url, "And the bridge? " + " ".join(WORDS * 150), 900))
            thread.start()
            terminal.wait(r"prefill +[█░]+ [\d,]+ of [23],\d\d\d \([1-9]\d?%\)")
            picture = drawn(terminal.screen("-e", "-N"), wide)
            thread.join()
            shown = terminal.wait(r"stored: [\d,]+ tokens in \d+ entries")
            shown = terminal.wait(r"saved +[1-9][\d,]* tokens \(\d+%\), about [\d.]+ s")
            assert re.search(r"disk +[█░]{20} [\d.]+ \wi?B of", shown)
            assert "├─" in shown  # prompts part behind the handbook

            terminal.resize(80, 24)
            shown = terminal.wait("(?m)^.?slots─+$")
            assert max(map(len, shown.splitlines())) <= 80
            terminal.resize(wide, 26)
            terminal.wait("(?m)slots.*saved")

            terminal.keys("Enter")
            terminal.wait(r"cause +(none|\w+)")
            terminal.keys("Escape")
            terminal.wait("requests, the latest first")

            plot = tmp_path / "stats.svg"
            told = run("stats", "--url", url, "--plot", str(plot))
            assert re.search(r"saved +[\d,]+ tokens \(\d+%\), about [\d.]+ s", told.stdout), told.stderr

            server.end(signal.SIGKILL)
            terminal.wait("(has gone away|No server answers).*Trying again")
        with serving(*options) as server:
            server.line("listening")
            terminal.wait(f"^ {url}  ")
            assert re.search("D+ [0-9,]{3,}", terminal.wait("stored: [1-9]"))
            ask(url, "Where is the window?", 900)
            assert re.search(r"(stop|length) +D+C+ ", terminal.wait("(stop|length) "))
            terminal.keys("q")
            deadline = time.monotonic() + 60
            while not terminal.ended():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert server.end() == 0
    ElementTree.fromstring(picture)
    ElementTree.parse(plot)
    if folder := os.environ.get("HEADSTART_PICTURES"):
        Path(folder, "top.svg").write_text(picture, "utf-8")
        shutil.copy(plot, Path(folder, "stats.svg"))
    here, there = (set(re.findall(r"[a-z]{4,}", one)) for one in (picture, PICTURE.read_text("utf-8")))
    for name in ("slots", "saved", "stored", "requests", "latest", "prefill", "memory", "disk", "computed", "checkpoint"):
        assert name in here
        assert name in there, "docs/top.svg is old: draw it again with HEADSTART_PICTURES=docs"


def test_a_wrong_key_is_said_and_no_process_list_shows_the_right_one(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("operator = sk-of-the-operator\nbob = sk-bob\n")
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "key").write_text("sk-of-the-operator\n")
    options = ("--ctx", "512", "--slots", "1", "--threads", "1", "--memory-budget", "16MiB", "--port", "0", "--no-disk")
    with serving(str(tiny_model), *options, "--api-key-file", str(tmp_path / "keys")) as server:
        url = server.address()
        with top(url, tmp_path, size=(110, 24), HEADSTART_API_KEY="sk-wrong") as terminal:
            terminal.wait("The key is missing or wrong. Give --api-key-file FILE, or set HEADSTART_API_KEY")
        with top(url, tmp_path, size=(110, 24), HEADSTART_API_KEY_FILE=str(tmp_path / "key")) as terminal:
            terminal.wait("0 idle")
            processes = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
            assert "headstart top" in processes
            assert "sk-of-the-operator" not in processes
        assert server.end() == 0
