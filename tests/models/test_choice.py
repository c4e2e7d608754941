from __future__ import annotations

import math
from typing import Any

import pytest

from headstart.errors import InvalidRequest, NotFound
from headstart.models.choice import choose
from headstart.models.naming import ModelNames, NamedModel

A, B = NamedModel("a", "a.gguf", 1), NamedModel("b", "b.gguf", 1)
NAMES = ModelNames([A, B])
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "query", "body", "below", "model"),
    [
        (CHAT, {}, {}, None, A),
        (CHAT, {}, {"model": "b"}, None, B),
        (CHAT, {"model": "a"}, {"model": "b"}, None, B),
        (CHAT, {"model": "b"}, {}, None, B),
        (CHAT, {}, {"model": "a"}, B, B),
        (f"/v1/responses/resp_{B.tag}00", {}, {}, None, B),
        (f"/v1/responses/resp_{B.tag}00/input_items", {}, {}, None, B),
        ("/v1/responses", {}, {"previous_response_id": f"resp_{B.tag}00"}, None, B),
        ("/v1/responses", {}, {"previous_response_id": f"resp_{B.tag}00", "model": "a"}, None, A),
    ],
)
def test_path_body_and_query_name_the_model_in_this_order(
    path: str, query: dict[str, str], body: dict[str, Any], below: NamedModel | None, model: NamedModel
) -> None:
    assert choose(NAMES, "POST", path, query, body, below).model is model


def test_a_wrong_model_is_refused() -> None:
    with pytest.raises(NotFound):
        choose(NAMES, "POST", CHAT, {}, {"model": "c"}, None)
    with pytest.raises(InvalidRequest):
        choose(NAMES, "POST", CHAT, {}, {"model": 3}, None)


def test_only_replies_that_stream_get_comments() -> None:
    assert choose(NAMES, "POST", CHAT, {}, {"stream": True}, None).streams
    assert not choose(NAMES, "POST", CHAT, {}, {"stream": False}, None).streams
    assert not choose(NAMES, "POST", "/tokenize", {}, {"stream": True}, None).streams


@pytest.mark.parametrize(
    ("method", "path", "looks"),
    [("GET", "/slots", True), ("GET", "/headstart/events", True), ("POST", "/slots/0", True), ("GET", "/props", False)],
)
def test_monitoring_looks_only(method: str, path: str, looks: bool) -> None:
    assert choose(NAMES, method, path, {}, {}, None).looks is looks
    assert not choose(NAMES, "POST", "/headstart/explain", {}, {"a": {}, "b": {}}, None).looks


@pytest.mark.parametrize(
    ("path", "body", "keep", "unloads"),
    [
        ("/api/chat", {}, None, False),
        ("/api/chat", {"keep_alive": 0}, 0.0, True),
        ("/api/chat", {"keep_alive": 0, "messages": [{"role": "user", "content": "a"}]}, 0.0, False),
        ("/api/generate", {"keep_alive": "0s", "prompt": ""}, 0.0, True),
        ("/api/generate", {"keep_alive": "1h30m"}, 5400.0, False),
        ("/api/generate", {"keep_alive": -1, "prompt": "a"}, math.inf, False),
        ("/api/generate", {"keep_alive": "-1s"}, math.inf, False),
        ("/api/generate", {"keep_alive": "soon"}, None, False),
        (CHAT, {"keep_alive": 0}, None, False),
    ],
)
def test_ollamas_bodies_say_for_how_long_a_model_is_kept(path: str, body: Any, keep: float | None, unloads: bool) -> None:
    chosen = choose(NAMES, "POST", path, {}, body, None)
    assert (chosen.keep, chosen.unloads) == (keep, unloads)
