from __future__ import annotations

from typing import Any

import pytest

from headstart.api.framing import SSE
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
        (CHAT, {"model": "b"}, {"model": ""}, None, B),
        (CHAT, {}, {"model": ""}, None, A),
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


def test_what_a_body_says_about_its_model_is_known() -> None:
    assert choose(NAMES, "POST", CHAT, {}, {"stream": True}, None).routing.framing is SSE
    assert choose(NAMES, "POST", "/api/chat", {}, {"keep_alive": 3}, None).routing.keep == 3


@pytest.mark.parametrize(
    ("method", "path", "looks"),
    [("GET", "/slots", True), ("GET", "/headstart/events", True), ("POST", "/slots/0", True), ("GET", "/props", False)],
)
def test_monitoring_looks_only(method: str, path: str, looks: bool) -> None:
    assert choose(NAMES, method, path, {}, {}, None).looks is looks
    assert not choose(NAMES, "POST", "/headstart/explain", {}, {"a": {}, "b": {}}, None).looks
