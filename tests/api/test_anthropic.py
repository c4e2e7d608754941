"""/v1/messages through the vendor's own SDK: every block and event, usage that adds up, errors as its classes, the cache."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic

from harness import check
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from live import Server, raw, serving, wait_until
from scripted import Scripted
from templates import TOOLS

LS = {
    "name": "ls",
    "description": "Lists a folder.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}, "all": {"type": "boolean"}}},
}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"all": true, "path": "/etc"}}\n</tool_call>'
THOUGHT = "<think>\nThey greet me.\n</think>\n\n"
EPHEMERAL = {"type": "ephemeral"}
SYSTEM = "You are a careful assistant of few words. " * 8
HI = [{"role": "user", "content": "hi"}]


def engine_of(server: Server) -> Scripted:
    assert server.runtime is not None
    assert isinstance(server.runtime.engine, Scripted)
    return server.runtime.engine


def client_of(server: Server, **options: Any) -> Anthropic:
    return Anthropic(**{"base_url": server.url, "api_key": "none", "max_retries": 0, "timeout": 60, **options})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two slots of 4,096 tokens; the template knows tools and strips old reasoning."""
    engine = Scripted(FakeEngine(slots=2, ctx=4096, tokenizer=FakeTokenizer(chat_template=TOOLS)))
    with Runtime(lambda: engine, Settings(memory_budget=64 << 20)) as runtime:
        with serving(runtime, model_id="fake") as served:
            yield served
        check(runtime)


@pytest.fixture
def claude(server: Server) -> Iterator[Anthropic]:
    with client_of(server) as client:
        yield client
    assert not engine_of(server).replies, "a reply that was written down was not given"


def ask(claude: Anthropic, messages: list[Any], **options: Any) -> Any:
    return claude.messages.create(**{"model": "fake", "max_tokens": 200, "messages": messages, **options})


def prompt(usage: Any) -> int:
    """Tokens of a prompt: where they came from does not matter."""
    assert usage.cache_creation_input_tokens == sum(
        (usage.cache_creation.ephemeral_5m_input_tokens, usage.cache_creation.ephemeral_1h_input_tokens)
    )
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


def settled(server: Server) -> None:
    assert server.runtime is not None
    scheduler = server.runtime.scheduler
    wait_until(lambda: server.idle() and scheduler.idle)


# ── what is said ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_text(server: Server, claude: Anthropic) -> None:
    engine_of(server).say("Hello there.")
    answer = ask(claude, HI)
    assert (answer.type, answer.role, answer.model, answer.id[:4]) == ("message", "assistant", "fake", "msg_")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello there.", "citations": None}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len("Hello there.") + 1
    assert prompt(answer.usage) == claude.messages.count_tokens(model="fake", messages=HI).input_tokens
    assert answer.headstart["computed"] == prompt(answer.usage) - answer.usage.cache_read_input_tokens
    assert answer.timings["prompt_n"] == answer.headstart["computed"]


def test_a_conversation_goes_on_from_any_call_that_the_server_told(server: Server, claude: Anthropic) -> None:
    engine_of(server).say('<tool_call>\n{"name": "list files", "arguments": {"path": "x"}}\n</tool_call>', "Nothing.")
    with claude.messages.stream(model="fake", max_tokens=200, messages=HI, tools=[LS]) as stream:
        called = [block.to_dict(warnings=False) for block in stream.get_final_message().content]
    assert [(block["name"], block["input"]) for block in called] == [("list files", {"path": "x"})]
    called[0]["input"] = [1]  # as other servers may have told it
    result = {"type": "tool_result", "tool_use_id": called[0]["id"], "content": "no such tool", "is_error": True}
    history = [*HI, {"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
    assert ask(claude, history, tools=[LS]).content[0].text == "Nothing."


def test_the_events_of_a_stream(server: Server, claude: Anthropic) -> None:
    engine_of(server).say(THOUGHT + "I look.\n" + CALL)
    events = list(ask(claude, HI, tools=[LS], stream=True))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2], kinds[-1]) == ("message_start", "message_delta", "message_stop")
    begun = events[0].message
    assert (begun.content, begun.stop_reason, begun.usage.output_tokens) == ([], None, 0)
    opened = [(event.index, event.content_block.type) for event in events if event.type == "content_block_start"]
    assert opened == [(0, "thinking"), (1, "text"), (2, "tool_use")]
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2]
    inside: int | None = None
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert inside is None
            inside = event.index
        assert event.index == inside
        inside = None if event.type == "content_block_stop" else inside
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
    last = events[-2]
    assert last.delta.stop_reason == "tool_use"
    assert prompt(begun.usage) == last.usage.input_tokens + last.usage.cache_read_input_tokens
    assert 0 < last.usage.output_tokens_details.thinking_tokens < last.usage.output_tokens
    assert last.headstart["computed"] == last.timings["prompt_n"]


BROKEN = '<tool_call>\n{"name": "ls", "arguments": %s}\n</tool_call>'


@pytest.mark.parametrize(
    "reply",
    [
        "Hello.",
        THOUGHT + "Hello.",
        CALL,
        THOUGHT + "Hm.\n" + CALL + "\n" + CALL,
        "",
        "Before.\n" + CALL + "\nBehind.",
        BROKEN % '"str"',
        BROKEN % "[1]",
        BROKEN % '{"path": nope}',
        BROKEN % '{"path": "x", "all": nope}',
        (BROKEN % '{"path": "/e')[:-14],
    ],
)
def test_a_stream_says_the_same_as_a_whole_answer(server: Server, claude: Anthropic, reply: str) -> None:
    engine_of(server).say(reply, reply)
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": HI, "tools": [LS]}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()

    def shown(message: Any) -> Any:
        return [
            {key: value for key, value in block.to_dict().items() if key not in ("id", "signature", "parsed_output")}
            for block in message.content
        ]

    assert shown(streamed) == shown(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert streamed.usage.output_tokens_details == whole.usage.output_tokens_details
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert len({block.id for block in calls}) == reply.count("<tool_call>") - reply.count('": "str"') - reply.count("[1]")
    broken = "nope" in reply or reply.endswith("/e")
    assert whole.stop_reason == ("tool_use" if calls and not broken else "end_turn")
    if "Behind" in reply:
        assert [block.type for block in whole.content] == ["text", "tool_use", "text"]
    if broken:
        assert [block.input for block in calls] == [{"path": "x"} if '"x"' in reply else {}]


def test_an_asynchronous_client(server: Server) -> None:
    async def converse() -> tuple[str, str]:
        async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
            whole = await claude.messages.create(model="fake", max_tokens=9, messages=HI)  # type: ignore[arg-type]
            async with claude.messages.stream(model="fake", max_tokens=9, messages=HI) as stream:  # type: ignore[arg-type]
                streamed = "".join([text async for text in stream.text_stream])
            return whole.content[0].text, streamed  # type: ignore[union-attr]

    engine_of(server).say("Good day.", "Good night.")
    assert asyncio.run(converse()) == ("Good day.", "Good nigh")


def test_betas_are_no_hindrance(server: Server, claude: Anthropic) -> None:
    engine_of(server).say("Fine.")
    answer = claude.beta.messages.create(
        model="fake",
        max_tokens=16,
        messages=HI,  # type: ignore[arg-type]
        betas=["context-management-2025-06-27", "from-the-future-2031-01-01"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        extra_body={"from_the_future": {"much": True}, "service_tier": "auto", "metadata": {"user_id": "someone"}},
    )
    assert answer.context_management is not None
    assert answer.context_management.applied_edits == []
    assert answer.content[0].text == "Fine."  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "system", [[{"type": "text", "text": SYSTEM}], [{"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL}], None]
)
def test_a_system_prompt_is_one_whatever_its_form(server: Server, claude: Anthropic, system: Any) -> None:
    engine_of(server).say("Yes.", "Yes.")
    first = ask(claude, HI, system=SYSTEM)
    lead = [{"role": "system", "content": SYSTEM}] if system is None else []
    second = ask(claude, [*lead, *HI], **({"system": system} if system else {}))
    assert prompt(second.usage) == prompt(first.usage)
    assert second.headstart["computed"] <= 8


def test_a_tool_is_called_and_answered(server: Server, claude: Anthropic) -> None:
    engine_of(server).say("I look.\n" + CALL, "Two files.")
    asked = [{"role": "user", "content": "What is in /etc? " * 20}]
    first = ask(claude, asked, tools=[LS])
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "ls", {"path": "/etc", "all": True})
    settled(server)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "hosts passwd"}]}
    blocks = [block.to_dict() for block in first.content]
    blocks[-1]["input"] = {"path": "/etc", "all": True}  # in the schema's order, not in the model's
    second = ask(claude, [*asked, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}], tools=[LS])
    assert second.content[0].text == "Two files."
    assert second.stop_reason == "end_turn"
    new = prompt(second.usage) - prompt(first.usage) - first.usage.output_tokens
    assert second.headstart["computed"] <= 1.02 * new + 64


def test_reasoning_comes_with_a_signature_and_goes_back(server: Server, claude: Anthropic) -> None:
    engine_of(server).say(THOUGHT + "Hello.", "Well.", "Well.")
    first = ask(claude, HI, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048)
    thinking, text = first.content
    assert (thinking.type, thinking.thinking.strip(), text.text) == ("thinking", "They greet me.", "Hello.")
    assert thinking.signature
    assert 0 < first.usage.output_tokens_details.thinking_tokens < first.usage.output_tokens
    more = {"role": "user", "content": "And now?"}
    kept = ask(claude, [*HI, first.to_param(), more])
    dropped = ask(claude, [*HI, {"role": "assistant", "content": "Hello."}, more])
    assert prompt(kept.usage) == prompt(dropped.usage)
    assert dropped.headstart["computed"] <= 8


def test_reasoning_that_shall_not_be_shown(server: Server, claude: Anthropic) -> None:
    long = "<think>\n" + "hm, " * 40 + "\n</think>\n\n"
    engine_of(server).say(long + "Hello.", long + "Hello.")
    hidden: Any = {"type": "adaptive", "display": "omitted"}
    whole = ask(claude, HI, thinking=hidden, max_tokens=400)
    with claude.messages.stream(model="fake", max_tokens=400, messages=HI, thinking=hidden) as stream:  # type: ignore[arg-type]
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        thinking, text = answer.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "", "Hello.")
        assert thinking.signature
        assert answer.usage.output_tokens_details.thinking_tokens > 100


def test_hidden_reasoning_is_not_lost_in_a_tool_loop(
    server: Server, claude: Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_of(server).engine, "delay", 0.01)  # so that it is never faster to compute than to restore
    engine_of(server).say(THOUGHT + CALL, "Done.")
    first = ask(claude, HI, tools=[LS], thinking={"type": "adaptive", "display": "omitted"})
    thinking, call = first.content
    assert thinking.thinking == ""
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "hosts"}
    going_on = [*HI, first.to_param(), {"role": "user", "content": [result]}]
    told = {"type": "thinking", "thinking": "They greet me.", "signature": thinking.signature}
    shown: Any = [*HI, {"role": "assistant", "content": [told, call.to_dict()]}, {"role": "user", "content": [result]}]
    second = ask(claude, going_on, tools=[LS])
    assert prompt(second.usage) == claude.messages.count_tokens(model="fake", messages=shown, tools=[LS]).input_tokens  # type: ignore[list-item]
    assert second.headstart["computed"] <= prompt(second.usage) - prompt(first.usage) - first.usage.output_tokens + 16


def test_a_prefilled_reply_goes_on(server: Server, claude: Anthropic) -> None:
    engine_of(server).say(" Helios)", "Done.")
    asked = [{"role": "user", "content": "What is the Greek name of the sun?"}]
    first = ask(claude, [*asked, {"role": "assistant", "content": "The best answer is ("}])
    assert first.content[0].text == " Helios)"
    settled(server)
    whole = {"role": "assistant", "content": "The best answer is ( Helios)"}
    second = ask(claude, [*asked, whole, {"role": "user", "content": "Thanks."}])
    assert second.usage.cache_read_input_tokens >= prompt(first.usage)
    use = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="may contain only text"):
        ask(claude, [*asked, {"role": "assistant", "content": [use]}], tools=[LS])


# ── how it ends ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stop_sequence(server: Server, claude: Anthropic) -> None:
    engine_of(server).say("one two STOP three", "one two STOP three")
    answer = ask(claude, HI, stop_sequences=["STOP", "HALT"])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "STOP", "one two ")
    with claude.messages.stream(model="fake", max_tokens=64, messages=HI, stop_sequences=["STOP"]) as stream:  # type: ignore[arg-type]
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "STOP")


def test_a_reply_is_cut(server: Server, claude: Anthropic) -> None:
    engine_of(server).say("x" * 5000, "x" * 5000, CALL)
    assert ask(claude, HI, max_tokens=5).stop_reason == "max_tokens"
    full = ask(claude, HI, max_tokens=100_000)
    assert full.stop_reason == "model_context_window_exceeded"
    assert prompt(full.usage) + full.usage.output_tokens in (4096, 4097)
    broken = ask(claude, HI, tools=[LS], max_tokens=len(CALL) - 25)
    assert broken.stop_reason == "max_tokens"
    assert broken.content[0].input == {"all": True}


@pytest.mark.parametrize("stream", [False, True])
def test_the_cache_is_filled_and_nothing_is_said(server: Server, claude: Anthropic, stream: bool) -> None:
    messages = [{"role": "user", "content": f"Warm me up ({stream}). " * 20}]
    if stream:
        with claude.messages.stream(model="fake", max_tokens=0, messages=messages) as events:  # type: ignore[arg-type]
            warmed: Any = events.get_final_message()
    else:
        warmed = ask(claude, messages, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    engine_of(server).say("Hot.")
    answer = ask(claude, messages)
    assert prompt(answer.usage) == prompt(warmed.usage)
    assert answer.headstart["computed"] <= 8


# ── what it cost ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_counting_is_no_reason_to_refuse(claude: Anthropic) -> None:
    long: Any = [{"role": "user", "content": "x" * 5000}]
    count = claude.messages.count_tokens(model="fake", messages=long, system=SYSTEM, tools=[LS])  # type: ignore[list-item]
    assert count.input_tokens > 5000
    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {count.input_tokens} tokens > 4096 maximum"):
        ask(claude, long, system=SYSTEM, tools=[LS])


def test_a_conversation_is_computed_once_whatever_its_form(server: Server, claude: Anthropic) -> None:
    """As Claude Code sends it: the mark moves on, and what had it is a bare string the next time."""
    engine = engine_of(server)
    engine.say(*(f"Answer number {turn}." for turn in range(4)))
    history: list[Any] = []
    before = 0
    for turn in range(4):
        question = f"Question number {turn}: what is new since then? " * 3
        marked = {"role": "user", "content": [{"type": "text", "text": question, "cache_control": EPHEMERAL}]}
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.329.{turn}ba; cc_entrypoint=cli"},
            {"type": "text", "text": SYSTEM + "Be kind.", "cache_control": EPHEMERAL},
        ]
        answer = ask(claude, [*history, marked], system=system)
        usage = answer.usage
        assert answer.headstart["computed"] <= 1.02 * (prompt(usage) - before) + 64
        assert usage.input_tokens <= 32, "what lies before the mark was created or read"
        assert usage.cache_creation.ephemeral_1h_input_tokens == 0
        before = prompt(usage) + usage.output_tokens
        reply = answer.content[0].text
        history += [
            {"role": "user", "content": question},
            {
                "role": "assistant",
                "content": reply if turn % 2 else [{"type": "text", "text": reply, "cache_control": EPHEMERAL}],
            },
        ]
        settled(server)


def test_marks_say_for_how_long(server: Server, claude: Anthropic) -> None:
    engine_of(server).say("A.", "B.", "C.")
    hour = {**EPHEMERAL, "ttl": "1h"}
    system = [{"type": "text", "text": "Nobody has ever said this. " * 10, "cache_control": hour}]
    asked = [{"role": "user", "content": [{"type": "text", "text": "Nor this. " * 10, "cache_control": EPHEMERAL}]}]
    first = ask(claude, asked, system=system).usage
    assert first.cache_creation.ephemeral_1h_input_tokens >= len(system[0]["text"])
    assert 100 <= first.cache_creation.ephemeral_5m_input_tokens <= 140
    assert prompt(first) == first.input_tokens + first.cache_creation_input_tokens + first.cache_read_input_tokens
    again = ask(claude, asked, system=system).usage
    assert (prompt(again), again.cache_creation_input_tokens) == (prompt(first), 0)
    unmarked = ask(claude, [{"role": "user", "content": "Never heard. " * 20}]).usage
    assert unmarked.cache_creation_input_tokens == 0


def test_what_was_missed_is_said_where_it_is_asked_for(server: Server, claude: Anthropic) -> None:
    engine_of(server).say("One.", "Two.", "Three.")
    first = ask(claude, HI, diagnostics={"previous_message_id": None})
    assert first.diagnostics is None
    going_on = [*HI, first.to_param(), {"role": "user", "content": "go on"}]
    settled(server)
    assert ask(claude, going_on, diagnostics={"previous_message_id": first.id}).diagnostics is None
    strange = ask(claude, going_on, diagnostics={"previous_message_id": "msg_unknown"})
    assert strange.diagnostics.cache_miss_reason.type == "previous_message_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_missed_is_told_against_the_message_that_is_named(server: Server, claude: Anthropic, stream: bool) -> None:
    """Not against the nearest, from which all is taken."""
    engine_of(server).say("One.", "Two.", "Three.", "Four.")
    asked = [{"role": "user", "content": "The same question for each of the two. " * 5}]
    first, second = (ask(claude, asked, system=f"{name} is who you are. " * 5) for name in ("Ada", "Bob"))
    settled(server)
    for named, kind in ((first.id, "system_changed"), (second.id, None)):
        options = {"system": "Bob is who you are. " * 5, "diagnostics": {"previous_message_id": named}}
        if stream:
            with claude.beta.messages.stream(model="fake", max_tokens=60, messages=asked, **options) as told:  # type: ignore[arg-type]
                found = told.get_final_message()
        else:
            found = ask(claude, asked, **options)
        assert found.usage.input_tokens + found.usage.cache_creation_input_tokens <= 2
        assert (found.diagnostics.cache_miss_reason.type if found.diagnostics else None) == kind


# ── what is around it ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_models_have_both_vendors_fields(server: Server, claude: Anthropic) -> None:
    (listed,) = claude.models.list()
    assert (listed.id, listed.type, listed.lifecycle, listed.max_input_tokens) == ("fake", "model", "active", 4095)
    assert claude.models.retrieve("fake") == listed
    (same,) = server.openai.models.list()
    assert (same.id, same.object, same.owned_by) == ("fake", "model", "headstart")
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.models.retrieve("none")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(openai.NotFoundError) as refused:
        server.openai.models.retrieve("none")
    assert refused.value.code == "model_not_found"


def test_the_vendors_models_mean_the_served_one(server: Server, claude: Anthropic) -> None:
    engine_of(server).say("It is me.")
    assert ask(claude, HI, model="claude-haiku-4-5").model == "fake"
    assert claude.messages.count_tokens(model="claude-opus-4-8", messages=HI).input_tokens > 0  # type: ignore[arg-type]


def test_probes_are_answered(server: Server) -> None:
    assert server.post("/api/event_logging/batch", json={"events": []}).status_code == 200
    assert server.http.head("/").status_code == 200
    assert server.http.get("/").json()["name"] == "headstart"


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def fault(caught: pytest.ExceptionInfo[Any], status: int, kind: str) -> Any:
    error = caught.value
    assert (error.status_code, error.type) == (status, kind)
    assert error.body["type"] == "error"
    assert set(error.body) == {"type", "error", "request_id"}
    assert error.request_id == error.body["request_id"] == error.response.headers["x-request-id"]
    return error


def test_errors_are_the_sdks_own(server: Server, claude: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'llama-9'") as caught:
        ask(claude, HI, model="llama-9")
    fault(caught, 404, "not_found_error")
    with pytest.raises(anthropic.NotFoundError, match="no route POST /v1/messages/batches") as caught:
        claude.post("/v1/messages/batches", cast_to=object)
    fault(caught, 404, "not_found_error")
    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        ask(claude, HI, extra_body={"temperature": 2})
    fault(caught, 400, "invalid_request_error")
    with pytest.raises(anthropic.APIStatusError, match="does not accept GET") as caught:
        claude.get("/v1/messages", cast_to=object)
    fault(caught, 405, "invalid_request_error")
    engine_of(server).engine.fail_next("prefill")  # type: ignore[attr-defined]
    with pytest.raises(anthropic.InternalServerError, match="injected") as caught:
        ask(claude, [{"role": "user", "content": "fail"}])
    fault(caught, 500, "api_error")


def test_an_error_inside_a_stream(server: Server, claude: Anthropic) -> None:
    engine_of(server).say("x" * 2000)
    stream = ask(claude, HI, max_tokens=2000, stream=True)
    next(iter(stream))
    engine_of(server).engine.fail_next("decode")  # type: ignore[attr-defined]
    with pytest.raises(anthropic.APIStatusError, match="injected") as caught:
        list(stream)
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    assert caught.value.body["request_id"] == stream.response.headers["request-id"]  # type: ignore[index]
    settled(server)


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """One slow slot, one place in the queue, 4 KiB of body, little patience with silence."""
    engine = Scripted(FakeEngine(slots=1, ctx=2048, delay=0.005))
    options: dict[str, Any] = {"model_id": "fake", "max_body": 4096, "keep_alive": 0.1}
    with Runtime(lambda: engine, Settings(queue=1)) as runtime, serving(runtime, **options) as server:
        yield server


def test_a_key_is_needed() -> None:
    options: dict[str, Any] = {"model_id": "fake", "api_keys": ("sesame",), "key": "sesame"}
    with Runtime(lambda: FakeEngine(slots=1, ctx=256)) as runtime, serving(runtime, **options) as server:
        with client_of(server, api_key=None, auth_token="sesame") as claude:
            assert ask(claude, HI, max_tokens=1).type == "message"
        with client_of(server, api_key="sesame") as claude:
            assert ask(claude, HI, max_tokens=1).type == "message"
        assert httpx.head(server.url).status_code == 200
        with client_of(server, api_key=None, auth_token="guess") as claude:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                ask(claude, HI)
            fault(caught, 401, "authentication_error")


def test_a_body_that_is_too_large(small: Server) -> None:
    with client_of(small) as claude, pytest.raises(anthropic.APIStatusError) as caught:
        ask(claude, [{"role": "user", "content": "x" * 8000}])
    fault(caught, 413, "request_too_large")


def test_a_full_queue_says_when_to_come_back(small: Server) -> None:
    assert small.runtime is not None
    snapshot = small.runtime.snapshot
    long = {"max_tokens": 1500, "messages": HI}
    engine_of(small).say("x" * 1500, "x" * 1500)
    with client_of(small) as claude, raw(small, "/v1/messages", long):
        wait_until(lambda: snapshot()["running"] == 1)
        with raw(small, "/v1/messages", long):
            wait_until(lambda: snapshot()["waiting"] == 1)
            with pytest.raises(anthropic.RateLimitError) as caught:
                ask(claude, HI)
            assert int(fault(caught, 429, "rate_limit_error").response.headers["retry-after"]) >= 1
    wait_until(small.idle)
    engine_of(small).replies.clear()


def test_a_reply_is_of_the_form_that_was_asked_for(small: Server) -> None:
    """The fake model says anything: only a grammar makes JSON of it."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    with client_of(small) as claude:
        answer = ask(claude, HI, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert answer.stop_reason == "end_turn"
        assert 0 <= json.loads(answer.content[0].text)["n"] <= 99
        tool = {"name": "count", "input_schema": schema, "strict": True}
        called = ask(claude, HI, tools=[LS, tool], tool_choice={"type": "tool", "name": "count"})
        (call,) = called.content
        assert (called.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "count")
        assert 0 <= call.input["n"] <= 99
        with pytest.raises(anthropic.BadRequestError, match="no tool 'other'"):
            ask(claude, HI, tools=[LS], tool_choice={"type": "tool", "name": "other"})


def test_a_caller_that_hangs_up_is_forgotten(small: Server) -> None:
    engine_of(small).say("x" * 1500)
    with client_of(small) as claude:
        with claude.messages.stream(model="fake", max_tokens=1500, messages=HI) as stream:  # type: ignore[arg-type]
            next(iter(stream))
            assert not small.idle()
        wait_until(small.idle)


def test_a_silent_line_is_kept_alive(small: Server) -> None:
    engine = engine_of(small).engine
    assert isinstance(engine, FakeEngine)
    engine.delay = 0.3
    body = {"max_tokens": 1, "messages": HI, "stream": True}
    try:
        with small.http.stream("POST", "/v1/messages?beta=true", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
    finally:
        engine.delay = 0.005
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[0] == "ping"
    assert 'data: {"type":"ping"}' in lines
    assert [name for name in names if name != "ping"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_server_that_still_loads_is_overloaded() -> None:
    go_on = threading.Event()

    def load() -> Runtime:
        go_on.wait(60)
        return Runtime(lambda: FakeEngine(slots=1, ctx=256))

    with serving(load, wait=False, model_id="fake") as server, client_of(server) as claude:
        try:
            with pytest.raises(anthropic.OverloadedError, match="Loading") as caught:
                ask(claude, HI)
            fault(caught, 529, "overloaded_error")
        finally:
            go_on.set()
