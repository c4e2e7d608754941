"""POST /v1/chat/completions, through the vendor's own client."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving

NUMBER = itertools.count()


def fresh(text: str = "tell me") -> list[dict[str, Any]]:
    """A conversation that no other test has: its first block ends in a letter of two bytes that is its own, and rare."""
    return [{"role": "user", "content": f"{chr(0x500 + next(NUMBER))}: {text}"}]


def chat(server: Server, messages: list[dict[str, Any]], **options: Any) -> Any:
    extra = {key: options.pop(key) for key in ("cache_salt", "cache_prompt", "ignore_eos") if key in options}
    # The bias keeps replies from ending by chance.
    options = {"model": "fake", "max_tokens": 24, "temperature": 0, "logit_bias": {"257": -100}, **options}
    return server.openai.chat.completions.create(messages=messages, extra_body=extra, **options)


def text(answer: Any) -> str:
    content = answer.choices[0].message.content
    assert isinstance(content, str)
    return content


def test_an_answer_has_the_openai_form_and_accounts_for_itself(fake: Server) -> None:
    answer = chat(fake, fresh())
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "fake")
    choice = answer.choices[0]
    assert (choice.index, choice.message.role, choice.finish_reason, choice.logprobs) == (0, "assistant", "length", None)
    usage, timings, own = answer.usage, answer.timings, answer.headstart
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == timings["predicted_n"] == 24
    assert usage.prompt_tokens_details.cached_tokens == timings["cache_n"] == own["cached"] == 0
    assert timings["prompt_n"] == own["computed"] == usage.prompt_tokens == usage.prompt_tokens_details.cache_write_tokens
    assert timings["prompt_per_second"] == pytest.approx(1e3 * timings["prompt_n"] / timings["prompt_ms"], rel=0.01)
    assert set(own) == {
        *("cached", "live", "restored", "computed", "tiers", "mode", "dropped"),
        *("reason", "diverged_at", "cause", "recomputed", "seconds", "hint"),
    }
    assert own["mode"] == "fast"


def test_the_second_turn_is_cached_and_says_so(fake: Server) -> None:
    messages = fresh("a first turn of some length")
    first = chat(fake, messages)
    messages += [{"role": "assistant", "content": text(first)}, {"role": "user", "content": "and more"}]
    second = chat(fake, messages)
    own = second.headstart
    assert own["cached"] == own["live"] + own["restored"] == second.usage.prompt_tokens_details.cached_tokens
    assert own["cached"] + own["computed"] == second.usage.prompt_tokens
    assert own["cached"] >= first.usage.prompt_tokens
    assert own["restored"] == sum(own["tiers"].values())


def test_a_stream_says_the_same_as_a_whole_answer(fake: Server) -> None:
    messages = fresh()
    whole = chat(fake, messages)
    chunks = list(chat(fake, messages, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    *parts, last, totals = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text(whole)
    assert [part.choices[0].finish_reason for part in parts] == [None] * len(parts)
    assert [part.usage for part in (*parts, last)] == [None] * (len(parts) + 1)
    assert last.choices[0].finish_reason == "length"
    assert last.choices[0].delta.content is None
    assert last.headstart["cached"] == whole.usage.prompt_tokens - 1
    assert last.timings["predicted_n"] == 24
    assert totals.choices == []
    assert totals.usage.prompt_tokens == whole.usage.prompt_tokens
    assert totals.usage.completion_tokens == whole.usage.completion_tokens


def test_a_proxy_is_asked_to_hold_no_event_back(fake: Server) -> None:
    """nginx follows this header (docs/service.md)."""
    body = {"messages": fresh(), "max_tokens": 2, "stream": True}
    with fake.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache"
        response.read()


def test_without_include_usage_no_chunk_has_usage(fake: Server) -> None:
    chunks = list(chat(fake, fresh(), stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_n_counts_the_prompt_once_and_computes_it_once(fake: Server, stream: bool) -> None:
    n = 5  # above the slots
    messages = fresh("a prompt that is computed once, however many replies are drawn from it")
    options: dict[str, Any] = {"n": n, "temperature": 1.0, "seed": 7}
    if stream:
        texts = dict.fromkeys(range(n), "")
        ended = []
        for chunk in chat(fake, messages, stream=True, stream_options={"include_usage": True}, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ended += [choice.index] if choice.finish_reason else []
        answer, replies = chunk, list(texts.values())
        assert sorted(ended) == list(range(n))
    else:
        answer = chat(fake, messages, **options)
        assert [choice.index for choice in answer.choices] == list(range(n))
        replies = [choice.message.content for choice in answer.choices]
    assert len(set(replies)) == n
    prompt = answer.usage.prompt_tokens
    assert prompt == fake.post("/v1/chat/completions/input_tokens", json={"messages": messages}).json()["input_tokens"]
    assert answer.usage.completion_tokens == sum(len(reply) for reply in replies) == n * 24
    assert answer.usage.total_tokens == prompt + answer.usage.completion_tokens
    assert (answer.headstart["cached"], answer.headstart["computed"]) == (0, prompt)


def test_a_seed_repeats_a_reply_and_another_does_not(fake: Server) -> None:
    messages = fresh()
    one, again, other = (text(chat(fake, messages, temperature=1.5, seed=seed)) for seed in (5, 5, 6))
    assert one == again != other


def test_negative_and_huge_seeds_are_seeds(fake: Server) -> None:
    messages = fresh()
    for seed in (-(2**63), 2**63 - 1, 2**32 - 1):
        one, again = (text(chat(fake, messages, temperature=1.5, seed=seed)) for _ in range(2))
        assert one == again


@pytest.mark.parametrize("many", [False, True])
def test_a_stop_text_ends_the_reply_and_is_not_part_of_it(fake: Server, many: bool) -> None:
    messages = fresh()
    whole = text(chat(fake, messages))
    stop = whole[6:9]  # spans tokens: a token of the fake engine is one byte
    answer = chat(fake, messages, stop=["\x00never", stop] if many else stop)
    assert text(answer) == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in chat(fake, messages, stop=stop, stream=True))
    assert streamed == text(answer)


def test_an_empty_stop_text_stops_nothing(fake: Server) -> None:
    assert chat(fake, fresh(), stop="").usage.completion_tokens == 24


def test_zero_tokens_fill_the_cache_only(fake: Server) -> None:
    messages = fresh("a system prompt that someone warms up before it is needed")
    answer = chat(fake, messages, max_tokens=0)
    assert (text(answer), answer.usage.completion_tokens, answer.choices[0].finish_reason) == ("", 0, "length")
    assert chat(fake, messages).headstart["computed"] <= 8


def test_max_completion_tokens_wins(fake: Server) -> None:
    assert chat(fake, fresh(), max_tokens=24, max_completion_tokens=3).usage.completion_tokens == 3


def test_no_limit_means_the_whole_context() -> None:
    with (
        Runtime(lambda: FakeEngine(slots=1, ctx=128)) as runtime,
        serving(runtime, model_id="fake") as server,
    ):
        answer = chat(server, fresh(), max_tokens=-1)
        # The last sampled token needs no row of its own.
        assert answer.usage.total_tokens == 129
        assert answer.choices[0].finish_reason == "length"


def test_logit_bias_reaches_the_sampler(fake: Server) -> None:
    assert text(chat(fake, fresh(), logit_bias={str(ord("z")): 100}, max_tokens=5)) == "zzzzz"


def test_logprobs_are_those_of_the_reply(fake: Server) -> None:
    messages = fresh()
    answer = chat(fake, messages, logprobs=True, top_logprobs=3)
    items = answer.choices[0].logprobs.content
    assert b"".join(bytes(item.bytes) for item in items).decode() == text(answer) == "".join(i.token for i in items)
    for item in items:
        assert [top.logprob for top in item.top_logprobs] == sorted((t.logprob for t in item.top_logprobs), reverse=True)
        assert item.logprob == max(top.logprob for top in item.top_logprobs if top.token != "<|im_end|>")  # greedy, END banned
        assert len(item.top_logprobs) == 3
    streamed = [
        item
        for chunk in chat(fake, messages, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content
    ]
    assert [item.token for item in streamed] == [item.token for item in items]


def test_two_ways_to_say_a_conversation_are_one(fake: Server) -> None:
    number = next(NUMBER)
    plain = [
        {"role": "system", "content": f"{number} be brief"},
        {"role": "user", "content": "one\ntwo"},
    ]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": f"{number} be brief", "cache_control": {"type": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "cache_control": {}},
    ]
    prompts = [fake.post("/apply-template", json={"messages": form}).json()["prompt"] for form in (plain, parts)]
    assert prompts[0] == prompts[1]
    chat(fake, plain)
    assert chat(fake, parts).headstart["computed"] == 1


def test_tools_and_calls_reach_the_template(fake: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2,"a":1}'}}
    messages = [
        *fresh(),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}, "cache_control": {}}]
    prompt = fake.post("/apply-template", json={"messages": messages, "tools": tools}).json()["prompt"]
    assert '"name": "add", "parameters": {"type": "object"}}' in prompt
    assert "cache_control" not in prompt
    assert '"arguments": {"a": 1, "b": 2}' in prompt  # in one order, however they were given
    assert chat(fake, messages, tools=tools).usage.prompt_tokens > len(prompt) / 2


def test_a_salt_shares_nothing_with_another(fake: Server) -> None:
    messages = fresh("the same words of two tenants")
    assert chat(fake, messages, cache_salt="a").headstart["cached"] == 0
    assert chat(fake, messages, cache_salt="b").headstart["cached"] == 0
    assert chat(fake, messages).headstart["cached"] == 0
    assert chat(fake, messages, cache_salt="a").headstart["computed"] == 1


def test_cache_prompt_false_computes_all_and_says_why(fake: Server) -> None:
    messages = fresh()
    chat(fake, messages)
    answer = chat(fake, messages, cache_prompt=False)
    assert answer.headstart["cached"] == 0
    assert answer.headstart["computed"] == answer.usage.prompt_tokens
    assert answer.headstart["reason"] == "disabled"


def test_identities_are_no_part_of_the_prompt(fake: Server) -> None:
    messages = fresh()
    chat(fake, messages, user="alice")
    answer = chat(fake, messages, user="bob", extra_headers={"x-session-id": "1"}, prompt_cache_key="k", metadata={"a": "b"})
    assert answer.headstart["computed"] == 1


def test_a_divergence_is_located(fake: Server) -> None:
    head = {"role": "system", "content": f"{next(NUMBER)} you are a helpful assistant"}
    chat(fake, [head, {"role": "user", "content": "the weather in Paris today"}], cache_salt="where")
    answer = chat(fake, [head, {"role": "user", "content": "the weather in Rome today"}], cache_salt="where")
    at = answer.headstart["diverged_at"]
    assert answer.headstart["reason"] == "diverged"
    assert (at["message"], at["character"]) == (1, len("the weather in "))
    assert at["current"].startswith("Rome today")
    assert at["previous"].startswith("Paris today")
    assert len(at["current"]) <= 40


def test_sliding_says_how_many_messages_it_dropped() -> None:
    with (
        Runtime(lambda: FakeEngine(slots=1, ctx=512), Settings(overflow="truncate")) as runtime,
        serving(runtime, model_id="fake") as server,
    ):
        messages = [{"role": role, "content": "x" * 40} for _ in range(8) for role in ("user", "assistant")]
        answer = chat(server, [*messages, {"role": "user", "content": "last"}])
        assert answer.headstart["dropped"] > 0
        assert answer.headstart["dropped"] % 2 == 0
        assert answer.usage.prompt_tokens < 512
        counts = [
            server.post("/v1/chat/completions/input_tokens", json={"messages": messages[:length]}).json()["input_tokens"]
            for length in (2, 16)
        ]
        assert counts[1] > 512, "what would be dropped is counted: clients count in order to know when to compact"
        assert counts[0] < 512


def test_a_body_with_many_faults_is_refused_at_once(fake: Server) -> None:
    """Fault: to find the names of the faults took a time that grew with the square of their number."""
    for path, body, named in (
        ("/v1/completions", {"prompt": [1, *[2.5] * 30_000]}, "'prompt"),
        ("/completion", {"prompt": [-1] * 30_000}, "'prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [0] * 30_000}]}, "'messages[0].content"),
        ("/v1/chat/completions", {"messages": [0] * 30_000}, "'messages[0]"),
        ("/v1/responses", {"input": "x", "metadata": dict.fromkeys(map(str, range(30_000)), 1)}, "30,000 places"),
    ):
        answer = fake.post(path, json=body)
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]


def test_unknown_fields_are_ignored(fake: Server) -> None:
    body = {"messages": fresh(), "max_tokens": 2, "frobnicate": {"deep": [1]}, "service_tier": "flex", "store": True}
    assert fake.post("/v1/chat/completions", json=body).status_code == 200


def test_the_model_may_be_left_out_or_named_by_an_alias(fake: Server) -> None:
    for name in ({}, {"model": "fake-alias"}, {"model": None}, {"model": ""}):
        answer = fake.post("/v1/chat/completions", json={"messages": fresh(), "max_tokens": 1, **name})
        assert answer.json()["model"] == "fake"
