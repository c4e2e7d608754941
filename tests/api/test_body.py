"""Schema and normalise, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.api.anthropic.schema import MessagesRequest
from headstart.api.body import parse
from headstart.api.llama_server.schema import LlamaRequest
from headstart.api.openai_chat.schema import ChatRequest, CompletionRequest
from headstart.api.openai_responses.schema import ResponsesRequest
from headstart.chat.validation import _path
from headstart.errors import InvalidRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields, "role", "content", "type", "text"])
BODIES = st.recursive(
    JSON | st.sampled_from(["user", "text", "assistant"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=20,
)


def complaint(form: type[ChatRequest] | type[CompletionRequest], data: bytes) -> str:
    """What is wrong with a body; nothing if it is right. Any exception but a refusal is a fault of ours."""
    try:
        parse(form, data)
    except InvalidRequest as error:
        return error.message
    return ""


@given(BODIES)
def test_any_body_is_understood_or_refused_in_one_sentence(body: Any) -> None:
    for form in (ChatRequest, CompletionRequest):
        assert complaint(form, json.dumps(body).encode())[-1:] in ("", ".")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_understood(data: bytes) -> None:
    assert complaint(ChatRequest, data)[-1:] in ("", ".")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n", "seed", "top_k", "top_logprobs"])
def test_a_whole_number_may_have_a_point(name: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, name: 2.0}
    value = getattr(parse(ChatRequest, json.dumps(body).encode()), name)
    assert (value, type(value)) == (2, int)
    assert "integer" in complaint(ChatRequest, json.dumps({**body, name: 2.5}).encode())


def test_other_dialects_take_whole_numbers_with_a_point_too() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert parse(MessagesRequest, json.dumps({"messages": messages, "max_tokens": 2.0}).encode()).max_tokens == 2
    assert parse(ResponsesRequest, b'{"input": "hi", "max_output_tokens": 2.0}').max_output_tokens == 2
    assert parse(LlamaRequest, b'{"prompt": "hi", "n_predict": 2.0}').n_predict == 2


def test_a_place_that_the_value_does_not_have_is_left_out() -> None:
    """The names of union members are in it too, and may be keys elsewhere in the value."""
    assert _path(("input", "list", 3, "text", 1, "type"), {"input": [], "text": ["x"]}, "literal_error") == ("input",)
    assert _path(("text", 3), {"text": []}, "missing") == ("text", 3)
