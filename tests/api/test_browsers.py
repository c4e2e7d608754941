"""Pages of other sites cannot use the server, and programs do not notice."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from headstart.api.browsers import BrowserGuard
from headstart.errors import ConfigError
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving

PAGE = "http://localhost:3000"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def named() -> Iterator[Server]:
    """A server that is known as llm.example.com and lets one page in."""
    with Runtime(FakeEngine) as runtime, serving(runtime, hosts=("llm.example.com",), cors=(PAGE,)) as server:
        yield server


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


# ── which host ───────────────────────────────────────────────────────────────────────────────────────────────────────

OURS = ["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.1.2.3:80", "localhost", "LocalHost:9", "localhost."]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "evil-localhost", "127.0.0.1.evil.example", ""]
FOREIGN += ["x@localhost", "[evil.example]", "localhost:80:80", "2130706433.", "llm.example.com.evil.example"]


@pytest.mark.parametrize(
    ("hosts", "ours", "foreign"),
    [
        ((), OURS, FOREIGN),
        (("llm.example.com", "box"), [*OURS, "LLM.example.com", "llm.example.com:443", "box:8000"], [*FOREIGN, "example.com"]),
        (("*.example.com",), [*OURS, "a.example.com", "a.b.Example.com:1"], [*FOREIGN, "example.com", "evilexample.com"]),
        (("*",), [*OURS, *FOREIGN], []),
    ],
)
def test_a_host_must_be_ours(hosts: tuple[str, ...], ours: list[str], foreign: list[str]) -> None:
    guard = BrowserGuard(hosts)
    for method in ("GET", "POST"):
        assert [host for host in ours if guard.refusal(method, Headers({"host": host})) is not None] == []
        assert [host for host in foreign if guard.refusal(method, Headers({"host": host})) is None] == []
        assert guard.refusal(method, Headers({})) is None, "no browser leaves it out"
    both = Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")])
    assert (guard.refusal("GET", both) is None) == ("*" in hosts)


@pytest.mark.parametrize("host", ["http://x", "x:80", "x/y", "", "*.", "a*", "-", "x\n"])
def test_a_host_of_another_form_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-host"):
        BrowserGuard((host,))


@pytest.mark.parametrize("address", ["::1", "0.0.0.0", "fe80::1%eth0"])
def test_any_address_to_listen_on_is_a_host(address: str) -> None:
    BrowserGuard((address,))


def test_a_rebound_name_reaches_nothing(named: Server) -> None:
    """DNS rebinding: the browser takes the server for the attacker's own site, so `Origin` and `Host` agree."""
    site = "evil.example:8000"
    for path in ("/", "/health", "/docs", "/v1/models", "/headstart/explain", "/openapi.json", "/nowhere"):
        status, code, message = error_of(named.http.get(path, headers={"host": site}))
        assert (status, code) == (403, "host_not_allowed")
        assert "--allow-host evil.example;" in message
    answer = named.http.post(CHAT, json=BODY, headers={"host": site, "origin": f"http://{site}"})
    assert error_of(answer)[:2] == (403, "host_not_allowed")
    assert named.http.get("/health", headers={"host": "llm.example.com"}).is_success


def test_anthropics_clients_get_the_refusal_in_their_form(named: Server) -> None:
    answer = named.http.post("/v1/messages", json=BODY, headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"


# ── which origin ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost", "localhost", True),
        ("http://localhost:80", "localhost", True),
        ("https://llm.example.com", "llm.example.com", True),  # a proxy ends TLS
        ("https://llm.example.com", "llm.example.com:443", True),
        ("https://llm.example.com:8443", "llm.example.com:8443", True),
        ("https://LLM.example.com", "llm.example.com", True),
        (PAGE, "127.0.0.1:8000", True),  # in --cors
        ("app://editor", "127.0.0.1:8000", True),
        ("http://localhost:8000", "127.0.0.1:8000", False),
        ("http://localhost:3001", "localhost:8000", False),
        ("http://localhost", "localhost:8000", False),
        ("http://localhost:3000.evil.example", "localhost:3000", False),
        ("http://evil.example", "127.0.0.1:8000", False),
        ("https://evil.example", "llm.example.com", False),
        ("null", "127.0.0.1:8000", False),
        ("", "127.0.0.1:8000", False),
        ("127.0.0.1:8000", "127.0.0.1:8000", False),
        ("app://other", "127.0.0.1:8000", False),
    ],
)
def test_only_our_own_and_named_pages_may_send(origin: str, host: str, same: bool) -> None:
    guard, headers = BrowserGuard(("llm.example.com",), (PAGE, "app://editor")), Headers({"host": host, "origin": origin})
    assert (guard.refusal("POST", headers) is None) == same
    assert (guard.refusal("DELETE", headers) is None) == same
    assert guard.refusal("GET", headers) is None, "the browser keeps the answer from the page"
    assert BrowserGuard(("llm.example.com",), ("*",)).refusal("POST", headers) is None


def test_a_page_of_another_site_can_send_nothing(named: Server) -> None:
    ways: list[dict[str, Any]] = [
        {"json": BODY},
        {"content": b'{"prompt": "x"}', "headers": {"content-type": "text/plain"}},  # the browser does not ask before
        {"data": {"prompt": "x"}},
        {},
    ]
    for path in (CHAT, "/completion", "/slots/0?action=erase", "/tokenize"):
        for way in ways:
            answer = named.http.post(path, **{**way, "headers": {"origin": "http://evil.example", **way.get("headers", {})}})
            status, code, message = error_of(answer)
            assert (status, code) == (403, "origin_not_allowed")
            assert "--cors http://evil.example;" in message
            assert "access-control-allow-origin" not in answer.headers
    assert error_of(named.http.post(CHAT, json=BODY, headers={"origin": "null"}))[2].count("--cors *;") == 1


@pytest.mark.parametrize(("site", "own"), [("same-origin", True), ("none", True), ("same-site", False), ("cross-site", False)])
def test_a_browser_that_hides_the_origin_is_still_a_browser(site: str, own: bool) -> None:
    headers = Headers({"host": "localhost", "sec-fetch-site": site})
    assert (BrowserGuard().refusal("POST", headers) is None) == own
    assert BrowserGuard().refusal("GET", headers) is None
    assert BrowserGuard((), ("*",)).refusal("POST", headers) is None


HEADS = [
    ("GET /health HTTP/1.1", 200),
    ("GET /health HTTP/1.0", 200),
    ("GET /health HTTP/1.1|host:", 403),
    ("GET /health HTTP/1.1|host: evil.example|x-forwarded-host: localhost|forwarded: host=localhost", 403),
    ("GET /health HTTP/1.1|host: localhost|x-forwarded-host: evil.example", 200),
    ("GET /health HTTP/1.1|host: localhost|host: evil.example", 403),
    ("GET /health HTTP/1.1|host: localhost, evil.example", 403),
    ("GET http://localhost/health HTTP/1.1|host: evil.example", 403),
    ("GET //localhost/health HTTP/1.1|host: evil.example", 403),
    ("POST /tokenize HTTP/1.1|host: evil.example|content-length: 0", 403),
    ("DELETE /headstart/cache/00 HTTP/1.1|host: localhost|origin: http://evil.example", 403),
    ("OPTIONS /tokenize HTTP/1.1|host: localhost|origin: http://evil.example|access-control-request-method: POST", 400),
]


@pytest.mark.parametrize(("head", "status"), HEADS)
def test_only_the_host_itself_counts(named: Server, head: str, status: int) -> None:
    """As it stands on the wire, not what a header or the target says in its place. A browser always sends one."""
    host, port = named.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line, line.makefile("rb") as answer:
        line.sendall(head.replace("|", "\r\n").encode() + b"\r\n\r\n")
        assert int(answer.readline().split()[1]) == status


def test_a_page_that_may_send_must_send_json(named: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp", ""):
        answer = named.http.post(CHAT, content=b"{}", headers={"origin": PAGE, "content-type": kind})
        assert error_of(answer)[:2] == (415, "unsupported_media_type")
        assert answer.headers["access-control-allow-origin"] == PAGE, "the page can read why"
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"):
        answer = named.http.post("/tokenize", content=b'{"content": "x"}', headers={"origin": PAGE, "content-type": kind})
        assert answer.is_success
    assert named.http.post("/slots/0?action=erase", headers={"origin": PAGE}).is_success, "without a body"
    assert named.http.post("/tokenize", json={"content": "x"}, headers={"origin": named.url}).is_success


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_programs_may_send_any_type(named: Server, kind: str | None) -> None:
    """As `curl -d` and clients of llama-server do."""
    host, port = re.fullmatch(r"http://(.*):(\d+)", named.url).groups()  # type: ignore[union-attr]
    body, extra = b'{"content": "x"}', b"" if kind is None else f"content-type: {kind}\r\n".encode()
    for version, name in ((b"1.1", b"host: localhost\r\n"), (b"1.0", b"")):
        with socket.create_connection((host, int(port))) as line, line.makefile("rb") as answer:
            head = b"POST /tokenize HTTP/%s\r\n%s%scontent-length: %d\r\n\r\n" % (version, name, extra, len(body))
            line.sendall(head + body)
            assert answer.readline().split()[1] == b"200"


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pages_cannot_be_framed(named: Server) -> None:
    page, data = named.http.get("/docs"), named.http.get("/v1/models")
    assert page.headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert "x-frame-options" not in data.headers


def test_a_page_without_a_policy_gets_one() -> None:
    from headstart.api.middleware import _unframed

    headers = dict(_unframed([(b"content-type", b"text/html; charset=utf-8")]))
    assert headers == {b"x-frame-options": b"DENY", b"content-security-policy": b"frame-ancestors 'none'"}
