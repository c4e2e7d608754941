"""Edges of prompts and templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import Oracle, Pending, ask, assistant, converse, system, user
from headstart.config import Settings
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer

BLOCK_SIZE = 8
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def runtime(template: str | None, mode: str = "fast", words: tuple[str, ...] = ()) -> Runtime:
    engine = FakeEngine(slots=2, ctx=4096, block_size=BLOCK_SIZE, tokenizer=FakeTokenizer(words, chat_template=template))
    return Runtime(lambda: engine, Settings(reuse=mode, memory_budget=1 << 20))  # type: ignore[arg-type]


def test_a_template_of_ones_own_may_be_empty(tmp_path: Path) -> None:
    """It is not the same as none."""
    (own := tmp_path / "own.jinja").write_text("")
    with Runtime(FakeEngine, Settings(memory_budget=1 << 20, chat_template=own)) as rt:
        assert rt.prompter.template.source == ""


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("template", [None, PLAIN], ids=["no template", "no control tokens"])
def test_a_model_without_a_template_or_control_tokens_is_reused_as_any_other(template: str | None, mode: str) -> None:
    with runtime(template, mode) as rt:
        oracle, chat = Oracle(), [system("Be brief. " * 8)]
        for turn in range(4):
            answer, expected = converse(rt, oracle, chat, f"question {turn}")
            slack = 8 if mode == "fast" else 16 + 8 + BLOCK_SIZE
            assert answer.report.computed <= 1.02 * expected + slack


def test_a_template_without_control_tokens_still_matches_the_spelling() -> None:
    """The reply then hangs on the whole prompt's text, not on what follows a control token."""
    with runtime(PLAIN, words=("th", "he", "er", "in", "an", "re", "on", "at")) as rt:
        chat = [user("speak")]
        for _ in range(6):
            first = ask(rt, chat, max_tokens=24)
            chat += [assistant(first.text), user("go on")]
            second = ask(rt, chat, max_tokens=4)
            assert second.report.computed <= len(second.prompt) - len(first.prompt) - len(first.finish.tokens) + 8
            chat[-1:] = []
            chat.append(user("more"))


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1])
def test_prompts_at_the_grid_and_below_a_block(length: int, mode: str) -> None:
    """A prompt that ends on a block boundary leaves a whole block as its open tail; one below a block is all tail."""
    with runtime(None, mode) as rt:
        prompt = rt.text_prompt([65 + number % 26 for number in range(length)])
        logits = [
            Pending(rt, Request(prompt, GenerationParams(GREEDY, max_tokens=1), keep_logits=True)).answer() for _ in range(2)
        ]
        assert logits[0].report.computed == length
        whole = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        if mode == "exact":
            assert logits[1].report.computed == length - whole
            assert logits[0].logits is not None
            assert logits[1].logits is not None
            assert logits[0].logits.tobytes() == logits[1].logits.tobytes()
        else:
            assert logits[1].report.computed == 1


def test_a_character_split_over_tokens_arrives_whole() -> None:
    engine = FakeEngine(slots=1, ctx=512, block_size=BLOCK_SIZE, alphabet="äöüß€".encode())
    with Runtime(lambda: engine, Settings(memory_budget=1 << 20)) as rt:
        answer = ask(rt, [user("sprich")], max_tokens=40)
        deltas = [event.text for event in answer.events if hasattr(event, "text")]
        assert "".join(deltas) == answer.text
        sent = b"".join(engine.tokenizer.token_bytes(token) for token in answer.finish.tokens if token < 256)
        assert answer.text == sent.decode("utf-8", "replace")
