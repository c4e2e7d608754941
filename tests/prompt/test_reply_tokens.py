"""A reply with calls or reasoning goes on with its own tokens, though the template writes it otherwise when it comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.interfaces.conversation import Message
from headstart.interfaces.tokenizer import Control
from headstart.output.parser import Parser, message_of
from headstart.prompt.builder import Prompter
from headstart.prompt.chat_template import Template
from headstart.testing.fake_engine import FakeTokenizer
from talks import talk
from templates import REASONING, TOOLS

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    },
}
ASK: list[Message] = [{"role": "user", "content": "Look"}]


def prompter(template: str = TOOLS, *, use_reply_tokens: bool = True) -> Prompter:
    tokenizer = FakeTokenizer(chat_template=template)
    return Prompter(tokenizer, Template(template, tokenizer.names), use_reply_tokens=use_reply_tokens)


def reply_of(ours: Prompter, prompt: Any, text: str) -> Message:
    parser = Parser(ours.family, tools=[READ], thinking=ours.family.opened(prompt.text))
    message = message_of([*parser.feed(text), *parser.end()], ["call_1"])
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = dict(sorted(json.loads(call["function"]["arguments"]).items(), reverse=True))
    return message


REPLIES = [
    '<tool_call>\n{"name": "read", "arguments": {"lines":3,"path":"a"}}\n</tool_call>',
    'I look.\n\n<tool_call>{"name":"read","arguments":{"path":"a","lines":3}}</tool_call>\n',
    '<think>\nhm\n</think>\n<tool_call>\n{"name": "read", "arguments": {"path": "a", "lines": 3}}\n</tool_call>',
    "  That is all.\n\n",
    "<think>hm</think>So be it.",
]


KEEPS = TOOLS.replace(" and loop.index0 > ns.last", "")
"""A template that keeps the reasoning of earlier turns."""


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_goes_on_with_the_tokens_that_it_is_made_of(reply: str) -> None:
    ours = prompter(KEEPS)
    first = ours.chat(talk(ASK, tools=[READ]))
    tokens = list(reply.encode())
    message = reply_of(ours, first, reply)
    ours.remember(first, reply, tokens, message)
    answer = {"role": "tool", "content": "done"} if message.get("tool_calls") else {"role": "user", "content": "on"}
    made = [*first.tokens.tolist(), *tokens]
    following = ours.chat(talk([*ASK, message, answer], tools=[READ]))
    assert following.tokens.tolist()[: len(made)] == made
    plain = prompter(KEEPS, use_reply_tokens=False).chat(talk([*ASK, message, answer], tools=[READ]))
    assert following.text == plain.text


def test_what_a_template_strips_is_not_put_back() -> None:
    """Tokens of reasoning that the text no longer has would be other tokens than those that were asked for."""
    ours = prompter()
    first = ours.chat(talk(ASK, tools=[READ]))
    reply = "<think>\nhm\n</think>\n\nSo be it."
    ours.remember(first, reply, list(reply.encode()), reply_of(ours, first, reply))
    told = [*ASK, {"role": "assistant", "content": "So be it."}, {"role": "user", "content": "on"}]
    assert ours.chat(talk(told, tools=[READ])).tokens.tolist() == prompter().chat(talk(told, tools=[READ])).tokens.tolist()


STRIPS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# </think> #}"
)


def test_a_template_that_writes_no_reasoning_at_all_learns_nothing_of_it() -> None:
    ours = prompter(STRIPS)
    first = ours.chat(talk(ASK))
    reply = "<think>hm</think>So be it."
    message = {"role": "assistant", "content": "So be it.", "reasoning_content": "hm"}
    ours.remember(first, reply, list(reply.encode()), message)
    told = [*ASK, message, {"role": "user", "content": "on"}]
    assert ours.chat(talk(told)).tokens.tolist() == prompter(STRIPS).chat(talk(told)).tokens.tolist()


TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_what_only_means_the_same_stands_for_nothing_else() -> None:
    """Blanks that a template trims are in the tokens: a text that begins like the reply must not get them."""
    ours = prompter(TRIMS)
    first = ours.chat(talk(ASK))
    reply = "One\n\n\n"
    ours.remember(first, reply, list(reply.encode()), {"role": "assistant", "content": reply})
    made = [*first.tokens.tolist(), *reply.encode()]
    back = ours.chat(talk([*ASK, {"role": "assistant", "content": reply}, *ASK]))
    assert back.tokens.tolist()[: len(made)] == made
    for told in ("Onerous duty", "One"):
        other = {"role": "assistant", "content": told}
        text = [*ASK, other, *ASK]
        if told != "One":
            assert ours.chat(talk(text)).tokens.tolist() == prompter(TRIMS).chat(talk(text)).tokens.tolist()
        begun = ours.chat(talk(ASK, prefill=told))
        assert begun.tokens.tolist() == prompter(TRIMS).chat(talk(ASK, prefill=told)).tokens.tolist()


def test_a_reply_that_the_caller_began_goes_on_there() -> None:
    ours = prompter()
    begun = ours.chat(talk(ASK, prefill="Once upon"))
    assert begun.text == ours.chat(talk(ASK)).text + "Once upon"
    reply = " a time"
    ours.remember(begun, reply, list(reply.encode()), {"role": "assistant", "content": "Once upon a time"})
    following = ours.chat(talk([*ASK, {"role": "assistant", "content": "Once upon a time"}, *ASK]))
    made = [*begun.tokens.tolist(), *reply.encode()]
    assert following.tokens.tolist()[: len(made)] == made
    thinking = prompter(REASONING).chat(talk(ASK, prefill="So"))
    assert thinking.text.endswith("<think>\n\n</think>\n\nSo")


def test_breakpoints_are_positions_in_tokens() -> None:
    ours = prompter()
    chat: list[Message] = [{"role": "system", "content": "abcdef"}, *ASK]
    marks = ours.chat(talk(chat, breakpoints=[(0, 3), (1, 4), (9, 1)])).landmarks.breakpoints
    text = ours.chat(talk(chat)).text
    controls = {control.text: 1 for control in ours.tokenizer.controls}

    def tokens(upto: int) -> int:
        before = text[:upto]
        return upto - sum(before.count(control) * (len(control) - 1) for control in controls)

    assert marks == (tokens(text.index("abc") + 3), tokens(text.index("Look") + 4))
    assert isinstance(ours.tokenizer.controls[0], Control)


def test_the_turn_is_where_the_first_reply_to_it_begins() -> None:
    """Also where a client lets the system say something behind the user."""
    ours = prompter()
    called: list[Message] = [{"role": "assistant", "content": "Let me see."}, {"role": "tool", "content": "three"}]
    late: Message = {"role": "system", "content": "It is May."}
    for asked in (ASK, [*ASK, late], [*ASK, late, late]):
        first = ours.chat(talk(asked))
        assert first.landmarks.turn == first.landmarks.header
        following = ours.chat(talk([*asked, *called])).landmarks
        assert following.turn == first.landmarks.turn < following.header


def test_breakpoints_move_with_their_messages_when_a_conversation_slides() -> None:
    ours = prompter()
    said: list[Message] = [{"role": ("user", "assistant")[at % 2], "content": f"{at} " * 20} for at in range(9)]
    chat: list[Message] = [{"role": "system", "content": "abcdef"}, *said]
    cut = ours.truncated_chat(talk(chat, breakpoints=[(0, 3), (1, 5), (9, 4)]), 400)
    assert cut.dropped
    kept = [chat[0], *chat[1 + cut.dropped :]]
    expected = ours.chat(talk(kept, breakpoints=[(0, 3), (len(kept) - 1, 4)]))
    assert cut.landmarks == expected.landmarks
    assert len(cut.landmarks.breakpoints) == 2
