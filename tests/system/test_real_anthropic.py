"""The bundled model behind /v1/messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic

from effort import SLOW
from live import Server

SYSTEM = "You are a terse assistant. " * 30


@pytest.fixture(scope="module")
def claude(real: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=real.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(claude: Anthropic, messages: list[Any], **options: Any) -> Any:
    how = {"model": "demo", "max_tokens": 24, "messages": messages, "extra_body": {"temperature": 0}, **options}
    return claude.messages.create(**how)


def prompt(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


@pytest.mark.slow  # the same over chat completions is not
def test_a_conversation_is_computed_once(claude: Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "Name a river in Spain."}]
    first = ask(claude, asked, system=SYSTEM)
    reply = first.content[0].text
    assert len(reply) > 3
    counted = claude.messages.count_tokens(model="demo", messages=asked, system=SYSTEM).input_tokens
    assert prompt(first.usage) == counted
    mark = {"type": "ephemeral"}
    second = ask(
        claude,
        [
            {"role": "user", "content": [{"type": "text", "text": asked[0]["content"], "cache_control": mark}]},
            first.to_param(),
            {"role": "user", "content": "And one in Italy?"},
        ],
        system=[{"type": "text", "text": SYSTEM, "cache_control": mark}],
    )
    fresh = prompt(second.usage) - counted - first.usage.output_tokens
    assert second.headstart["computed"] <= fresh + 8
    assert second.usage.cache_read_input_tokens == second.headstart["cached"] > 100


def test_a_stream_says_the_same_as_a_whole_answer(claude: Anthropic) -> None:
    tokens = 40 if SLOW else 20
    asked: list[Any] = [{"role": "user", "content": "Write the word for 'water' in French, Greek and Japanese."}]
    whole = ask(claude, asked, max_tokens=tokens)
    with claude.messages.stream(model="demo", max_tokens=tokens, messages=asked, extra_body={"temperature": 0}) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert streamed.stop_reason == whole.stop_reason


def test_a_reply_that_was_begun_goes_on(claude: Anthropic) -> None:
    begun = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "The capital of"}]
    answer = ask(claude, begun)
    assert "Paris" in answer.content[0].text
    assert not answer.content[0].text.startswith("The capital")


def test_the_cache_is_filled_and_nothing_is_said(claude: Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "Count the rivers of Portugal, one by one. " * 8}]
    warmed = ask(claude, asked, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    assert ask(claude, asked, max_tokens=1).headstart["computed"] <= 8
