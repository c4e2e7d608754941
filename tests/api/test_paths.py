"""Paths as people and clients write them: they work, or the answer says what is meant; keys are checked on what is routed."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from urllib.parse import unquote

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.api.app import create_app
from headstart.api.auth import Keys
from headstart.api.middleware import OF_ALL, OPEN
from headstart.api.paths import canonical, hint
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving

MEANT = {
    "/": "/",
    "//": "/",
    "": "/",
    "/v1/models": "/v1/models",
    "/v1/models/": "/v1/models",
    "//v1/models": "/v1/models",
    "/v1//chat///completions/": "/v1/chat/completions",
    "/v1/v1/messages": "/v1/messages",
    "/v1/v1/v1/chat/completions": "/v1/chat/completions",
    "/chat/completions": "/v1/chat/completions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/models": "/v1/models",
    "/models/demo": "/v1/models/demo",
    "/responses": "/v1/responses",
    "/responses/resp_1/input_items": "/v1/responses/resp_1/input_items",
    "/messages": "/v1/messages",
    "/messages/count_tokens/": "/v1/messages/count_tokens",
    "/health/": "/health",
    "//slots//0": "/slots/0",
    "/completions": "/completions",
    "/v1/completions": "/v1/completions",
    "/v1/models//home/me/x.gguf": "/v1/models//home/me/x.gguf",
    "//v1//models/a//b/": "/v1/models/a//b",
    "/models2": "/models2",
    "/messagesx": "/messagesx",
    "/v1x/models": "/v1x/models",
    "/V1/models": "/V1/models",
    "/v1/../slots": "/v1/../slots",
    "/api/event_logging/batch": "/api/event_logging/batch",
}


@pytest.mark.parametrize(("path", "meant"), MEANT.items())
def test_what_a_path_means(path: str, meant: str) -> None:
    assert canonical(path) == meant


@given(st.text("/v1modelsltchap.\n%", max_size=24).map("/".__add__))
def test_a_path_means_one_thing(path: str) -> None:
    once = canonical(path)
    assert canonical(once) == once
    assert once.startswith("/")
    if not once.startswith("/v1/models/"):
        assert "//" not in once
        assert once == "/" or not once.endswith("/")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/embeddings", "no embeddings"),
        ("/embeddings", "no embeddings"),
        ("/v1/rerank", "does not rerank"),
        ("/v1/audio/speech", "text only"),
        ("/v1/prop", "Did you mean /props?"),
        ("/v1/props", "Did you mean /props?"),
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/V1/Chat/Completions", "Did you mean /v1/chat/completions?"),
        ("/openai/v1/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/v1/chat/completions/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/wp-login.php", "The base URL ends in /v1 for OpenAI's clients, and has no path for Anthropic's"),
    ],
)
def test_what_is_no_route_is_told_what_is(fake: Server, path: str, said: str) -> None:
    answer = fake.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_route"
    assert said in answer.json()["error"]["message"]
    assert len(fake.http.get("/" + "x" * 5000).json()["error"]["message"]) < 500


def test_a_hint_names_no_route_with_a_blank() -> None:
    assert "{" not in hint("/v1/models/x/y", ["/v1/models/{id}", "/"])


def test_clients_with_another_base_url(fake: Server) -> None:
    for base in ("", "/", "/v1", "/v1/", "//v1", "/v1/v1"):
        with openai.OpenAI(base_url=fake.url + base, api_key="none", max_retries=0) as client:
            chat = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=1)
            assert chat.object == "chat.completion"
            assert [model.id for model in client.models.list()] == ["fake"]
            assert client.models.retrieve("fake-alias").id == "fake"
            assert client.responses.create(model="fake", input="hi", max_output_tokens=1).object == "response"
    for base in ("", "/", "/v1", "/v1/"):
        with anthropic.Anthropic(base_url=fake.url + base, api_key="none", max_retries=0) as claude:
            said = claude.messages.create(model="fake", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
            assert said.type == "message"
            with pytest.raises(anthropic.BadRequestError) as caught:
                claude.messages.create(model="fake", max_tokens=-1, messages=[{"role": "user", "content": "hi"}])
            assert caught.value.body["type"] == "error"  # type: ignore[index, call-overload]


# ── no way around the keys ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Keys `a`, of a tenant, and `chef`, the operator's."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("alice = a\noperator = chef\n")
    path.chmod(0o600)
    keys = Keys((), path)
    with Runtime(FakeEngine, Settings(memory_budget=1 << 20)) as rt, serving(rt, key="chef", api_keys=keys) as server:
        yield server


def routes() -> list[str]:
    with Runtime(FakeEngine, Settings(memory_budget=1 << 20)) as runtime:
        found = sorted({re.sub(r"\{.*?\}", "0", path) for path in (*create_app(runtime).state.paths, "/openapi.json")})
        assert len(found) > 20
        return found


def written(path: str) -> Iterator[str]:
    """A path in ways that may mean the same."""
    yield from (path, f"{path}/", f"/{path}", f"{path}//", f"/v1{path}", f"/v1/v1{path}", f"//v1/{path}", path.upper())
    yield from (path.replace("/", "//"), path.replace("/", "/./"), f"/health/..{path}", f"/docs/..{path}", f"/docs{path}")
    yield from ("/" + path[1:].replace("/", "%2f"), f"/%2f{path[1:]}", f"%2f{path[1:]}", f"{path}%2f", f"{path}%00")
    yield from (path.replace("/v1", ""), f"{path}?x=/health", f"/health%2f..{path}", f"{path}#/health", f"{path}%3f/health")
    yield f"{path};x"


def status(server: Server, verb: str, path: str, key: str) -> int:
    """Of exactly this path: a client would mend it."""
    host, port = server.url.removeprefix("http://").split(":")
    line = http.client.HTTPConnection(host, int(port), timeout=30)
    line.putrequest(verb, path or "/", skip_host=False)
    if key:
        line.putheader("x-api-key", key)
    line.putheader("content-length", "0")
    line.endheaders()
    answer = line.getresponse()
    answer.read()
    line.close()
    return answer.status


def test_no_way_of_writing_a_path_gets_around_the_keys(closed: Server) -> None:
    tried = 0
    for path in routes():
        for spelled in written(path):
            tried += 1
            for verb in ("GET", "POST"):
                found = status(closed, verb, spelled, "")
                plain = canonical(unquote(spelled.partition("?")[0].partition("#")[0]))
                if plain in OPEN:
                    assert found in (200, 308, 400, 405), (verb, spelled)
                else:
                    assert found in (400, 401), (verb, spelled, found)
    assert tried > 300


def test_no_way_of_writing_a_path_makes_an_operator(closed: Server) -> None:
    told = 0
    for path in (*OF_ALL, "/slots/0"):
        for spelled in written(path):
            for verb in ("GET", "POST"):
                found = status(closed, verb, spelled, "a")
                assert found in (400, 403, 404, 405), (verb, spelled, found)
                told += found == 403
    assert told >= 40
    assert httpx.get(f"{closed.url}//metrics/", headers={"x-api-key": "chef"}).status_code == 200
    assert httpx.get(f"{closed.url}//metrics/", headers={"x-api-key": "a"}).status_code == 403
