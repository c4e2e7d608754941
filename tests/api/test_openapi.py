"""schemathesis over the server's own OpenAPI document: the document is true, and nothing is a 5xx."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis

from effort import SLOW
from fuzzing import CHECKS, TRUE, fuzz
from harness import check
from headstart.api.ollama import routes as ollama
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import serving

MISSING = [*ollama.MISSING]
"""Routes that answer 501, and say so in the document."""
EXAMPLES = 1000 if SLOW else 2
ENDLESS = ("GET", "/headstart/events")
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions/input_tokens"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses/compact"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/show"),
    ("POST", "/api/pull"),
    *(("GET", path) for path in ("/api/tags", "/api/ps", "/api/version")),
    ("POST", "/completion"),
    ("POST", "/completions"),
    ("POST", "/slots/{slot}"),
    ("POST", "/apply-template"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/headstart/explain"),
    ("GET", "/headstart/explain"),
    ("GET", "/headstart/explain/{request_id}"),
    ("GET", "/headstart/stats"),
    ("GET", "/headstart/cache"),
    ("GET", "/headstart/cache/{id}"),
    ("DELETE", "/headstart/cache/{id}"),
    ("GET", "/headstart/cache/{id}/text"),
    ("POST", "/headstart/cache/{id}/pin"),
    ("POST", "/headstart/cache/{id}/unpin"),
    ("GET", "/v1/models/{model_id}"),
    *(("GET", path) for path in ("/", "/v1/models", "/health", "/v1/health", "/metrics", "/slots", "/props")),
]


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    """The document of a server whose replies are short: a context of 192 tokens. It may fetch no models."""
    importlib.import_module("huggingface_hub.constants")  # it would keep what it finds when it is imported
    with pytest.MonkeyPatch.context() as patch, Runtime(lambda: FakeEngine(slots=4, ctx=192)) as runtime:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with serving(runtime, model_id="fake") as server:
            yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        check(runtime)


def test_every_route_is_fuzzed(schema: Any) -> None:
    described = {(found.ok().method.upper(), found.ok().path) for found in schema.get_all_operations()}
    assert described == {*ROUTES, *MISSING, ENDLESS}


@pytest.mark.parametrize(
    ("method", "path", "positive"),
    [(method, path, positive) for method, path in ROUTES for positive in (True, False) if positive or method == "POST"],
)
def test_the_document_is_true_and_nothing_is_a_server_error(schema: Any, method: str, path: str, positive: bool) -> None:
    fuzz(schema, method, path, positive=positive, examples=EXAMPLES)


@pytest.mark.parametrize(("method", "path"), MISSING)
def test_what_is_missing_is_a_documented_501(schema: Any, method: str, path: str) -> None:
    case = schema[path][method].Case(path_parameters={"digest": "sha256:0"} if "{" in path else {})
    assert case.call_and_validate(checks=TRUE, timeout=30).status_code == 501


def test_the_stream_of_events_is_what_the_document_says(schema: Any) -> None:
    method, path = ENDLESS
    case = schema[path][method].Case(query={"once": True})
    response = case.call_and_validate(checks=CHECKS, timeout=30)
    assert response.headers["content-type"][0].startswith("text/event-stream")


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 4}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
        ("/v1/messages", {"messages": HI, "max_tokens": 4}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    ],
)
def test_a_stream_is_what_the_document_says(schema: Any, path: str, body: dict[str, Any]) -> None:
    case = schema[path]["POST"].Case(body={**body, "stream": True}, media_type="application/json")
    response = case.call_and_validate(checks=CHECKS, timeout=30)
    assert response.headers["content-type"][0].startswith("text/event-stream")


@pytest.mark.parametrize(("path", "body"), [("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "hi"})])
def test_a_stream_of_lines_is_what_the_document_says(schema: Any, path: str, body: dict[str, Any]) -> None:
    case = schema[path]["POST"].Case(body={**body, "options": {"num_predict": 4}}, media_type="application/json")
    response = case.call_and_validate(checks=CHECKS, timeout=30)
    assert response.headers["content-type"] == ["application/x-ndjson"]
