"""The routes of the page: who gets it, with which headers, and that they serve nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.web import routes
from live import Server, serving

STATIC = Path(str(files("headstart.web"))) / "static"
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Runtime(FakeEngine, Settings(memory_budget=32 << 20)) as runtime, serving(runtime, api_keys=["one", "two"]) as found:
        yield found


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_served_without_a_key(server: Server, name: str) -> None:
    answer = server.http.get(f"/headstart/web/{name}")
    assert answer.status_code == 200
    assert answer.content == (STATIC / name).read_bytes()
    assert answer.headers["content-type"] == routes.KINDS[name.rpartition(".")[2]]
    assert answer.headers["content-security-policy"] == routes.POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    again = server.http.get(f"/headstart/web/{name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_browsers_get_the_page_and_others_json(server: Server) -> None:
    page = server.http.get("/", headers=BROWSER)
    assert page.content == (STATIC / "index.html").read_bytes()
    assert page.headers["content-security-policy"] == routes.POLICY
    assert page.headers["x-frame-options"] == "DENY"
    assert page.headers["vary"] == "accept"
    for accept in ("*/*", "application/json", "application/json, text/html;q=0.9", "text/html;q=0", "text/*", ""):
        other = server.http.get("/", headers={"accept": accept})
        assert other.json()["name"] == "headstart", accept
        assert other.headers["vary"] == "accept"
    assert server.http.head("/", headers=BROWSER).headers["content-type"].startswith("text/html")
    assert server.post("/", headers=BROWSER).status_code == 405


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [("text/html", True), ("TEXT/HTML;q=0.1", True), ("text/html;q=x", False), ("application/json;q=.5, text/html", True)],
)
def test_who_wants_the_page(accept: str, wanted: bool) -> None:
    assert routes.wants_page(accept) is wanted


def test_the_policy_allows_this_server_only() -> None:
    rules = dict(rule.split(" ", 1) for rule in routes.POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert {rules[name] for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types")} == {"'none'"}
    assert "unsafe" not in routes.POLICY


def test_a_page_under_a_foreign_name_is_refused(server: Server) -> None:
    for path in ("/", "/headstart/web/style.css"):
        assert server.http.get(path, headers={**BROWSER, "host": "evil.example"}).status_code == 403


def test_data_needs_a_key(server: Server) -> None:
    for path in ("/v1/models", "/headstart/events", "/headstart/cache", "/headstart/web/../cache", "/headstart/webs"):
        assert httpx.get(server.url + path, headers=BROWSER).status_code == 401, path


@pytest.mark.parametrize(
    "path", ["", "static/index.html", "../routes.py", "%2e%2e/routes.py", "..%2froutes.py", "js", "js/none.js", "/etc/passwd"]
)
def test_no_other_file_is_served(server: Server, path: str) -> None:
    with httpx.Client(base_url=server.url) as http:  # as it is: httpx would resolve the dots
        answer = http.send(httpx.Request("GET", httpx.URL(server.url, raw_path=f"/headstart/web/{path}".encode())))
    assert answer.status_code in (401, 404)


def test_without_the_page_there_is_no_route() -> None:
    with serving(Runtime(FakeEngine, Settings(memory_budget=32 << 20)), page=False) as server:
        assert server.http.get("/", headers=BROWSER).json()["name"] == "headstart"
        assert server.http.get("/headstart/web/index.html").status_code == 404


def test_the_page_is_read_only_when_somebody_looks() -> None:
    routes.names.cache_clear()
    with Runtime(FakeEngine, Settings(memory_budget=32 << 20)) as runtime, serving(runtime) as server:
        server.http.get("/")
        assert routes.names.cache_info().currsize == 0
        server.http.get("/", headers=BROWSER)
        assert routes.names.cache_info().currsize == 1
