"""`make site`: the docs as a site that loads nothing from another host and has no dead link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """Collects the links of a page, the resources that it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src", "action", "poster", "srcset") and value is not None:
                self.targets.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="`make site` and `make test-slow` install it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in site.rglob("*.html"):
        if path.name != "404.html":  # its links are relative to any address
            yield path, Page(path)


def test_no_page_names_another_host(site: Path) -> None:
    found = {path.name: [one for one in page.targets if urlsplit(one).netloc] for path, page in pages(site)}
    assert {name: hosts for name, hosts in found.items() if hosts} == {}


def test_no_script_or_style_loads_from_another_host(site: Path) -> None:
    loads = re.compile(
        r"""(?:url\(|@import\s+|importScripts\()\s*["']?(?:https?:)?//|unpkg\.com|cdn\.|api\.github\.com|fonts\.g"""
    )
    files = [path for kind in ("*.js", "*.css", "*.html", "*.svg") for path in site.rglob(kind)]
    assert len(files) > 20
    assert [path.name for path in files if loads.search(path.read_text("utf-8"))] == []


def test_no_link_is_dead(site: Path) -> None:
    known = {path.resolve(): page for path, page in pages(site)}
    assert len(known) > 60
    dead = []
    for path, page in known.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            other = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if other.is_dir():
                other /= "index.html"
            if not other.exists() or (
                parts.fragment and other in known and parts.fragment not in known[other].anchors | {"__top"}
            ):
                dead.append(f"{path.name}: {target}")
    assert dead == []


def test_the_search_knows_decisions_and_the_library(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text("utf-8")
    assert "Eviction learns when entries come back" in index
    assert "headstart.open" in index
