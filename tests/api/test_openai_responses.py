"""POST /v1/responses, through the vendor's own client."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

import templates
from harness import check
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from live import Server, raw, serving, wait_until
from scripted import Scripted

NUMBER = itertools.count()
ITEMS: TypeAdapter[ResponseItem] = TypeAdapter(ResponseItem)
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
UNKEPT = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
"""A schema with a word that no grammar can keep."""
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Applies a patch."}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@dataclass
class Stage:
    """A server and what its model will say."""

    server: Server
    engine: Scripted
    runtime: Runtime

    def create(self, *replies: str, **options: Any) -> Response:
        self.engine.say(*replies)
        extra = {key: options.pop(key) for key in ("cache_salt", "logit_bias") if key in options}
        options = {"model": "fake", "max_output_tokens": 400, "temperature": 0, "extra_body": extra, **options}
        answer: Response = self.server.openai.responses.create(**options)
        if not options.get("stream"):
            Response.model_validate(answer.model_dump(by_alias=True, warnings=False))  # the client itself does not check
        return answer

    def stream(self, *replies: str, **options: Any) -> list[Any]:
        return list(self.create(*replies, stream=True, **options))  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    tokenizer = FakeTokenizer(chat_template=templates.TOOLS)
    engine = Scripted(FakeEngine(slots=2, ctx=8192, block_size=16, batch=512, tokenizer=tokenizer))
    with Runtime(lambda: engine, Settings(memory_budget=32 << 20)) as runtime:
        with serving(runtime, model_id="fake") as server:
            yield Stage(server, engine, runtime)
        check(runtime)


def fresh(text: str = "tell me") -> str:
    return f"{next(NUMBER)}: {text}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def items(response: Response) -> list[Any]:
    """A response's output as a client sends it back."""
    return [item.model_dump(exclude_none=True) for item in response.output]


# ── the answer ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_has_the_vendors_form_and_accounts_for_itself(stage: Stage) -> None:
    answer = stage.create("It rains.", input=fresh(), metadata={"a": "b"}, instructions="Be terse.", user="me")
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.model, answer.status, answer.error) == ("response", "fake", "completed", None)
    assert answer.output_text == "It rains."
    (message,) = answer.output
    assert message.type == "message"
    assert (message.id[:4], message.role, message.status) == ("msg_", "assistant", "completed")
    assert (answer.metadata, answer.instructions, answer.user, answer.store) == ({"a": "b"}, "Be terse.", "me", True)
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens == len("It rains.") + 1
    assert usage.output_tokens_details.reasoning_tokens == 0
    own: Any = answer.model_extra
    assert own["headstart"]["cached"] == usage.input_tokens_details.cached_tokens == own["timings"]["cache_n"]
    assert own["headstart"]["computed"] == usage.input_tokens - usage.input_tokens_details.cached_tokens


def test_what_is_said_renders_as_in_a_chat(stage: Stage) -> None:
    """The same conversation as items and as messages is the same prompt."""
    text = fresh("what is the weather?")
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "brief."}]},
        user(text),
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    call: dict[str, Any] = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    other: dict[str, Any] = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Sum up."},
        {"role": "developer", "content": "Be\nbrief."},
        user(text),
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "I look.",
            "tool_calls": [{**call, "id": "call_1"}, {**other, "id": "call_2"}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
    ]
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    chat = stage.server.post(
        "/v1/chat/completions",
        json={"messages": messages, "tools": [{"type": "function", "function": function}], "max_tokens": 0},
    ).json()
    answer = stage.create("Fine.", instructions="Sum up.", input=given, tools=[WEATHER])
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert answer.usage.input_tokens_details.cached_tokens == answer.usage.input_tokens - 1


def test_input_tokens_are_those_of_the_answer(stage: Stage) -> None:
    text = fresh()
    counted = stage.server.openai.responses.input_tokens.count(model="fake", input=text, instructions="Hm.", tools=[WEATHER])
    answer = stage.create("a", input=text, instructions="Hm.", tools=[WEATHER])
    assert counted.object == "response.input_tokens"
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_reply_that_is_cut_is_incomplete(stage: Stage) -> None:
    answer = stage.create("a long story", input=fresh(), max_output_tokens=6)
    assert (answer.status, answer.output_text) == ("incomplete", "a long")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    *_, end, last = stage.stream("a long story", input=fresh(), max_output_tokens=6)
    assert (end.type, end.item.status) == ("response.output_item.done", "incomplete")
    assert (last.type, last.response.status, last.response.output_text) == ("response.incomplete", "incomplete", "a long")


def test_an_empty_reply_is_a_message_without_text(stage: Stage) -> None:
    answer = stage.create("", input=fresh())
    assert (answer.status, answer.output_text, len(answer.output)) == ("completed", "", 1)


def test_prewarm_fills_the_cache_and_says_nothing(stage: Stage) -> None:
    text = fresh("a prompt that is computed ahead of time")
    warm = stage.create(input=text, prompt_cache_options={"prewarm": True})
    assert (warm.status, warm.output) == ("completed", [])
    assert warm.usage is not None
    assert warm.usage.output_tokens == 0
    answer = stage.create("ok", input=text)
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == answer.usage.input_tokens - 1


def test_log_probabilities_are_those_of_the_text(stage: Stage) -> None:
    thinking = "<think>\nhm\n</think>\n\nyes"
    answer = stage.create(thinking, input=fresh(), include=["message.output_text.logprobs"], top_logprobs=2)
    part = answer.output[-1].content[0]  # type: ignore[union-attr,index]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(item.token for item in part.logprobs).endswith("yes")
    assert all(len(item.top_logprobs) == 2 and item.bytes == list(item.token.encode()) for item in part.logprobs)
    told = [event for event in stage.stream("yes", input=fresh(), top_logprobs=0) if event.type.endswith("text.delta")]
    assert [item.token for event in told for item in event.logprobs] == ["y", "e", "s"]
    plain = stage.create("yes", input=fresh())
    assert plain.output[0].content[0].logprobs == []  # type: ignore[union-attr,index]


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────

MESSAGE = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING = [kind.replace("output_text", "reasoning_text") for kind in MESSAGE]
SUMMARY = [
    "response.output_item.added",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done",
    "response.output_item.done",
]
FUNCTION = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]
CUSTOM = [
    "response.output_item.added",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.output_item.done",
]


def kinds(events: list[Any]) -> list[str]:
    """Types in their order, equal neighbours once."""
    return [kind for kind, _ in itertools.groupby(event.type for event in events)]


def test_events_come_in_the_vendors_order_and_form(stage: Stage) -> None:
    reply = f"<think>\nI look.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
    body = {"model": "fake", "input": fresh(), "tools": [WEATHER], "stream": True, "max_output_tokens": 400}
    stage.engine.say(reply)
    text = stage.server.post("/v1/responses", json=body).text
    told = []
    for block in text.strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            EVENTS.validate_python(event)
            told.append(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    found = [kind for kind, _ in itertools.groupby(event["type"] for event in told)]
    assert found == [
        "response.created",
        "response.in_progress",
        *REASONING,
        *MESSAGE,
        *FUNCTION,
        *FUNCTION,
        "response.completed",
    ]
    final = told[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [event["item"] for event in told if event["type"] == "response.output_item.done"] == final["output"]
    assert [event["output_index"] for event in told if event["type"] == "response.output_item.added"] == [0, 1, 2, 3]
    deltas = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
    assert deltas == final["output"][1]["content"][0]["text"] == "One moment."
    assert len({item["id"] for item in final["output"]}) == 4
    assert len({item["call_id"] for item in final["output"][2:]}) == 2


def test_a_stream_says_the_same_as_a_whole_answer(stage: Stage) -> None:
    text, reply = fresh(), f"<think>\nI look.\n</think>\n\nWait.\n{CALL}"
    whole = stage.create(reply, input=text, tools=[WEATHER])
    stage.engine.say(reply)
    with stage.server.openai.responses.stream(model="fake", input=text, tools=[WEATHER], max_output_tokens=400) as stream:  # type: ignore[list-item]
        kinds_told = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds_told

    def plain(response: Any) -> Any:
        dumped = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in response.output]
        for item in dumped:
            for part in item.get("content") or []:
                part.pop("parsed", None)
        return dumped

    assert plain(final) == plain(whole)
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.output[-1].parsed_arguments == {"city": "Oslo"}  # type: ignore[union-attr]


def test_a_silent_line_is_kept_alive_by_events(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.api.openai_responses.encode.REPEAT_AFTER", 0.0)
    monkeypatch.setattr(stage.engine.engine, "delay", 0.05)
    told = stage.stream("ok", input=fresh("x" * 3000))
    assert [event.type for event in told].count("response.in_progress") >= 3
    assert [event.sequence_number for event in told] == list(range(len(told)))


def test_the_async_client_streams_too(stage: Stage) -> None:
    async def ask() -> tuple[str, Response]:
        async with AsyncOpenAI(base_url=f"{stage.server.url}/v1", api_key="none", max_retries=0) as client:
            stage.engine.say("drip")
            stream = await client.responses.create(model="fake", input=fresh(), stream=True, max_output_tokens=99)
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            stage.engine.say("drop")
            return text, await client.responses.create(model="fake", input=fresh(), max_output_tokens=99)

    text, whole = asyncio.run(ask())
    assert (text, whole.output_text) == ("drip", "drop")


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_conversation_goes_on_from_an_id(stage: Stage) -> None:
    first = stage.create("Oslo.", input=fresh("a capital, please"), instructions="Answer in one word.")
    second = stage.create("Rome.", input="another one", previous_response_id=first.id, instructions="Answer in one word.")
    assert second.previous_response_id == first.id
    assert first.usage is not None
    assert second.usage is not None
    said = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens > said
    assert second.usage.input_tokens_details.cached_tokens >= said - 1
    by_hand = [user(first_text(stage, first)), *items(first), user("another one")]
    again = stage.server.openai.responses.input_tokens.count(
        model="fake",
        input=by_hand,  # type: ignore[arg-type]
        instructions="Answer in one word.",
    )
    assert again.input_tokens == second.usage.input_tokens
    third = stage.create("Bern.", input="a third", previous_response_id=second.id, instructions="Answer in one word.")
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens + second.usage.output_tokens
    bare = stage.create("Bern.", input="another one", previous_response_id=first.id)
    assert bare.usage is not None
    assert bare.usage.input_tokens < second.usage.input_tokens  # instructions do not carry over


def first_text(stage: Stage, response: Response) -> str:
    (item,) = stage.server.openai.responses.input_items.list(response.id).data
    text = item.content[0].text  # type: ignore[union-attr,index]
    assert isinstance(text, str)
    return text


def test_what_was_stored_is_listed_and_deleted(stage: Stage) -> None:
    client = stage.server.openai
    given = [user(fresh("one")), {"role": "assistant", "content": "two"}, user("three")]
    made = stage.create("four", input=given)
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    ascending = client.responses.input_items.list(made.id, order="asc", limit=2)
    assert [item.content[0].type for item in ascending.data] == ["input_text", "output_text"]  # type: ignore[union-attr,index]
    assert ascending.has_more
    assert [item.id for item in ascending] == [item.id for item in reversed(client.responses.input_items.list(made.id).data)]
    referred = {"type": "item_reference", "id": made.output[0].id}
    answer = stage.create("ok", input=[*given, referred, user("five")])
    by_hand = stage.create("ok", input=[*given, *items(made), user("five")])
    assert answer.usage is not None
    assert by_hand.usage is not None
    assert answer.usage.input_tokens == by_hand.usage.input_tokens
    loop = [
        {"type": "function_call", "call_id": "call_1", "name": "f"},
        {"type": "function_call_output", "call_id": "call_1", "output": "r"},
        {"type": "reasoning", "id": "rs_theirs", "encrypted_content": "x"},
    ]
    for item in client.responses.input_items.list(stage.create("ok", input=[user("?"), *loop]).id).data:
        ITEMS.validate_python(item.model_dump(exclude_none=True))
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)  # type: ignore[operator]
    with pytest.raises(openai.NotFoundError, match="not found") as caught:
        stage.create(input="and?", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        stage.create(input=[referred])


def test_nothing_is_kept_that_is_not_to_be_stored(stage: Stage) -> None:
    made = stage.create("x", input=fresh(), store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        stage.server.openai.responses.retrieve(made.id)


def test_a_salt_has_its_own_store(stage: Stage) -> None:
    made = stage.create("x", input=fresh(), cache_salt="ours")
    client = stage.server.openai
    assert client.responses.retrieve(made.id, extra_query={"cache_salt": "ours"}).id == made.id
    for query in ({}, {"cache_salt": "theirs"}):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id, extra_query=query)
    with pytest.raises(openai.NotFoundError):
        stage.create(input="and?", previous_response_id=made.id, cache_salt="theirs")
    assert stage.create("y", input="and?", previous_response_id=made.id, cache_salt="ours").output_text == "y"


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_is_an_item_and_comes_back_in_it(stage: Stage, summary: Any) -> None:
    """In a tool loop templates keep the reasoning, so whether it came back shows in what is computed."""
    text, reply = fresh(), f"<think>\nI look it up.\n</think>\n\n{CALL}"
    reasoning: dict[str, Any] = {"reasoning": {"effort": "low", "summary": summary}} if summary else {}
    sealed = {"include": ["reasoning.encrypted_content"], "store": False}
    first = stage.create(reply, input=text, tools=[WEATHER], **reasoning, **sealed)
    thought, call = first.output
    assert thought.type == "reasoning"
    assert call.type == "function_call"
    told = thought.summary if summary else thought.content
    assert told is not None
    assert [part.text for part in told] == ["I look it up."]
    assert thought.encrypted_content is not None
    assert "look" not in thought.encrypted_content
    assert base64.b64decode(thought.encrypted_content)
    assert first.usage is not None
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    only_sealed = {"type": "reasoning", "id": thought.id, "summary": [], "encrypted_content": thought.encrypted_content}
    second = stage.create("Rain.", input=[user(text), only_sealed, items(first)[1], result], tools=[WEATHER], **sealed)
    assert second.usage is not None
    said = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= said - 2
    foreign = {**only_sealed, "encrypted_content": base64.b64encode(b"theirs").decode()}
    third = stage.create("Rain.", input=[user(text), foreign, items(first)[1], result], tools=[WEATHER], **sealed)
    assert third.output_text == "Rain."


def test_events_of_a_summary(stage: Stage) -> None:
    told = stage.stream("<think>\nI look.\n</think>\n\nYes.", input=fresh(), reasoning={"summary": "auto"})
    assert kinds(told)[2:-1] == [*SUMMARY, *MESSAGE]


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tool_round_trip_computes_the_result_only(stage: Stage) -> None:
    first = stage.create(CALL, input=fresh("how is Oslo?"), tools=[WEATHER])
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Oslo"}, "completed")
    assert (call.call_id[:5], (call.id or "")[:3]) == ("call_", "fc_")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = stage.create("Rain.", input=[result], previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == "Rain."
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens + first.usage.output_tokens - 2


def test_tools_that_take_a_text(stage: Stage) -> None:
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+é"}}\n</tool_call>'
    text = fresh()
    first = stage.create(call, input=text, tools=[PATCH])
    (made,) = first.output
    assert made.type == "custom_tool_call"
    assert (made.name, made.input, (made.id or "")[:4]) == ("patch", "*** Begin\n+é", "ctc_")
    told = stage.stream(call, input=text, tools=[PATCH])
    assert kinds(told)[2:-1] == CUSTOM
    result: Any = {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "done"}
    second = stage.create("Done.", input=[user(text), *items(first), result], tools=[PATCH])
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens + first.usage.output_tokens - 2


def test_tools_in_a_namespace_are_called_by_both_names(stage: Stage) -> None:
    tools: Any = [{"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER]}]
    call = CALL.replace('"weather"', '"mcp__sky.weather"')
    first = stage.create(call, input=fresh(), tools=tools)
    (made,) = first.output
    assert made.type == "function_call"
    assert (made.namespace, made.name) == ("mcp__sky", "weather")
    result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "rain"}
    second = stage.create("Rain.", input=[result], previous_response_id=first.id, tools=tools)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens + first.usage.output_tokens - 2


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


def test_a_tool_that_is_not_allowed_stays_in_the_prompt(stage: Stage) -> None:
    text, other = fresh(), {**WEATHER, "name": "tides"}
    both = stage.create(CALL, input=text, tools=[WEATHER, other])
    some = stage.create(CALL, input=text, tools=[WEATHER, other], tool_choice=allowed("weather", mode="required"))
    assert both.usage is not None
    assert some.usage is not None
    assert some.usage.input_tokens == both.usage.input_tokens == some.usage.input_tokens_details.cached_tokens + 1
    assert some.output[0].type == "function_call"


def test_only_allowed_tools_are_called_where_a_call_is_required(stage: Stage) -> None:
    """The model says what it likes, and so calls what it may."""
    parameters = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "name": name, "parameters": parameters, "strict": True} for name in ("a", "b", "c")]
    called = set()
    for _ in range(16):
        choice = allowed("a", "c", mode="required")
        answer = stage.create(input=fresh(), tools=tools, tool_choice=choice, parallel_tool_calls=False)
        if answer.status == "completed":  # it may think for ever
            (call,) = [item for item in answer.output if item.type == "function_call"]
            assert set(json.loads(call.arguments)) == {"ok"}
            called.add(call.name)
    assert called
    assert called <= {"a", "c"}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "input_image", "image_url": "data:", "detail": "auto"}, "image"),
        ({"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="}, "file"),
        ({"type": "input_audio", "data": ""}, "audio"),
    ],
)
def test_a_result_says_what_of_it_is_left_out(stage: Stage, part: Any, kind: str) -> None:
    text = fresh()
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    counts = [
        stage.server.openai.responses.input_tokens.count(
            model="fake", input=[user(text), call, {"type": "function_call_output", "call_id": "c", "output": output}]
        ).input_tokens
        for output in ([part], f"[{kind} left out: this server reads text only]")
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", ["mcp_call", "mcp_list_tools", "computer_call", "computer_call_output", "web_search_call"])
def test_what_other_servers_did_is_passed_over(stage: Stage, kind: str) -> None:
    text = fresh()
    record: Any = {"type": kind, "id": "x_1", "call_id": "c", "server_label": "s", "name": "n", "arguments": "{}", "output": {}}
    counts = [
        stage.server.openai.responses.input_tokens.count(model="fake", input=[*before, user(text)]).input_tokens
        for before in ([], [record])
    ]
    assert counts[0] == counts[1]


def test_tools_of_other_servers_are_named_and_never_called(stage: Stage) -> None:
    """An agent sends them always: to refuse them would be to refuse the agent."""
    tools: Any = [WEATHER, {"type": "web_search", "search_context_size": "low"}, {"type": "local_shell"}]
    text = fresh()
    answer = stage.create("ok", input=text, tools=tools)
    alone = stage.create("ok", input=text, tools=[WEATHER])
    assert answer.usage is not None
    assert alone.usage is not None
    assert answer.usage.input_tokens == alone.usage.input_tokens
    assert [tool.type for tool in answer.tools] == ["function", "web_search", "local_shell"]
    own: Any = answer.model_extra
    assert own["headstart"]["ignored_tools"] == ["web_search", "local_shell"]
    search: Any = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
    assert stage.create("ok", input=[user(text), search]).output_text == "ok"


def test_an_agents_loop_as_codex_sends_it(stage: Stage) -> None:
    """Stateless, streamed, ids left out, its own fields beside the vendor's: each request pays for what is new."""
    head = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only. " * 20}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>2026</environment>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": fresh("how is Oslo?")}]},
    ]
    body = {
        "model": "fake",
        "instructions": "You are an agent. " * 40,
        "tools": [{**WEATHER, "strict": False}, {"type": "web_search", "external_web_access": True}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "prompt_cache_key": "019a-thread",
        "client_metadata": {"session": "x"},
        "store": False,
        "stream": True,
        "max_output_tokens": 400,
    }

    def turn(items: list[dict[str, Any]], reply: str) -> dict[str, Any]:
        stage.engine.say(reply)
        text = stage.server.post("/v1/responses", json={**body, "input": items}).text
        told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert told[-1]["type"] == "response.completed", told[-1]
        done: dict[str, Any] = told[-1]["response"]
        done["items"] = [event["item"] for event in told if event["type"] == "response.output_item.done"]
        return done

    def returned(item: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in item.items() if key not in ("id", "status")}
        return {**kept, "content": None} if item["type"] == "reasoning" else kept

    first = turn(head, f"<think>\nI look it up.\n</think>\n\n{CALL}")
    result = {"type": "function_call_output", "call_id": first["items"][-1]["call_id"], "output": "Chunk 7: rain"}
    items = [*head, *map(returned, first["items"]), result]
    second = turn(items, "It rains.")
    said = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= said - 2
    wait_until(lambda: stage.server.idle() and stage.runtime.scheduler.idle)
    follow = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And tomorrow?"}]}
    third = turn([*items, *map(returned, second["items"]), follow], "Sun.")
    new = len("<|im_end|>") + len("And tomorrow?") + 40
    assert third["headstart"]["computed"] <= new + stage.engine.traits.block_size
    other = turn([*head[:2], {**head[2], "content": fresh("another session")}], "Yes.")
    shared = len("You are an agent. ") * 40 + len("Sandbox: read-only. ") * 20
    assert other["usage"]["input_tokens_details"]["cached_tokens"] >= shared


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class City(BaseModel):
    name: str
    people: int


def test_a_schema_is_parsed_by_the_client(stage: Stage) -> None:
    stage.engine.say('{"name": "Oslo", "people": 5}')
    parsed = stage.server.openai.responses.parse(model="fake", input=fresh(), text_format=City, max_output_tokens=400)
    assert parsed.output_parsed == City(name="Oslo", people=5)
    assert parsed.text is not None
    assert parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept_to(stage: Stage, stream: bool) -> None:
    """The model says what it likes; what it likes is no JSON."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    options: dict[str, Any] = {"input": fresh(), "text": text, "logit_bias": {str(ord("<")): -100}}  # it does not think
    answer = stage.stream(**options)[-1].response if stream else stage.create(**options)
    assert set(json.loads(answer.output_text)) == {"ok"}


def test_a_schema_that_need_not_be_kept_strictly_is_kept_as_far_as_can_be(stage: Stage) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": UNKEPT}}
    assert stage.create("[1, 1]", input=fresh(), text=text).status == "completed"


@pytest.mark.parametrize(("effort", "told"), [("high", "high"), ("silly", None)])
def test_an_effort_is_told_as_far_as_it_is_known(stage: Stage, effort: Any, told: str | None) -> None:
    reasoning = stage.create("ok", input=fresh(), reasoning={"effort": effort}).reasoning
    assert reasoning is not None
    assert reasoning.effort == told


# ── diagnostics, errors ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_comparison_is_answered_where_it_is_asked_for(stage: Stage) -> None:
    first = stage.create("a", input=fresh(), store=False)
    assert first.prompt_cache_diagnostics is None
    for id, expected in ((first.id, {"cache_hit", "cache_miss", "unavailable"}), ("resp_x", {"comparison_response_not_found"})):
        answer = stage.create("b", input=fresh(), prompt_cache_options={"comparison_response_id": id})
        assert answer.prompt_cache_diagnostics is not None
        assert answer.prompt_cache_diagnostics.type in expected


def test_a_comparison_is_made_with_the_response_that_is_named(stage: Stage) -> None:
    """Not with the nearest, from which all is taken."""
    asked = fresh()
    first, second = (stage.create("a", input=asked, instructions=f"{name} is who you are. " * 5) for name in ("Ada", "Bob"))
    for named, kind in ((first.id, "cache_miss"), (second.id, "cache_hit")):
        options: dict[str, Any] = {"prompt_cache_options": {"comparison_response_id": named}}
        answer = stage.create("b", input=asked, instructions="Bob is who you are. " * 5, **options)
        assert answer.prompt_cache_diagnostics is not None
        assert answer.prompt_cache_diagnostics.type == kind


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "nope"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("nope")}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": UNKEPT, "strict": True}}}, "text.format"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(stage: Stage, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stage.create(**{"input": fresh(), **options})
    assert caught.value.param == param, caught.value


def test_errors_are_the_clients_exceptions(stage: Stage) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        stage.create(input="x", model="nope")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        stage.create(input="x" * 9000, stream=True)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError, match="ask the model for a summary"):
        stage.server.openai.responses.compact(model="fake", input="x")
    made = stage.create("x", input=fresh())
    with pytest.raises(openai.BadRequestError):
        list(stage.server.openai.responses.retrieve(made.id, stream=True))


def test_a_stream_that_fails_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.engine.engine, "delay", 0.01)
    text = fresh()
    told = []
    for event in stage.create("a story that breaks off, " * 40, input=text, stream=True):  # type: ignore[union-attr]
        told.append(event)
        if len(told) == 5:
            stage.engine.fail_next("decode")
    assert told[-1].type == "response.failed"  # type: ignore[union-attr]
    assert told[-1].response.error.code == "server_error"  # type: ignore[union-attr]
    assert stage.create("fine", input=text).output_text == "fine"


def test_a_caller_that_hangs_up_is_cancelled(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.engine.engine, "delay", 0.01)
    body = {"input": fresh(), "stream": True, "max_output_tokens": 2000, "ignore_eos": True}
    with raw(stage.server, "/v1/responses", body) as line:
        assert line.recv(64).startswith(b"HTTP/1.1 200")
        assert not stage.server.idle()
    wait_until(stage.server.idle)


def test_a_broken_call_is_an_incomplete_item(stage: Stage) -> None:
    for arguments in ('{"city": nope}\n</tool_call>', '{"city": "Os'):
        answer = stage.create(
            CALL.partition("{")[0] + '{"name": "weather", "arguments": ' + arguments, input=fresh(), tools=[WEATHER]
        )
        (call,) = answer.output
        assert (answer.status, call.type, call.status) == ("completed", "function_call", "incomplete")
