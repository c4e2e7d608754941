"""The bundled model behind the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from effort import SLOW
from live import Server

RIVERS: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a terse assistant. " * 30},
    {"role": "user", "content": "Name a river in France."},
]


def ask(server: Server, messages: list[dict[str, Any]], **options: Any) -> Any:
    options = {"model": "demo", "max_tokens": 24, "temperature": 0, **options}
    return server.openai.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]


def test_a_conversation_is_computed_once(real: Server) -> None:
    first = ask(real, RIVERS)
    reply = first.choices[0].message.content
    assert len(reply) > 3
    messages = [*RIVERS, {"role": "assistant", "content": reply}, {"role": "user", "content": "And one in Spain?"}]
    second = ask(real, messages)
    fresh = second.usage.prompt_tokens - first.usage.prompt_tokens - first.usage.completion_tokens
    assert second.headstart["computed"] <= fresh + 8
    assert second.usage.prompt_tokens_details.cached_tokens == second.headstart["cached"] > 100


def test_a_stream_says_the_same_as_a_whole_answer(real: Server) -> None:
    tokens = 48 if SLOW else 24
    messages = [{"role": "user", "content": "Write the word for 'water' in French, Greek and Japanese: eau, νερό, 水. Repeat."}]
    whole = ask(real, messages, max_tokens=tokens)
    chunks = list(ask(real, messages, max_tokens=tokens, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_logprobs_spell_the_reply(real: Server) -> None:
    answer = ask(real, [{"role": "user", "content": "Say hello."}], logprobs=True, top_logprobs=5, max_tokens=12)
    items = answer.choices[0].logprobs.content
    assert (
        b"".join(bytes(item.bytes) for item in items)
        .decode("utf-8", "ignore")
        .startswith(answer.choices[0].message.content.rstrip("\ufffd"))
    )
    for item in items:
        assert len(item.top_logprobs) == 5
        assert item.logprob == max(top.logprob for top in item.top_logprobs)


def test_n_replies_and_a_stop_text(real: Server) -> None:
    answer = ask(real, RIVERS, n=3, temperature=1.0, seed=3, stop=["."], max_tokens=32)
    assert len(answer.choices) == 3
    assert all("." not in choice.message.content for choice in answer.choices)


def test_a_prompt_is_scored(real: Server) -> None:
    def score(text: str) -> float:
        answer = real.openai.completions.create(model="demo", prompt=text, echo=True, logprobs=0, max_tokens=0)
        scores = answer.choices[0].logprobs
        assert scores is not None
        assert "".join(scores.tokens or []) == text
        known = [one for one in scores.token_logprobs or [] if one is not None]
        return sum(known) / len(known)

    assert score("The capital of France is Paris.") > score("The capital of France is purple.")


def test_tokens_of_a_text(real: Server) -> None:
    tokens = real.post("/tokenize", json={"content": "Hello world"}).json()["tokens"]
    assert real.post("/detokenize", json={"tokens": tokens}).json()["content"] == "Hello world"


def test_a_model_is_described_but_not_where_its_file_lies(real: Server) -> None:
    for card in (real.http.get("/v1/models").json()["data"][0], real.http.get("/v1/models/demo").json()):
        assert card["meta"]["architecture"]
        assert "path" not in card["meta"]
        assert ".gguf" not in json.dumps(card)


def test_the_bundled_models_file_is_named(real: Server, demo_model: Path) -> None:
    """`demo` is what people type; a tool that opens the file needs its path."""
    assert real.http.get("/props").json()["model_path"] == str(demo_model)
