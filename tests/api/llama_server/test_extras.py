"""What llama-server has beside OpenAI's endpoints, as its callers ask for it."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

import templates
from headstart.api import body as parsing
from headstart.prompt.chat_template import Template
from headstart.prompt.template_caps import capabilities
from headstart.serving.runtime import Runtime
from headstart.templates import of_model
from headstart.testing.fake_engine import STOP, FakeEngine, FakeTokenizer
from live import Server, events, raw, serving, wait_until

NUMBER = itertools.count()
HI = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def fresh(text: str = "once upon a time") -> str:
    return f"{next(NUMBER)}: {text}"


def complete(server: Server, prompt: Any, **options: Any) -> Any:
    response = server.post("/completion", json={"prompt": prompt, "n_predict": 16, **GREEDY, **options})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Server, prompt: Any, **options: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "n_predict": 16, "stream": True, **GREEDY, **options}
    text = server.post("/completion", json=body).text
    assert "[DONE]" not in text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


# ── /completion ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_completion_has_llama_servers_form(fake: Server) -> None:
    prompt = fresh()
    answer = complete(fake, prompt)
    assert (answer["index"], answer["stop"], answer["model"], answer["truncated"]) == (0, True, "fake", False)
    assert (answer["stop_type"], answer["stopping_word"], answer["prompt"]) == ("limit", "", prompt)
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 16 == len(answer["content"])
    assert (answer["tokens_evaluated"], answer["tokens_cached"], answer["tokens"]) == (len(prompt), 0, [])
    assert answer["generation_settings"]["n_predict"] == 16
    again = complete(fake, prompt, id_slot=1)
    assert again["content"] == answer["content"]
    assert again["tokens_cached"] == again["timings"]["cache_n"] == len(prompt) - 1
    assert complete(fake, prompt, cache_prompt=False)["tokens_cached"] == 0
    assert fake.post("/completions", json={"prompt": prompt, "n_predict": 16, **GREEDY}).json()["content"] == answer["content"]


def test_a_stream_ends_with_the_account(fake: Server) -> None:
    prompt = fresh()
    whole = complete(fake, prompt)
    *parts, last = stream(fake, prompt)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert not any(part["stop"] for part in parts)
    assert [part["tokens_predicted"] for part in parts] == sorted(part["tokens_predicted"] for part in parts)
    assert (last["stop"], last["content"], last["stop_type"], last["tokens_predicted"]) == (True, "", "limit", 16)
    assert last["timings"]["cache_n"] == len(prompt) - 1


def test_how_a_completion_ended(fake: Server) -> None:
    prompt = fresh()
    whole = complete(fake, prompt)["content"]
    stop = whole[6:9]
    answer = complete(fake, prompt, stop=[stop])
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (whole[: whole.index(stop)], "word", stop)
    ended = complete(fake, prompt, ignore_eos=False, logit_bias=[[257, 100]])
    assert (ended["content"], ended["stop_type"], ended["tokens_predicted"]) == ("", "eos", 1)
    assert complete(fake, prompt, logit_bias=[[ord(whole[0]), False]])["content"][0] != whole[0]


def test_n_predict_0_fills_the_cache_only(fake: Server) -> None:
    prompt = fresh("a text that is computed ahead of time")
    warm = complete(fake, prompt, n_predict=0)
    assert (warm["content"], warm["tokens_predicted"], warm["tokens_evaluated"]) == ("", 0, len(prompt))
    assert complete(fake, prompt)["tokens_cached"] == len(prompt) - 1
    messages = [{"role": "user", "content": fresh("the same in a chat")}]
    body = {"messages": messages, "n_predict": 0}
    assert fake.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 0
    again = fake.post("/v1/chat/completions", json={**body, "n_predict": 3, "ignore_eos": True, "id_slot": 0}).json()
    assert again["usage"]["completion_tokens"] == 3
    assert again["timings"]["prompt_n"] == 1


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("ab", "ab"), ([97, 98], "ab"), ([97, "b<|im_start|>", 99], "ab<|im_start|>c"), (["ab"], "ab"), ([[97, "b"]], "ab")],
)
def test_prompts_are_texts_and_tokens_in_any_mix(fake: Server, prompt: Any, text: str) -> None:
    answer = complete(fake, prompt)
    assert answer["prompt"] == text
    assert answer["content"] == complete(fake, text)["content"]


def test_only_the_beginning_has_the_token_of_a_beginning() -> None:
    engine = FakeEngine(tokenizer=FakeTokenizer(bos=STOP))
    with Runtime(lambda: engine) as runtime, serving(runtime, model_id="fake") as server:
        for prompt, tokens in ((["b", 97, "c"], 4), ([97, "b"], 2), ("ab", 3)):
            assert complete(server, prompt, n_predict=0)["tokens_evaluated"] == tokens


def test_several_prompts_and_several_replies_are_a_list(fake: Server) -> None:
    one, other = fresh(), fresh()
    answers = complete(fake, [one, [*other.encode()]], n_cmpl=2, temperature=1, seed=4)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["prompt"] for answer in answers] == [one, one, other, other]
    assert len({answer["content"] for answer in answers}) == 4
    told = stream(fake, [one, other])
    assert sorted(part["index"] for part in told if part["stop"]) == [0, 1]


def test_tokens_and_probabilities_are_returned_where_asked_for(fake: Server) -> None:
    prompt = fresh()
    answer = complete(fake, prompt, return_tokens=True, n_probs=3)
    assert bytes(answer["tokens"]).decode() == answer["content"]
    scored = answer["completion_probabilities"]
    assert [item["id"] for item in scored] == answer["tokens"]
    assert all(len(item["top_logprobs"]) == 3 and item["top_logprobs"][0]["id"] == item["id"] for item in scored)
    told = stream(fake, prompt, return_tokens=True)
    assert [token for part in told for token in part["tokens"]] == answer["tokens"]
    assert "completion_probabilities" not in told[0]


def test_progress_and_times_are_told_where_asked_for(fake: Server) -> None:
    prompt = fresh("x" * 900)
    told = stream(fake, prompt, return_progress=True, timings_per_token=True)
    progress = [part["prompt_progress"] for part in told if "prompt_progress" in part]
    assert [state["processed"] for state in progress] == sorted(state["processed"] for state in progress)
    assert progress[-1]["total"] == len(prompt)
    parts = [part for part in told if not part["stop"] and "prompt_progress" not in part]
    assert [part["timings"]["predicted_n"] for part in parts] == list(range(1, 17))
    assert all(part["timings"]["prompt_n"] == len(prompt) for part in parts)
    assert all("timings" not in part for part in stream(fake, prompt)[:-1])


def test_a_chat_tells_times_with_each_token(fake: Server) -> None:
    body = {"messages": [{"role": "user", "content": fresh()}], "stream": True, "max_tokens": 5, **GREEDY}
    with fake.http.stream("POST", "/v1/chat/completions", json={**body, "timings_per_token": True}) as response:
        chunks = list(events(response.iter_lines()))
    assert [chunk["timings"]["predicted_n"] for chunk in chunks[1:]] == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": {"prompt_string": "x"}}, "prompt"),
        ({"prompt": [300_000]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_probs": -1}, "n_probs"),
        ({"grammar": "x", "json_schema": {}}, "grammar"),
        ({"logit_bias": [[1, 2, 3]]}, "logit_bias"),
    ],
)
def test_what_cannot_be_completed_is_refused_by_name(fake: Server, options: dict[str, Any], param: str) -> None:
    response = fake.post("/completion", json={"prompt": fresh(), "n_predict": 4, **options})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param), response.text


# ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def act(server: Server, slot: int | str, action: str) -> httpx.Response:
    return server.post(f"/slots/{slot}", params={"action": action}, json={"filename": "x"})


def test_a_slot_is_erased(fake: Server) -> None:
    wait_until(fake.idle)
    prompt = fresh("held by a slot, and by the memory tier as far as whole blocks go")
    complete(fake, prompt)
    held = [slot["tokens"] for slot in fake.http.get("/slots").json()]
    assert max(held) >= len(prompt)
    for number, tokens in enumerate(held):
        assert act(fake, number, "erase").json() == {"id_slot": number, "n_erased": tokens}
    assert [slot["tokens"] for slot in fake.http.get("/slots").json()] == [0, 0]
    assert complete(fake, prompt)["content"]
    for slot, status in ((2, 400), (-1, 400), ("x", 400)):
        assert act(fake, slot, "erase").status_code == status
    assert act(fake, 0, "nonsense").status_code == 400


@pytest.mark.parametrize("action", ["save", "restore"])
def test_saving_a_slot_is_not_needed(fake: Server, action: str) -> None:
    response = act(fake, 0, action)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (501, 501, "not_supported_error")
    assert "--cache-dir" in error["message"]


def test_no_idle_slot_is_an_error_where_asked_for(fake: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake.runtime is not None
    monkeypatch.setattr(fake.runtime.engine, "delay", 0.01)
    assert fake.http.get("/slots", params={"fail_on_no_slot": 1}).status_code == 200
    body = {"prompt": fresh(), "n": 2, "n_predict": 1500, "stream": True, "ignore_eos": True}
    with raw(fake, "/completion", body):
        wait_until(lambda: fake.http.get("/slots", params={"fail_on_no_slot": 1}).status_code == 503)
        response = fake.http.get("/slots", params={"fail_on_no_slot": 1})
        assert response.json()["error"] == {"code": 503, "message": "no slot available", "type": "unavailable_error"}
        assert fake.http.get("/slots").status_code == 200
        assert act(fake, 0, "erase").status_code == 409
    wait_until(fake.idle)


# ── what a template can do ───────────────────────────────────────────────────────────────────────────────────────────


def test_props_say_what_the_template_can_do(fake: Server) -> None:
    found = fake.http.get("/props").json()["chat_template_caps"]
    assert found["supports_tools"] is found["supports_tool_calls"] is True
    assert found["supports_preserve_reasoning"] is False


@pytest.mark.parametrize(
    ("source", "able"),
    [
        (of_model(None).source, {"string_content", "system_role"}),
        (
            templates.TOOLS,
            {"string_content", "system_role", "tools", "tool_calls", "parallel_tool_calls", "object_arguments"},
        ),
        ("{{ messages[1].content }}{{ raise_exception('no') }}", set()),
        (
            "{% for m in messages %}{{ m.reasoning_content }}"
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
            "{% endfor %}",
            {"string_content", "typed_content", "system_role", "preserve_reasoning"},
        ),
    ],
)
def test_capabilities_are_found_by_rendering(source: str, able: set[str]) -> None:
    found = capabilities(Template(source, {}))
    assert {name.removeprefix("supports_") for name, can in found.items() if can} == able


# ── large bodies ─────────────────────────────────────────────────────────────────────────────────────────────────────


def on_a_loop() -> bool:
    """Whether this thread has an event loop, for which streams wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "a", "with_pieces": True}),
        ("/detokenize", {"tokens": [97]}),
        ("/apply-template", {"messages": HI}),
        ("/headstart/explain", {"a": {"messages": HI}, "b": {"messages": HI}}),
        ("/v1/messages/count_tokens", {"messages": HI}),
    ],
)
def test_no_body_is_parsed_on_the_event_loop(fake: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: Any) -> None:
    loops: list[bool] = []
    plain = parsing.from_json

    def noted(data: bytes, **options: Any) -> Any:
        loops.append(on_a_loop())
        return plain(data, **options)

    monkeypatch.setattr(parsing, "from_json", noted)
    assert fake.post(path, json=body).status_code == 200
    assert loops == [False]


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 10_000])
@pytest.mark.parametrize("with_pieces", [False, True])
def test_a_list_of_any_length_is_written_in_parts_off_the_event_loop(
    fake: Server, monkeypatch: pytest.MonkeyPatch, count: int, with_pieces: bool
) -> None:
    lengths: list[int] = []
    loops: list[bool] = []
    plain = JSONResponse.render

    def noted(self: JSONResponse, content: Any) -> bytes:
        lengths.append(len(content))
        loops.append(on_a_loop())
        return plain(self, content)

    monkeypatch.setattr(JSONResponse, "render", noted)
    answer = fake.post("/tokenize", json={"content": "a" * count, "with_pieces": with_pieces})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"tokens": [{"id": 97, "piece": "a"} if with_pieces else 97] * count}
    assert sum(lengths) == count
    assert not any(loops)
    assert max(lengths, default=0) <= 4096


@pytest.mark.parametrize("path", ["/api/show", "/api/pull"])
def test_a_body_that_only_names_something_is_small(fake: Server, path: str) -> None:
    answer = fake.post(path, json={"model": "fake", "junk": "x" * (64 << 10)})
    assert answer.status_code == 413
    assert "65536 bytes" in answer.json()["error"]
