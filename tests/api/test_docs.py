"""/docs: a page that needs no other host, and shows all that is served."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from headstart.api.docs import page
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving

SCRIPT = Path(__file__).parents[1] / "node" / "docs.mjs"
ELSEWHERE = re.compile(rb"(?:https?:)?//[\w-]+\.[\w.-]+|@import|url\(", re.IGNORECASE)
"""What makes a browser ask another host."""


@pytest.mark.parametrize("path", ["/docs", "/docs/", "/redoc", "/", "/health", "/nope", "/v1/models", "/openapi.json"])
def test_no_page_names_another_host(fake: Server, path: str) -> None:
    answer = fake.http.get(path, follow_redirects=True)
    assert ELSEWHERE.search(answer.content) is None
    assert answer.url.host == "127.0.0.1"


def test_that_a_cdn_would_be_found() -> None:
    assert ELSEWHERE.search(b'<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js">')
    assert ELSEWHERE.search(b'<link href="//fonts.example.com/css">')


def test_a_browser_may_load_nothing_else(fake: Server) -> None:
    answer = fake.http.get("/docs")
    policy = answer.headers["content-security-policy"]
    assert policy == page()[1]
    assert policy.startswith("default-src 'none';")
    assert policy.count("'sha256-") == 2
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["content-type"].startswith("text/html")
    # All that runs is in the two hashed elements: no attribute does, which the policy would stop.
    outside = re.sub(r"<(script|style)>.*?</\1>", "", answer.text, flags=re.DOTALL)
    assert not re.search(r"\son\w+=|style=|src=", outside)


def test_the_page_is_there_where_keys_are_needed_and_what_it_shows_is_not() -> None:
    with Runtime(FakeEngine) as runtime, serving(runtime, key="k", api_keys=["k"]) as server:
        with httpx.Client(base_url=server.url) as http:
            assert http.get("/docs").status_code == 200
            assert http.get("/redoc").headers["location"] == "docs"
            assert http.get("/openapi.json").status_code == 401
        assert server.http.get("/openapi.json").status_code == 200


def test_the_page_shows_every_route_and_field(fake: Server, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    described = fake.http.get("/openapi.json").json()
    (tmp_path / "docs.html").write_text(fake.http.get("/docs").text)
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    ran = subprocess.run(
        ["node", SCRIPT, tmp_path / "docs.html", tmp_path / "openapi.json"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["first"] == {"about": "This server asks for a key.", "hidden": False}
    assert told["asked"] == [["openapi.json", None], ["openapi.json", "Bearer right"]]
    assert told["hidden"] is True
    lines = told["text"].splitlines()
    for path, verbs in described["paths"].items():
        for verb, operation in verbs.items():
            assert (verb.upper(), path) in pairwise(lines)
            assert all(parameter["name"] in told["text"] for parameter in operation.get("parameters", ()))
    for name in ("max_completion_tokens", "tool_choice", "previous_response_id", "stop_sequences", "n_predict"):
        assert name in lines, name
    assert "messages *" in lines
