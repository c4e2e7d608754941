"""Fields that are passed over are named where they might have changed the answer: in the answer, and once in the log."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from headstart.api.anthropic.schema import MessagesRequest
from headstart.api.body import parse
from headstart.api.ignored import HARMLESS, LONGEST, MOST, NEUTRAL, REMEMBERED, IgnoredLog, ignored
from headstart.api.llama_server.schema import LlamaRequest
from headstart.api.openai_chat.schema import ChatRequest, CompletionRequest
from headstart.api.openai_responses.schema import ResponsesRequest
from live import Server

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/completion": {"prompt": "hi", "n_predict": 2},
}
STRANGE = {
    "dry_multiplier": 0.8,
    "functions": [{"name": "secret-value"}],
    "temprature": 0.1,
    "mirostat": 0,
    "echo2": None,
    "metadata": {"trace": "secret-value"},
    "include_reasoning": True,
}
PASSED_OVER = ["dry_multiplier", "functions", "temprature"]


def told(data: dict[str, Any]) -> Any:
    return data.get("headstart", {}).get("ignored")


@pytest.mark.parametrize("path", CALLS)
def test_every_dialect_names_them(fake: Server, path: str) -> None:
    plain = fake.post(path, json=CALLS[path])
    assert plain.status_code == 200, plain.text
    assert "ignored" not in plain.json()["headstart"]
    answer = fake.post(path, json={**CALLS[path], **STRANGE})
    assert answer.status_code == 200, answer.text
    assert told(answer.json()) == PASSED_OVER
    assert "secret-value" not in json.dumps(answer.json()["headstart"])


@pytest.mark.parametrize("path", CALLS)
def test_so_do_streams(fake: Server, path: str) -> None:
    stream = fake.post(path, json={**CALLS[path], **STRANGE, "stream": True}).text
    frames = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    found = [told(one) or told(one.get("response", {})) for one in frames]
    assert [one for one in found if one] == [PASSED_OVER]


@pytest.mark.parametrize(
    ("form", "body", "names"),
    [
        (ChatRequest, {"messages": HI, "verbosity": "low", "audio": {"a": 1}}, ["verbosity", "audio"]),
        (ChatRequest, {"messages": HI, "verbosity": "medium", "modalities": ["text"]}, []),
        (ChatRequest, {"messages": HI, "modalities": ["text", "audio"]}, ["modalities"]),
        (ChatRequest, {"messages": HI, "enable_thinking": False}, ["enable_thinking"]),
        (ChatRequest, {"messages": HI, "reasoning": {"effort": "low"}}, ["reasoning"]),
        (ChatRequest, {"messages": HI, "n": 3, "stream_options": {"include_usage": True}, "cache_salt": "x"}, []),
        (CompletionRequest, {"prompt": "a", "echo": False, "min_tokens": 3}, ["min_tokens"]),
        (ResponsesRequest, {"input": "a", "n": 1, "max_tool_calls": 3}, ["max_tool_calls"]),
        (ResponsesRequest, {"input": "a", "n": 3, "max_tokens": 5}, ["n", "max_tokens"]),
        (ResponsesRequest, {"input": "a", "text": {"verbosity": "low"}}, ["text.verbosity"]),
        (ResponsesRequest, {"input": "a", "text": {"verbosity": "medium"}, "client_metadata": {"a": "b"}}, []),
        (MessagesRequest, {"messages": HI, "max_tokens": 1, "mcp_servers": [{"url": "x"}]}, ["mcp_servers"]),
        (MessagesRequest, {"messages": HI, "max_tokens": 1, "mcp_servers": [], "service_tier": "auto", "betas": ["x"]}, []),
        (LlamaRequest, {"prompt": "a", "samplers": ["top_k"], "typical_p": 1.0, "xtc_probability": 0.0}, ["samplers"]),
        (ChatRequest, {"messages": HI, "temprature": 0, "temp": 0.0, "mirostat": 0, "stopp": ""}, ["temprature", "temp"]),
        (MessagesRequest, {"messages": HI, "max_tokens": 1, "seed": 0, "presence_penalty": 0}, ["seed"]),
        (ChatRequest, {"messages": HI, "response_format": {"type": "json_object", "shema": 1}}, ["response_format.shema"]),
        (
            ChatRequest,
            {
                "messages": HI,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strit": 1, "description": "a"}},
            },
            ["response_format.json_schema.strit"],
        ),
        (ChatRequest, {"messages": HI, "structured_outputs": {"regex": "a", "regx": "b"}}, ["structured_outputs.regx"]),
        (ChatRequest, {"messages": HI, "response_format.type": "text"}, ["response_format.type"]),
        (ResponsesRequest, {"input": "a", "reasoning": {"efort": "high", "summary": "auto"}}, ["reasoning.efort"]),
        (ResponsesRequest, {"input": "a", "text": {"formt": {"type": "json_object"}}}, ["text.formt"]),
        (ResponsesRequest, {"input": "a", "prompt_cache_options": {"odd": 1}, "metadata": {"odd": "1"}}, []),
        (
            MessagesRequest,
            {"messages": HI, "max_tokens": 1, "thinking": {"type": "enabled", "budget": 9}, "metadata": {"odd": 1}},
            ["thinking.budget"],
        ),
    ],
)
def test_what_is_passed_over(form: Any, body: dict[str, Any], names: list[str]) -> None:
    assert list(parse(form, json.dumps(body).encode()).ignored) == names


@pytest.mark.parametrize("form", [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, LlamaRequest])
def test_what_is_harmless_or_neutral_is_passed_over_in_silence(form: Any) -> None:
    body = {name: {"x": 1} for name in HARMLESS} | dict(NEUTRAL)
    assert ignored(body, form.known()) == ()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_llama_servers_limit_is_known_where_its_words_are(fake: Server, path: str) -> None:
    body = {name: value for name, value in CALLS[path].items() if name != "max_tokens"}
    answer = fake.post(path, json={**body, "n_predict": 3, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert told(answer) is None


def test_an_answer_says_only_so_much(fake: Server) -> None:
    body = {**CALLS["/v1/chat/completions"], **{f"{number}{'x' * 100}\ud7ff": 1 for number in range(100)}}
    found = told(fake.post("/v1/chat/completions", json=body).json())
    assert len(found) == MOST
    assert all(len(name) == LONGEST for name in found)


# ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_name_is_said_once_in_the_log() -> None:
    with capture_logs() as lines:
        noted = IgnoredLog()
        noted.note(["temprature", "samplers"], ["temperature", "top_p"])
        noted.note(["samplers"], [])
        noted.note(["samplers", "mirostat"], [])
        noted.note((), [])
    assert [line["fields"] for line in lines] == ["temprature (did you mean temperature?), samplers", "mirostat"]


def test_a_field_inside_another_is_said_with_its_likely_name() -> None:
    with capture_logs() as lines:
        IgnoredLog().note(["reasoning.efort", "text.verbosity"], ResponsesRequest.known())
    assert [line["fields"] for line in lines] == ["reasoning.efort (did you mean reasoning.effort?), text.verbosity"]


@pytest.mark.parametrize("name", ["sk-live-0123456789", "sk_live_0123456789abc", "My dear diary", "a\nb", "x" * 41, ""])
def test_what_may_be_a_key_or_a_text_is_not_said(name: str) -> None:
    with capture_logs() as lines:
        IgnoredLog().note([name], [])
    assert [line["fields"] for line in lines] == ["a name that is not a word"]


def test_names_without_end_take_no_memory() -> None:
    noted = IgnoredLog()
    letters = "abcdefghijklmnop"
    names = [f"{one}{two}{three}" for one in letters for two in letters for three in letters]
    with capture_logs() as lines:
        threads = [threading.Thread(target=noted.note, args=(names[start::4], [])) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    said = ", ".join(line["fields"] for line in lines).split(", ")
    assert len(said) == len(set(said)) == REMEMBERED


def test_a_request_says_it_in_the_log(fake: Server) -> None:
    with capture_logs() as lines:
        for _ in range(2):
            fake.post("/v1/chat/completions", json={**CALLS["/v1/chat/completions"], "max_token": 8})
    (line,) = [line for line in lines if "max_token" in str(line.get("fields"))]
    assert line["fields"] == "max_token (did you mean max_tokens?)"
    assert line["log_level"] == "warning"
