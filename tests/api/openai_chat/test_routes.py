"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, events, serving


def complete(server: Server, prompt: Any, **options: Any) -> Any:
    options = {"model": "fake", "max_tokens": 8, "temperature": 0, "logit_bias": {"257": -100}, **options}
    return server.openai.completions.create(prompt=prompt, **options)


def test_a_text_its_tokens_and_lists_of_both_are_continued_alike(fake: Server) -> None:
    text = complete(fake, "to be or not")
    assert (text.object, text.choices[0].finish_reason) == ("text_completion", "length")
    assert text.id.startswith("cmpl-")
    assert text.usage.prompt_tokens == 12
    tokens = complete(fake, list(b"to be or not"))
    texts = complete(fake, ["to be or not", "to be or not"])
    lists = complete(fake, [list(b"to be or not")])
    replies = {c.text for answer in (text, tokens, texts, lists) for c in answer.choices}
    assert len(replies) == 1
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert texts.usage.prompt_tokens == 24


def test_more_prompts_than_slots_and_queue_are_all_answered() -> None:
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=256), Settings(queue=1)) as runtime,
        serving(runtime, model_id="fake") as server,
    ):
        prompts = [f"prompt {number}" for number in range(12)]
        answer = complete(server, prompts, n=2, temperature=1.0, seed=1)
        assert [choice.index for choice in answer.choices] == list(range(24))
        assert answer.usage.completion_tokens <= 24 * 8
        alone = complete(server, prompts[7], n=2, temperature=1.0, seed=1)
        assert [choice.text for choice in answer.choices[14:16]] == [choice.text for choice in alone.choices]


def test_the_default_limit_is_sixteen(fake: Server) -> None:
    assert complete(fake, "count", max_tokens=None).usage.completion_tokens == 16


def test_control_spellings_in_a_raw_prompt_are_control_tokens(fake: Server) -> None:
    assert complete(fake, "<|im_start|>user\nhi<|im_end|>").usage.prompt_tokens == len("user\nhi") + 2


def test_echo_repeats_the_prompt(fake: Server) -> None:
    plain, echoed = complete(fake, "abc"), complete(fake, "abc", echo=True)
    assert echoed.choices[0].text == "abc" + plain.choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in complete(fake, "abc", echo=True, stream=True))
    assert streamed == echoed.choices[0].text


def test_echo_with_logprobs_scores_the_prompt_without_the_cache(fake: Server) -> None:
    complete(fake, "a scored prompt")
    answer = complete(fake, "a scored prompt", echo=True, logprobs=2, max_tokens=3)
    assert answer.headstart["cached"] == 0
    assert answer.headstart["computed"] == 15
    scores = answer.choices[0].logprobs
    assert "".join(scores.tokens) == answer.choices[0].text
    assert scores.text_offset == list(range(18))
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert all(score < 0 for score in scores.token_logprobs[1:])
    for token, score, top in zip(scores.tokens[1:], scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True):
        assert top[token] == score
        assert 2 <= len(top) <= 3


def test_zero_tokens_with_echo_and_logprobs_score_a_text(fake: Server) -> None:
    answer = complete(fake, ["abc", "abcdef"], echo=True, logprobs=0, max_tokens=0)
    short, long = answer.choices
    assert (short.text, long.text) == ("abc", "abcdef")
    assert long.logprobs.token_logprobs[1:3] == pytest.approx(short.logprobs.token_logprobs[1:], abs=0.01)
    assert len(long.logprobs.token_logprobs) == 6
    assert [list(top) for top in long.logprobs.top_logprobs[1:]] == [["b"], ["c"], ["d"], ["e"], ["f"]]
    assert answer.usage.completion_tokens == 0


def test_offsets_count_characters_where_a_character_spans_tokens(fake: Server) -> None:
    scores = complete(fake, "é!", echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    assert scores.tokens == ["\ufffd", "\ufffd", "!"]
    assert scores.text_offset == [0, 0, 1]


def test_streamed_chunks_have_the_completion_form(fake: Server) -> None:
    body = {
        "prompt": ["ab", "cd"],
        "max_tokens": 4,
        "stream": True,
        "logprobs": 1,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    with fake.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(events(response.iter_lines()))
    *chunks, totals = chunks
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        offsets = [at for choice in own if choice["logprobs"] for at in choice["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2, 3]
    assert totals["usage"]["prompt_tokens"] == 4
    assert totals["choices"] == []
