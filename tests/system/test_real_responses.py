"""POST /v1/responses and /completion on the bundled model."""

from __future__ import annotations

from typing import Any

import pytest

from live import Server

RULES = "You are a terse assistant. " * 30


@pytest.mark.slow  # the same over chat completions is not
def test_a_stored_conversation_is_computed_once(real: Server) -> None:
    create: Any = real.openai.responses.create
    options = {"model": "demo", "instructions": RULES, "temperature": 0, "max_output_tokens": 24}
    first = create(input="Name a river in France.", **options)
    assert len(first.output_text) > 3
    second = create(input="And one in Spain?", previous_response_id=first.id, **options)
    fresh = second.usage.input_tokens - first.usage.input_tokens - first.usage.output_tokens
    assert second.headstart["computed"] <= fresh + 8
    assert second.usage.input_tokens_details.cached_tokens > 100


def test_a_stateless_conversation_is_the_same_prompt(real: Server) -> None:
    create: Any = real.openai.responses.create
    options = {"model": "demo", "temperature": 0, "max_output_tokens": 16, "store": False}
    first = create(input="Name a tree.", **options)
    given = [{"role": "user", "content": "Name a tree."}, *first.output, {"role": "user", "content": "Another."}]
    events = list(create(input=given, stream=True, **options))
    usage = events[-1].response.usage
    assert usage.input_tokens_details.cached_tokens >= first.usage.input_tokens + first.usage.output_tokens - 2
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        events[-1].response.output_text
    )
    chat: Any = real.openai.chat.completions.create(
        model="demo",
        messages=[
            {"role": "user", "content": "Name a tree."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Another."},
        ],
        temperature=0,
        max_tokens=16,
    )
    assert chat.usage.prompt_tokens == usage.input_tokens
    assert chat.usage.prompt_tokens_details.cached_tokens == usage.input_tokens - 1


def test_a_completion_in_llama_servers_form(real: Server) -> None:
    body = {"prompt": "The capital of France is", "n_predict": 8, "temperature": 0, "return_tokens": True}
    answer = real.post("/completion", json=body).json()
    assert real.post("/detokenize", json={"tokens": answer["tokens"]}).json()["content"] == answer["content"]
    again = real.post("/completion", json=body).json()
    assert again["content"] == answer["content"]
    assert again["timings"]["prompt_n"] == 1
    tokens = real.post("/tokenize", json={"content": body["prompt"]}).json()["tokens"]
    assert real.post("/completion", json={**body, "prompt": tokens}).json()["content"] == answer["content"]
