"""Every error is OpenAI's object, says what is wrong in one sentence, and names the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from headstart.api.errors import ANTHROPIC
from headstart.config import Settings
from headstart.errors import RequestError
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, raw, serving, wait_until

HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}

CHAT: list[tuple[Any, str | None, str]] = [
    (b"{", None, "not valid JSON"),
    (b"", None, "not valid JSON"),
    (b"\xff", None, "not valid JSON"),
    (b"[" * 100_000, None, "not valid JSON"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "not valid JSON"),
    (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', None, "not valid JSON"),
    (b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "temperature", "finite"),
    ([], None, "JSON object"),
    ({}, "messages", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [5]}, "messages[0]", "dictionary"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "needs content"),
    ({"messages": [{"role": "system", "content": None}]}, "messages[0]", "needs content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", "text only"),
    ({"messages": HI, "model": 5}, "model", "string"),
    ({"messages": HI, "max_tokens": True}, "max_tokens", "integer"),
    ({"messages": HI, "max_tokens": "5"}, "max_tokens", "integer"),
    ({"messages": HI, "max_tokens": 1.5}, "max_tokens", "integer"),
    ({"messages": HI, "max_tokens": -2}, "max_tokens", "greater"),
    ({"messages": HI, "temperature": 2.1}, "temperature", "less"),
    ({"messages": HI, "temperature": "hot"}, "temperature", "number"),
    ({"messages": HI, "top_p": 1.1}, "top_p", "less"),
    ({"messages": HI, "n": 0}, "n", "greater"),
    ({"messages": HI, "n": 17}, "n", "less"),
    ({"messages": HI, "seed": 2**70}, "seed", "less"),
    ({"messages": HI, "stream": "yes"}, "stream", "boolean"),
    ({"messages": HI, "stop": ["a"] * 17}, "stop", "at most 16"),
    ({"messages": HI, "stop": [1]}, "stop[0]", "string"),
    ({"messages": HI, "presence_penalty": 3}, "presence_penalty", "less"),
    ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias.x", "pattern"),
    ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias.5", "less"),
    ({"messages": HI, "logit_bias": {"259": 1}}, "logit_bias", "259"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
    ({"messages": HI, "cache_salt": ""}, "cache_salt", "at least 1"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format", "needs a json_schema"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format.type", "'json_object' or 'json_schema'"),
    ({"messages": HI, "grammar": "x", "guided_regex": "y"}, "response_format", "one format only"),
    ({"messages": HI, "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
    ({"messages": HI, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice", "no 'tools'"),
    ({"messages": HI, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no tool 'f'"),
    ({"messages": HI, "tools": {}}, "tools", "list"),
    ({"messages": HI, "tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "'custom' is not supported"),
    ({"messages": HI, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice", "'allowed_tools'"),
    ({"messages": HI, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "'messages'"),
    ({"messages": HI, "chat_template_kwargs": {"strftime_now": 1}}, "chat_template_kwargs", "'strftime_now'"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
        "required",
    ),
]
COMPLETION: list[tuple[Any, str | None, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": 5}, "prompt", "text"),
    ({"prompt": [{}]}, "prompt[0]", "string"),
    ({"prompt": [[1], 5]}, "prompt[1]", "list"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "at least 1"),
    ({"prompt": [[]]}, "prompt[0]", "at least 1"),
    ({"prompt": [1, "a"]}, "prompt[1]", "integer"),
    ({"prompt": [-1]}, "prompt[0]", "greater"),
    ({"prompt": [259]}, "prompt", "[0, 259)"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ({"prompt": "a", "best_of": 2}, "best_of", "equals 'n'"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "less"),
]


def fault(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].count("\n") == 0
    return dict(body["error"])


def show(value: Any) -> str:
    return (value if isinstance(value, bytes) else json.dumps(value).encode())[:50].decode("utf-8", "replace")


def refuses(server: Server, path: str, body: Any, param: str | None, says: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    error = fault(server.post(path, content=data), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(("body", "param", "says"), CHAT, ids=[show(row[0]) for row in CHAT])
def test_a_bad_chat_body_is_refused(fake: Server, body: Any, param: str | None, says: str) -> None:
    refuses(fake, "/v1/chat/completions", body, param, says)


PATHS = {
    "/v1/chat/completions": "openai",
    "/v1/completions": "openai",
    "/v1/responses": "openai",
    "/completion": "openai",
    "/tokenize": "openai",
    "/headstart/explain": "openai",
    "/v1/messages": "anthropic",
    "/v1/messages/count_tokens": "anthropic",
    "/api/chat": "ollama",
    "/api/generate": "ollama",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_body_with_too_many_values_is_refused_in_each_dialects_form(fake: Server, path: str) -> None:
    response = fake.post(path, content=b'{"messages":[%s]}' % b",".join([b"[]"] * 250_001))
    error = response.json()["error"]
    message = error if PATHS[path] == "ollama" else error["message"]
    assert response.status_code == 413
    assert "send fewer" in message
    assert PATHS[path] != "openai" or fault(response, 413)["code"] == "request_too_large"
    assert PATHS[path] != "anthropic" or error["type"] == "request_too_large"


@pytest.mark.parametrize(("body", "param", "says"), COMPLETION, ids=[show(row[0]) for row in COMPLETION])
def test_a_bad_completion_body_is_refused(fake: Server, body: Any, param: str | None, says: str) -> None:
    refuses(fake, "/v1/completions", body, param, says)


def test_an_unknown_model_is_named_beside_the_served_one(fake: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        fake.openai.chat.completions.create(model="llama-9", messages=HI)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "'llama-9'" in str(caught.value)
    assert "'fake'" in str(caught.value)
    assert fault(fake.http.get("/v1/models/llama-9"), 404)["code"] == "model_not_found"
    for name in ("gpt-oss-20b", "gpt-oss:120b", "openai/gpt-4o", "o", "gpt"):  # who asks for these may have another server
        assert fault(fake.http.get(f"/v1/models/{name}"), 404)["code"] == "model_not_found"
    for name in ("gpt-4o-mini", "gpt-5.1-codex", "o3", "o4-mini", "claude-opus-4-8", "chatgpt-4o-latest", "codex-mini"):
        assert fake.http.get(f"/v1/models/{name}").is_success


def test_a_prompt_that_is_too_long_says_both_numbers(fake: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        fake.openai.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 3000}])
    assert caught.value.code == "context_length_exceeded"
    assert "2048" in str(caught.value)
    assert "30" in str(caught.value)
    assert fault(fake.post("/v1/completions", json={"prompt": "x" * 3000}), 400)["param"] == "prompt"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (405, "invalid_request_error"), (500, "api_error"), (502, "api_error")],
)
def test_what_the_server_failed_at_is_no_fault_of_anthropics_clients(status: int, kind: str) -> None:
    error = RequestError("x")
    error.status = status
    assert ANTHROPIC.body(error, "req_1")["error"]["type"] == kind


def test_unknown_routes_and_wrong_methods(fake: Server) -> None:
    assert "GET /v2/chat" in fault(fake.http.get("/v2/chat"), 404)["message"]
    wrong = fake.http.get("/v1/chat/completions")
    assert fault(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


def test_request_ids_are_echoed_where_they_are_sane(fake: Server) -> None:
    assert fake.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = fake.http.get("/health", headers={"x-request-id": "a b" * 100}).headers["x-request-id"]
    assert made.startswith("req_")


@pytest.fixture(scope="module")
def small() -> Any:
    """One slot, one place in the queue, a body of 4 KiB, slow enough to be caught at work."""
    engine = FakeEngine(slots=1, ctx=2048, delay=0.005)
    with Runtime(lambda: engine, Settings(queue=1)) as runtime, serving(runtime, model_id="fake", max_body=4096) as server:
        yield server


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large(small: Server, declared: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 8000}]}).encode()
    error = fault(small.post("/v1/chat/completions", content=body if declared else iter([body[:3000], body[3000:]])), 413)
    assert error["code"] == "request_too_large"
    assert "4096" in error["message"]


def test_a_full_queue_says_when_to_come_back(small: Server) -> None:
    assert small.runtime is not None
    snapshot = small.runtime.snapshot
    body = {"prompt": "long", "max_tokens": 1500, "ignore_eos": True}
    with raw(small, "/v1/completions", body):
        wait_until(lambda: snapshot()["running"] == 1)
        with raw(small, "/v1/completions", body):
            wait_until(lambda: snapshot()["waiting"] == 1)
            refused = small.post("/v1/chat/completions", json={"messages": HI})
            assert fault(refused, 429)["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            with pytest.raises(openai.RateLimitError):
                list(small.openai.chat.completions.create(model="fake", messages=HI, stream=True))  # type: ignore[arg-type]
    wait_until(small.idle)
    assert small.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1}).status_code == 200


def test_an_engine_that_fails_is_a_500_and_the_server_goes_on(small: Server) -> None:
    assert small.runtime is not None
    engine = small.runtime.engine
    assert isinstance(engine, FakeEngine)
    for stream in (False, True):
        engine.fail_next("prefill")
        body = {"prompt": f"fails {stream}", "max_tokens": 2, "stream": stream}
        error = fault(small.post("/v1/completions", json=body), 500)
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert small.post("/v1/completions", json=body).status_code == 200


def test_an_error_inside_a_stream_is_a_data_object(small: Server) -> None:
    assert small.runtime is not None
    engine = small.runtime.engine
    assert isinstance(engine, FakeEngine)
    body = {"model": "fake", "prompt": "ends badly", "max_tokens": 500, "stream": True}
    with small.http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
        lines = response.iter_lines()
        next(lines)
        engine.fail_next("decode")
        *_, last, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
    wait_until(small.idle)
    engine.fail_next("decode")
    with pytest.raises(openai.APIError, match="injected"):
        list(small.openai.completions.create(**body))  # type: ignore[call-overload]


TURN = {"role": "user", "content": "x"}


def called(arguments: str) -> str:
    calls = [{"id": "1", "function": {"name": "f", "arguments": arguments}}]
    return ", ".join(map(json.dumps, (TURN, {"role": "assistant", "tool_calls": calls}, TURN)))


@pytest.mark.parametrize(
    "arguments",
    ['{"x": 1e400}', '{"x": "\\ud83d"}', '{"\\ud83d": 1}', '{"x": ' + "[" * 700 + "]" * 700 + "}", '{"x": %s}' % ("9" * 1000)],
    ids=lambda text: text[:14],
)
def test_arguments_of_calls_are_never_an_error_of_ours(fake: Server, arguments: str) -> None:
    for path in ("/v1/chat/completions", "/apply-template"):
        for text in (arguments, arguments.replace("x", "y")):
            body = f'{{"messages": [{called(text)}], "max_tokens": 2}}'
            assert fake.post(path, content=body.encode()).status_code == 200
    assert fake.http.get("/headstart/explain").status_code == 200


@pytest.mark.parametrize("number", ["1e400", "9" * 4000, "9" * 5000])
def test_numbers_that_nobody_can_write_are_refused(fake: Server, number: str) -> None:
    schema = f'{{"type": "object", "default": {number}}}'
    tools = f'[{{"type": "function", "name": "f", "parameters": {schema}}}]'
    refuses(fake, "/v1/responses", f'{{"input": "x", "tools": {tools}}}'.encode(), None, "out of range")


def test_a_model_that_is_no_name_is_refused_in_a_comparison(fake: Server) -> None:
    pair = {"a": {"messages": HI, "model": []}, "b": {"messages": HI, "model": {}}}
    refuses(fake, "/headstart/explain", pair, "a", "'model'")


FUNCTION = {"name": "ls", "parameters": {"type": "object"}}


@pytest.mark.parametrize("count", ["", "input_tokens"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}] * 2}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}] * 2}),
        ("/v1/messages", {"messages": HI, "max_tokens": 1, "tools": [{"name": "ls", "input_schema": {"type": "object"}}] * 2}),
    ],
)
def test_two_tools_of_one_name_are_refused(fake: Server, path: str, body: Any, count: str) -> None:
    if count:
        path += "/count_tokens" if path == "/v1/messages" else "/input_tokens"
    answer = fake.post(path, json=body)
    assert answer.status_code == 400
    assert "two have the name 'ls'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "x" * 3000}]}),
        ("/v1/responses/input_tokens", {"input": "x" * 3000}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 3000}]}),
    ],
)
def test_what_is_too_long_is_counted(fake: Server, path: str, body: Any) -> None:
    answer = fake.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert 3000 < answer.json()["input_tokens"] < 3100
