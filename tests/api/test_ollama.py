"""Ollama's API through its own Python package: every method whose route is served, streamed or not; refusals; the cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from ollama import AsyncClient, Client, ResponseError

from harness import check
from headstart.api.body import validate
from headstart.api.ollama.conversation import conversation_of
from headstart.api.ollama.schema import OllamaChatRequest
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from live import Server, raw, serving, wait_until
from scripted import Scripted
from templates import TOOLS

CALL = '<tool_call>\n{"name": "ls", "arguments": {"all": true, "path": "/etc"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "date", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nThey greet me.\n</think>\n\n"
HI = [{"role": "user", "content": "hi"}]
BLOCK = 8


def ls(path: str, all: bool = False) -> str:
    """Lists a folder.

    Args:
        path: the folder.
        all: hidden files too.
    """
    return f"{path} {all}"


def date() -> str:
    """Says the date."""
    return ""


def engine_of(server: Server) -> Scripted:
    assert server.runtime is not None
    assert isinstance(server.runtime.engine, Scripted)
    return server.runtime.engine


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two slots of 4,096 tokens; the template knows tools and strips old reasoning."""
    engine = Scripted(FakeEngine(slots=2, ctx=4096, tokenizer=FakeTokenizer(chat_template=TOOLS)))
    with Runtime(lambda: engine, Settings(memory_budget=64 << 20)) as runtime:
        with serving(runtime, model_id="fake", keep_alive=0.2) as served:
            yield served
        check(runtime)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
    assert not engine_of(server).replies, "a reply that was written down was not given"


def settled(server: Server) -> None:
    assert server.runtime is not None
    scheduler = server.runtime.scheduler
    wait_until(lambda: server.idle() and scheduler.idle)
    scheduler._admission.pace.restore = 0.0  # on a busy machine it may seem slower than the fake engine's computing


def post(server: Server, path: str, **body: Any) -> Any:
    """The answer without a stream."""
    response = server.post(path, json={"model": "fake", "stream": False, **body})
    assert response.status_code == 200, response.text
    return response.json()


# ── chats ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat(server: Server, client: Client) -> None:
    engine_of(server).say(THOUGHT + "Hello there.")
    answer = client.chat("fake", HI)
    assert (answer.model, answer.done, answer.done_reason) == ("fake", True, "stop")
    assert (answer.message.role, answer.message.content, answer.message.thinking) == (
        "assistant",
        "Hello there.",
        "They greet me.",
    )
    assert answer.message.tool_calls is None
    assert answer.eval_count == len(THOUGHT + "Hello there.") + 1
    durations = [answer.total_duration, answer.load_duration, answer.prompt_eval_duration, answer.eval_duration]
    assert all(isinstance(value, int) and value > 0 for value in durations)
    assert durations[0] >= durations[2]  # type: ignore[operator]


def test_a_stream_of_a_chat_says_the_same(server: Server, client: Client) -> None:
    reply = THOUGHT + "I look.\n" + CALL + "\n" + OTHER
    engine_of(server).say(reply, reply)
    whole = client.chat("fake", HI, tools=[ls, date])
    *parts, last = client.chat("fake", HI, tools=[ls, date], stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == whole.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("ls", {"all": True, "path": "/etc"}),
        ("date", {}),
    ]
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason, last.message.content) == (True, "stop", "")
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)


def test_a_stream_is_lines_of_json_and_the_default(server: Server) -> None:
    engine_of(server).say("Hi.", "Hi.")
    answer = server.post("/api/chat", json={"model": "FAKE:latest", "messages": HI})
    assert answer.headers["content-type"] == "application/x-ndjson"
    *parts, last = map(json.loads, answer.text.splitlines())
    assert {part["model"] for part in parts} == {"FAKE:latest"}, "the caller's name"
    assert set(parts[0]) == {"model", "created_at", "message", "done"}
    assert last["headstart"]["computed"] + last["headstart"]["cached"] == last["prompt_eval_count"]
    whole = server.post("/api/chat", json={"messages": HI, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert (whole.json()["model"], whole.json()["message"]["content"]) == ("fake:latest", "Hi.")


def test_silence_is_kept_alive_with_blanks(server: Server, client: Client) -> None:
    inner = engine_of(server).engine
    assert isinstance(inner, FakeEngine)
    engine_of(server).say("Hi.")
    inner.delay = 0.12  # more than half of the seconds after which something must be sent
    try:
        with server.http.stream("POST", "/api/chat", json={"messages": HI}) as response:
            data = b"".join(response.iter_raw())
    finally:
        inner.delay = 0.0
    assert b" {" in data
    assert [json.loads(line)["done"] for line in data.splitlines()][-1]


def test_a_call_that_is_held_back_is_no_silence(server: Server, client: Client) -> None:
    """Fault: nothing was sent while a long call was written. Proxies and clients give up after a minute or five."""
    inner = engine_of(server).engine
    assert isinstance(inner, FakeEngine)
    shown = [ollama._utils.convert_function_to_tool(ls).model_dump(exclude_none=True)]
    engine_of(server).say("I look.\n" + CALL.replace("/etc", "x" * 400))
    inner.delay = 0.004  # so a token comes often, and nothing of the call before its end
    try:
        with server.http.stream("POST", "/api/chat", json={"messages": HI, "tools": shown}) as response:
            data = b"".join(response.iter_raw())
    finally:
        inner.delay = 0.0
    (call,) = [line for line in data.splitlines() if b"tool_calls" in line]
    assert call.startswith(b" " * 5)
    assert len(json.loads(call)["message"]["tool_calls"][0]["function"]["arguments"]["path"]) == 400


def test_arguments_in_text_are_read_with_care(server: Server) -> None:
    """Fault: 500 for many levels; and a half of a character in them broke the answer to a later request."""
    for arguments in ("[" * 2000, '{"a":' * 900 + "1" + "}" * 900):
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "ls", "arguments": arguments}}]}
        assert server.post("/api/chat", json={"messages": [*HI, called, *HI]}).status_code == 400
    for arguments in ('{"a": "\\ud800 one"}', '{"a": "\\ud800 two"}'):
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "ls", "arguments": arguments}}]}
        asked = {"messages": [*HI, called, *HI], "stream": False}
        assert server.post("/api/chat", json=asked).status_code == 200
        assert server.http.get("/headstart/explain").status_code == 200


def test_the_next_turn_computes_its_own_message_only(server: Server, client: Client) -> None:
    engine_of(server).say(THOUGHT + "Fine. " * 30, "Good.")
    asked: list[Any] = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "How are you?"}]
    first = client.chat("fake", asked)
    settled(server)
    answer = post(server, "/api/chat", messages=[*asked, first.message.model_dump(exclude_none=True), *HI])
    assert answer["prompt_eval_count"] > 400, "with what is cached"
    assert answer["headstart"]["computed"] <= len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n") + BLOCK
    assert answer["headstart"]["cause"] is None


@pytest.mark.parametrize("named", ["name", "nothing", "id"])
@pytest.mark.parametrize("thinks", [True, False], ids=["with reasoning", "without reasoning"])
def test_results_belong_to_calls_without_ids(server: Server, client: Client, named: str, thinks: bool) -> None:
    """Reasoning that a client leaves out comes back by the id that such a call gets."""
    engine_of(server).say(THOUGHT + "I look.\n" + CALL + "\n" + OTHER, "Two files.")
    asked: list[Any] = [{"role": "user", "content": f"What is in /etc, {named}? " * 20}]
    tools = [ollama._utils.convert_function_to_tool(tool).model_dump(exclude_none=True) for tool in (ls, date)]
    first = post(server, "/api/chat", messages=asked, tools=tools)
    settled(server)
    message = first["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    if named != "id":
        message["tool_calls"] = [{"function": call["function"]} for call in message["tool_calls"]]
    if not thinks:
        del message["thinking"]
    results = [{"role": "tool", "content": "hosts"}, {"role": "tool", "content": "Monday"}]
    for result, name, id in zip(results, ("ls", "date"), ids, strict=True):
        result.update({"tool_name": name} if named == "name" else {"tool_call_id": id} if named == "id" else {})
    answer = post(server, "/api/chat", messages=[*asked, message, *results], tools=tools)
    assert answer["message"]["content"] == "Two files."
    news = "<|im_start|>user\n<tool_response>\nhosts\n</tool_response>\n<tool_response>\nMonday\n</tool_response><|im_end|>\n"
    assert answer["headstart"]["computed"] <= len(news + "<|im_start|>assistant\n") + BLOCK
    assert answer["headstart"]["cause"] is None


def test_formats(fake: Server) -> None:
    client = Client(fake.url)
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    assert json.loads(client.chat("fake", HI, format=schema).message.content or "") == {"n": 7}
    assert json.loads(client.generate("fake", "hi", format=schema, raw=True).response) == {"n": 7}
    short = {"temperature": 0, "num_predict": 1}
    assert client.chat("fake", HI, format="json", options=short).message.content == "{"
    client.close()


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"reasoning_effort": "high", "enable_thinking": True}),
    ],
)
def test_thinking_is_a_variable_of_the_template(think: Any, variables: dict[str, Any]) -> None:
    body = validate(OllamaChatRequest, {"messages": HI, "think": think})
    assert conversation_of(body).template_kwargs == variables


def test_options(server: Server, client: Client) -> None:
    engine_of(server).say("One, two, three.")
    answer = client.chat("fake", HI, options={"stop": [", t"], "num_ctx": 2048})
    assert (answer.message.content, answer.done_reason) == ("One", "stop")
    answer = client.chat("fake", HI, options=ollama.Options(num_predict=5, seed=3, temperature=1.5, top_k=9, repeat_last_n=4))
    assert (answer.eval_count, answer.done_reason) == (5, "length")
    again = client.chat("fake", HI, options={"num_predict": 5.0, "seed": 3, "temperature": 1.5, "top_k": 9, "repeat_last_n": 4})
    assert again.message == answer.message, "a seed"
    body = {"messages": HI, "options": {"num_predict": 1, "num_ctx": 99, "mirostat": 2, "temprature": 0}, "keep_alive": -1}
    assert post(server, "/api/chat", **body)["headstart"]["ignored"] == ["options.mirostat", "options.temprature"]


def test_log_probabilities(server: Server, client: Client) -> None:
    engine_of(server).say("Hi.", "Hi.")
    (whole,) = [client.chat("fake", HI, logprobs=True, top_logprobs=2)]
    streamed = [item for part in client.chat("fake", HI, logprobs=True, stream=True) for item in part.logprobs or ()]
    assert "".join(item.token for item in whole.logprobs or ()).startswith("Hi.")
    assert {len(item.top_logprobs or ()) for item in whole.logprobs or ()} == {2}
    assert [item.token for item in streamed] == [item.token for item in whole.logprobs or ()]


def test_a_reply_that_was_begun_goes_on(server: Server, client: Client) -> None:
    engine_of(server).say(" is Paris.")
    answer = client.chat("fake", [*HI, {"role": "assistant", "content": "The capital"}])
    assert answer.message.content == " is Paris."


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt(server: Server, client: Client) -> None:
    engine_of(server).say(THOUGHT + "Hello.", THOUGHT + "Hello.", "Chat.")
    whole = client.generate("fake", "hi", system="Be brief.")
    assert (whole.response, whole.thinking, whole.done_reason) == ("Hello.", "They greet me.", "stop")
    *parts, last = client.generate("fake", "hi", system="Be brief.", stream=True)
    assert ("".join(part.response or "" for part in parts), last.response) == (whole.response, "")
    assert "".join(part.thinking or "" for part in parts) == whole.thinking
    chat = client.chat("fake", [{"role": "system", "content": "Be brief."}, *HI])
    assert chat.prompt_eval_count == whole.prompt_eval_count == last.prompt_eval_count


def test_a_raw_prompt_is_all_that_the_model_reads(server: Server, client: Client) -> None:
    engine_of(server).say("<think> upon", "<think> upon")
    whole = client.generate("fake", "Once", raw=True)
    assert (whole.response, whole.thinking, whole.prompt_eval_count) == ("<think> upon", None, 4)
    assert "".join(part.response or "" for part in client.generate("fake", "Once", raw=True, stream=True)) == "<think> upon"


@pytest.mark.parametrize(
    ("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload"), ("0", "unload")]
)
def test_a_body_without_anything_to_answer(server: Server, client: Client, keep_alive: Any, reason: str) -> None:
    answer = client.generate("fake", keep_alive=keep_alive)
    assert (answer.response, answer.done, answer.done_reason) == ("", True, reason)
    chat = client.chat("fake", keep_alive=keep_alive)
    assert (chat.message.role, chat.message.content, chat.done_reason) == ("assistant", "", reason)
    assert [part.done_reason for part in client.generate("fake", keep_alive=keep_alive, stream=True)] == [reason]
    assert server.idle()


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/chat", {"messages": [{**HI[0], "images": ["aGk="]}]}, "reads text only"),
        ("/api/generate", {"prompt": "hi", "images": ["aGk="]}, "reads text only"),
        ("/api/generate", {"prompt": "hi", "context": [1, 2]}, "Send the messages to /api/chat"),
        ("/api/generate", {"prompt": "hi", "suffix": "end"}, "does not fill in"),
        ("/api/generate", {"prompt": "hi", "template": "{{ .Prompt }}"}, "--chat-template"),
        ("/api/generate", {"prompt": "hi", "raw": True, "system": "x"}, "'system'"),
        ("/api/generate", {"prompt": "hi", "keep_alive": "soon"}, "a duration like '5m'"),
        ("/api/chat", {"messages": HI, "options": {"num_predict": "many"}}, "options.num_predict"),
        ("/api/chat", {"messages": HI, "options": {"num_predict": 9000}, "format": "xml"}, "format"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x" * 5000}]}, "context holds 4096 tokens"),
    ],
)
def test_refusals_are_in_words(server: Server, path: str, body: dict[str, Any], said: str) -> None:
    response = server.post(path, json=body)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert said in response.json()["error"]


def test_a_tools_image_becomes_a_line(server: Server, client: Client) -> None:
    engine_of(server).say("Nothing.")
    calls = [{"function": {"name": "look", "arguments": {}}}]
    result = {"role": "tool", "tool_name": "look", "content": "", "images": ["aGk="]}
    assert client.chat("fake", [*HI, {"role": "assistant", "tool_calls": calls}, result]).message.content == "Nothing."


def test_an_unknown_model(server: Server, client: Client) -> None:
    for refuse in (lambda: client.chat("llama3", HI), lambda: client.show("llama3")):
        with pytest.raises(ResponseError, match="'llama3' is not served here") as error:
            refuse()  # type: ignore[no-untyped-call]
        assert error.value.status_code == 404


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.embed("fake", "hi"),
        lambda client: client.embeddings("fake", "hi"),
        lambda client: client.create("other", from_="fake"),
        lambda client: client.copy("fake", "other"),
        lambda client: client.delete("fake"),
        lambda client: client.push("fake"),
    ],
    ids=["embed", "embeddings", "create", "copy", "delete", "push"],
)
def test_what_this_server_does_not_do(client: Client, call: Any) -> None:
    with pytest.raises(ResponseError, match="This server") as error:
        call(client)
    assert error.value.status_code == 501


def test_a_stream_that_is_left_frees_its_slot(server: Server) -> None:
    inner = engine_of(server).engine
    assert isinstance(inner, FakeEngine)
    engine_of(server).say("All of it. " * 100)
    inner.delay = 0.01
    try:
        with raw(server, "/api/chat", {"messages": HI}) as line:
            assert line.recv(1) == b"H"
            wait_until(lambda: not server.idle() and not engine_of(server).replies)  # the reply has begun
        wait_until(server.idle)
    finally:
        inner.delay = 0.0


def test_an_error_inside_a_stream_is_its_last_line(server: Server, client: Client) -> None:
    inner = engine_of(server).engine
    assert isinstance(inner, FakeEngine)
    engine_of(server).say("Some words.")
    stream = client.chat("fake", HI, stream=True)
    next(part for part in stream if part.message.content)  # the reply has begun
    inner.fail_next("decode")
    with pytest.raises(ResponseError, match="The engine failed"):
        list(stream)


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lists_of_models(server: Server, client: Client) -> None:
    (listed,), (running,) = client.list().models, client.ps().models
    assert listed.model == running.model == running.name == "fake:latest"
    assert listed.digest == running.digest == engine_of(server).fingerprint.hex()
    assert (running.context_length, running.size_vram) == (4096, 0)
    assert running.expires_at is not None
    assert running.expires_at.year > 2200
    assert listed.details is not None
    assert listed.details.format == "gguf"
    for name in ("fake", "fake:latest"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.template == TOOLS
        assert "num_ctx 4096" in (shown.parameters or "")
        assert (shown.modelinfo or {})["general.basename"] == "fake"
    assert tuple(map(int, server.http.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)
    for path in ("/api/version", "/api/tags"):
        assert server.http.head(path).status_code == 200


def test_an_asynchronous_client(server: Server) -> None:
    async def converse() -> list[Any]:
        async with AsyncClient(server.url) as client:
            chat = await client.chat("fake", HI)
            streamed = [part.message.content async for part in await client.chat("fake", HI, stream=True)]
            prompt = await client.generate("fake", "hi")
            parts = [part.response async for part in await client.generate("fake", "hi", stream=True)]
            assert (await client.list()).models[0].model == (await client.ps()).models[0].model
            assert (await client.show("fake")).template == TOOLS
            with pytest.raises(ResponseError, match="no embeddings"):
                await client.embed("fake", "hi")
            return [chat.message.content, "".join(filter(None, streamed)), prompt.response, "".join(filter(None, parts))]

    engine_of(server).say("One.", "Two.", "Three.", "Four.")
    assert asyncio.run(converse()) == ["One.", "Two.", "Three.", "Four."]


def test_keys_and_their_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime(lambda: FakeEngine(slots=2, ctx=1024), Settings(memory_budget=8 << 20)) as runtime:
        with serving(runtime, model_id="fake", key="one", api_keys=("one", "two")) as server:
            with Client(server.url) as nobody, pytest.raises(ResponseError, match="needs an API key") as error:
                nobody.list()
            assert error.value.status_code == 401
            asked = [{"role": "user", "content": "A long question. " * 20}]
            body = {"messages": asked, "options": {"num_predict": 1}}
            first, again = (post(server, "/api/chat", **body)["headstart"] for _ in range(2))
            assert (first["cached"], again["computed"] <= BLOCK) == (0, True)
            monkeypatch.setenv("OLLAMA_API_KEY", "two")
            with Client(server.url) as other:
                answer = other._request_raw("POST", "/api/chat", json={**body, "stream": False}).json()
            assert answer["headstart"]["cached"] == 0
        check(runtime)
