"""Requests with a grammar through the whole runtime, over the fake engine; and control tokens that are part of a reply."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness import Answer, ask, assistant, submit, system, user
from headstart.errors import EngineError, InvalidRequest
from headstart.interfaces.sampling import GREEDY, Grammar, Sampling
from headstart.prompt.family_detection import FAMILIES
from headstart.serving.job import log_softmax
from headstart.serving.request import Delta, Failed, Finished
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import CHATML, END, START, STOP, FakeEngine, FakeTokenizer
from talks import talk

CHAT = [system("You write codes."), user("One, please.")]
CODE = Grammar("regex", "[a-z]{3}-[0-9]{3}")
LIVELY = Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime(lambda: FakeEngine(slots=2)) as made:
        yield made


def test_a_reply_is_what_its_grammar_says_and_stops_there(runtime: Runtime) -> None:
    answer = ask(runtime, CHAT, grammar=CODE, max_tokens=50)
    assert re.fullmatch("[a-z]{3}-[0-9]{3}", answer.text)
    assert answer.finish.reason == "stop"
    assert answer.finish.tokens[-1] in runtime.engine.tokenizer.eog
    assert answer.report.completion == 8


def test_each_choice_has_its_own_place_in_the_grammar(runtime: Runtime) -> None:
    answer = ask(runtime, CHAT, grammar=CODE, choices=5, sampling=LIVELY, max_tokens=50)
    assert all(re.fullmatch("[a-z]{3}-[0-9]{3}", text) for text in answer.texts.values())
    assert len(set(answer.texts.values())) == 5


def test_replies_that_decode_together_follow_their_own_grammars(runtime: Runtime) -> None:
    plain = ask(runtime, CHAT, max_tokens=12)
    pending = [
        submit(runtime, CHAT, grammar=CODE, max_tokens=50),
        submit(runtime, CHAT, grammar=Grammar("regex", "[XYZ]{20}"), max_tokens=50),
        submit(runtime, CHAT, max_tokens=12),
    ]
    code, letters, free = (one.answer() for one in pending)
    assert re.fullmatch("[a-z]{3}-[0-9]{3}", code.text)
    assert re.fullmatch("[XYZ]{20}", letters.text)
    assert free.text == plain.text


def test_max_tokens_cuts_a_reply(runtime: Runtime) -> None:
    answer = ask(runtime, CHAT, grammar=CODE, max_tokens=5)
    assert re.fullmatch("[a-z]{3}-[0-9]", answer.text)
    assert answer.finish.reason == "length"


def test_a_stop_text_cuts_a_reply(runtime: Runtime) -> None:
    answer = ask(runtime, CHAT, grammar=CODE, stop=("-",))
    assert re.fullmatch("[a-z]{3}", answer.text)
    assert answer.finish.stopped_by == "-"


def test_log_probabilities_are_the_models_own(runtime: Runtime) -> None:
    answer = ask(runtime, CHAT, grammar=CODE, sampling=replace(GREEDY, logprobs=3), keep_logits=True)
    first = next(event.logprobs[0] for event in answer.events if isinstance(event, Delta))
    assert answer.logits is not None
    expected = log_softmax(answer.logits)
    assert first.logprob == pytest.approx(float(expected[first.token]), abs=1e-4)
    assert first.top[0][0] == int(expected.argmax())
    assert first.top[0][2] > first.logprob, "the model would have said something else"


def test_what_cannot_be_followed_is_refused_before_it_is_queued(runtime: Runtime) -> None:
    for bad in (Grammar("json_schema", '{"type": "word"}'), Grammar("lark", 'start: "a'), Grammar("regex", "(")):
        with pytest.raises(InvalidRequest, match="cannot be followed") as caught:
            submit(runtime, CHAT, grammar=bad)
        assert (caught.value.status, caught.value.param) == (400, "grammar")
        with pytest.raises(InvalidRequest) as named:
            runtime.check_grammar(bad, param="response_format")
        assert named.value.param == "response_format"
    with pytest.raises(InvalidRequest, match="says where the reply ends"):
        submit(runtime, CHAT, grammar=CODE, ignore_eos=True)
    assert runtime.scheduler.queued == runtime.scheduler.running == 0


def test_a_grammar_that_fails_on_the_way_ends_its_request_and_nothing_else(runtime: Runtime) -> None:
    """It wants an end token in its middle, which shows only when that is drawn."""
    beside = submit(runtime, [user("Something else.")], grammar=Grammar("regex", "[pq]{40}"), max_tokens=50)
    broken = submit(runtime, CHAT, grammar=Grammar("lark", 'start: /[a-z]{9}/ <|im_end|> "b"'), max_tokens=50)
    with pytest.raises(EngineError, match=r"'start: /.a-z.\{9\}/ <.im_end.> .b.'"):
        broken.answer()
    assert not any(isinstance(event, Finished) for event in broken.seen)
    assert isinstance(broken.seen[-1], Failed)
    assert re.fullmatch("[pq]{40}", beside.answer().text)
    assert runtime.scheduler.running == 0
    again = ask(runtime, CHAT, grammar=CODE)
    assert again.report.computed <= runtime.engine.traits.block_size, "its prompt was computed, and is still there"
    cold = Runtime(lambda: FakeEngine(slots=2))
    try:
        assert ask(cold, CHAT, grammar=CODE).text == again.text
    finally:
        cold.close()


def test_one_choice_that_fails_ends_all(runtime: Runtime) -> None:
    with pytest.raises(EngineError):
        ask(runtime, CHAT, grammar=Grammar("lark", 'start: "a" <|im_end|> "b"'), choices=3)
    assert ask(runtime, CHAT, grammar=CODE).finish.reason == "stop"


# ── control tokens that are part of a reply ──────────────────────────────────────────────────────────────────────────

CALLS = CHATML.replace(
    "{% for call in message['tool_calls'] or [] %}{{ '\n' + (call['function'] | tojson) }}{% endfor %}",
    "{% for call in message['tool_calls'] or [] %}{{ '<|im_start|>' + call['function']['name'] + '<|im_start|>' }}{% endfor %}",
)
CALL = Grammar("lark", 'start: "So: " <|im_start|> /go|stay/ <|im_start|>')
WORDS = ["go", "stay", "So", "o: "]


def calling(visible: bool = True, **options: Any) -> tuple[Runtime, dict[str, Any]]:
    runtime = Runtime(lambda: FakeEngine(tokenizer=FakeTokenizer(WORDS, chat_template=CALLS), alphabet=b"gostay:", **options))
    return runtime, {"grammar": CALL, "max_tokens": 50, "visible": frozenset({START.id} if visible else ())}


def test_the_text_of_a_visible_control_token_is_delivered() -> None:
    for visible, expected in ((True, r"So: <\|im_start\|>(go|stay)<\|im_start\|>"), (False, "So: (go|stay)")):
        runtime, options = calling(visible)
        with runtime:
            answer = ask(runtime, CHAT, **options)
            assert re.fullmatch(expected, answer.text)
            assert answer.finish.tokens.count(START.id) == 2
            deltas = [event.text for event in answer.events if isinstance(event, Delta)]
            assert "".join(deltas) == answer.text
            assert END.text not in answer.text
            assert STOP.text not in answer.text


def test_a_call_that_comes_back_goes_on_with_the_tokens_that_it_was_made_of() -> None:
    """The reply is spelled byte by byte, as the tokenizer would not; its parts on both sides of a control token are known."""
    runtime, options = calling()
    runtime.prompter.family = FAMILIES[0]  # none writes calls as this template does, so they would be text
    spelled_out = replace(GREEDY, logit_bias=tuple((token, -1000.0) for token in range(259, 259 + len(WORDS))))
    with runtime:
        answer = ask(runtime, CHAT, sampling=spelled_out, **options)
        name = answer.text.split(START.text)[1]
        back = {"role": "assistant", "content": "So: ", "tool_calls": [{"function": {"name": name}}]}
        prompt = runtime.chat_prompt(talk([*CHAT, back, user("And now?")]))
        said = list(answer.finish.tokens[:-1])
        at = len(answer.prompt)
        assert prompt.tokens[at : at + len(said)].tolist() == said
        assert runtime.engine.tokenizer.tokenize("So: ") != said[:4]
        plain = runtime.chat_prompt(talk([*CHAT, assistant(answer.text), user("And now?")]))
        assert START.id not in plain.tokens[at : at + len(said)].tolist(), "spelled in content it is plain text"
        follow: Answer = ask(runtime, [*CHAT, back, user("And now?")])
        assert follow.report.computed <= len(prompt) - at - len(said) + runtime.engine.traits.block_size
