"""The files of the page: references resolve, and nothing in them loads from elsewhere or makes markup of text."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from posixpath import dirname, join, normpath

import pytest

from headstart.events.source import Activity
from headstart.events.tap import RequestState
from scripted_top import words_of

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "src" / "headstart" / "web" / "static"
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
CODE = [name for name in FILES if name.endswith(".js")]
_REFERENCES = {
    "html": re.compile(r"""(?:src|href)="(?!\#|docs")([^"]+)\""""),
    "js": re.compile(r"""(?:\bfrom|^import|\bimport\()\s*["'`]([^"'`$]+)["'`]""", re.MULTILINE),
    "css": re.compile(r"""url\(["']?([^"')]+)"""),
}


def text(name: str) -> str:
    return (STATIC / name).read_text("utf-8")


def test_every_reference_resolves() -> None:
    views = {f"js/views/{name}.js" for name in re.findall(r'^  \["(\w+)", "\w+"\],$', text("js/main.js"), re.MULTILINE)}
    assert len(views) == 4
    assert "./views/${name}.js" in text("js/main.js")
    todo = ["index.html", *views]
    seen = {*todo}
    while todo:
        name = todo.pop()
        kind = name.rpartition(".")[2]
        for target in _REFERENCES[kind].findall(text(name)) if kind in _REFERENCES else ():
            place = target.removeprefix("headstart/web/") if name == "index.html" else normpath(join(dirname(name), target))
            assert place in FILES, f"{name} refers to {target}"
            if place not in seen:
                seen.add(place)
                todo.append(place)
    assert set(FILES) - seen == set(), "files that nothing refers to"


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    hosts = set(re.findall(r"(?:https?|wss?):?//[\w.-]+", text(name))) - {"http://www.w3.org"}  # the name of a namespace
    assert hosts == set()
    assert "//" not in "".join(re.findall(r"""(?:src|href|url\()=?["'(]?//""", text(name)))


def test_the_page_knows_every_state() -> None:
    def names(file: str, start: str, name: str) -> set[str]:
        return set(re.findall(name, text(file).partition(start)[2].partition(";")[0]))

    states = words_of(RequestState)
    assert names("js/views/requests.js", "const STATES = ", r"(\w+):") == states
    assert names("js/requests/request_log.js", "const OVER = ", r'"(\w+)"') == states - {"queued", "prefill", "reply"}
    assert set(re.findall(r'state === "(\w+)"', text("js/cache/slot_strip.js"))) == words_of(Activity)


FORBIDDEN = re.compile(
    r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTMLUnsafe|srcdoc"
    r"|eval\s*\(|new Function|Function\s*\(|javascript:|importScripts|new Worker|WebSocket|EventSource|sendBeacon)"
)


@pytest.mark.parametrize("name", CODE)
def test_no_code_makes_markup_or_code_of_text(name: str) -> None:
    assert FORBIDDEN.findall(text(name)) == []
    if name != "js/dom.js":
        made = re.findall(r"\bcreateElement(?:NS)?\b|\bsetAttribute(?:NS)\b|\.cssText\b", text(name))
        assert made == [], "elements come from dom.js"
    assert not re.search(r"set(?:Timeout|Interval)\(\s*[\"'`]", text(name))


def test_the_search_for_forbidden_code_finds_it() -> None:
    for code in ("a.innerHTML = b", "eval(x)", "new Function('a')", 'open("javascript:1")', "document.write(a)"):
        assert FORBIDDEN.search(code)


def test_the_page_has_nothing_inline() -> None:
    page = text("index.html")
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\bstyle=|\bon[a-z]+=", page) == []
    assert '<html lang="en">' in page


@pytest.mark.slow
def test_the_wheel_has_every_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name.partition("web/static/")[2] for name in zipfile.ZipFile(wheel).namelist() if "web/static/" in name}
    assert packed == set(FILES)


def test_nothing_keeps_the_files_out_of_the_wheel() -> None:
    """Hatch packs all files of a package but those that git ignores."""
    ignored = subprocess.run(["git", "check-ignore", *FILES], cwd=STATIC, capture_output=True, text=True, timeout=30)
    assert ignored.stdout == ""
