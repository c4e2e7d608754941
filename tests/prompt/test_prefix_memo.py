"""A prompt is the same whatever is remembered of those before it, and what is remembered is looked at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from effort import examples
from headstart.interfaces.conversation import Message
from headstart.interfaces.tokenizer import Control
from headstart.interfaces.tokens import as_tokens
from headstart.prompt.builder import Prompt, Prompter
from headstart.prompt.chat_template import Template
from headstart.prompt.prefix_memo import PrefixMemo, TokenisedPrefix
from headstart.prompt.reply_tokens import ReplyTokensMemo
from headstart.prompt.special_tokens import SpecialTokenSplitter
from headstart.testing.fake_engine import CHATML, END, START, STOP, FakeTokenizer
from talks import talk

WORDS = ["the ", "he", "wor", "ld", "world"]
LONGER = Control(START.text + "assistant", 259)
"""Begins like another: what comes behind that one decides which of the two it is."""

SPOKEN = st.text("the world\n<", max_size=12)


def tokenizer_of(*controls: Control, bos: Control | None = None) -> FakeTokenizer:
    made = FakeTokenizer(WORDS, bos=bos)
    made.controls = controls
    return made


def prompter(tokenizer: FakeTokenizer, reply_tokens: ReplyTokensMemo, **options: Any) -> Prompter:
    return Prompter(tokenizer, Template(CHATML, tokenizer.names), reply_tokens=reply_tokens, **options)


def told(prompt: Prompt) -> tuple[Any, ...]:
    return (prompt.text, prompt.tokens.tolist(), prompt.head, prompt.lead, prompt.lead_tokens.tolist(), prompt.landmarks)


class Talks(RuleBasedStateMachine):
    """Conversations that grow, branch and are edited; replies that are spelled anyhow, learned, and forgotten."""

    tokenizer = tokenizer_of(START, Control(END.text, END.id, lstrip=True, rstrip=True), STOP, LONGER)

    def __init__(self) -> None:
        super().__init__()
        reply_tokens = ReplyTokensMemo(limit=3)
        self.ours = prompter(self.tokenizer, reply_tokens)
        self.plain = prompter(self.tokenizer, reply_tokens, memo_bytes=0)
        self.chats: list[list[Message]] = [[{"role": "system", "content": "the world"}]]
        self.number = 0

    @property
    def chat(self) -> list[Message]:
        return self.chats[self.number % len(self.chats)]

    @rule(role=st.sampled_from(["user", "assistant", "tool"]), content=SPOKEN)
    def say(self, role: str, content: str) -> None:
        self.chat.append({"role": role, "content": content})

    @rule(reply=SPOKEN)
    def reply(self, reply: str) -> None:
        """By its bytes, as the tokenizer never would."""
        self.ours.remember(self.ours.chat(talk(self.chat)), reply, list(reply.encode()))
        self.chat.append({"role": "assistant", "content": reply})

    @rule(cut=st.integers(1, 6))
    def branch(self, cut: int) -> None:
        self.chats.append(list(self.chat[: max(1, len(self.chat) - cut)]))
        self.number = len(self.chats) - 1

    @rule(number=st.integers(0, 9))
    def turn_to(self, number: int) -> None:
        self.number = number

    @rule()
    def forget(self) -> None:
        self.ours.forget(self.ours.continued(talk(self.chat)), [])

    @rule(use_reply_tokens=st.booleans(), salt=st.sampled_from(["", "b"]))
    def ask(self, use_reply_tokens: bool, salt: str) -> None:
        ours, plain = (
            one.chat(talk(self.chat, salt=salt), use_reply_tokens=use_reply_tokens) for one in (self.ours, self.plain)
        )
        assert told(ours) == told(plain)

    @invariant()
    def the_same_prompt(self) -> None:
        assert told(self.ours.chat(talk(self.chat))) == told(self.plain.chat(talk(self.chat)))


class TalksFromBos(Talks):
    tokenizer = tokenizer_of(START, END, STOP, bos=STOP)


TestTalks = Talks.TestCase
TestTalksFromBos = TalksFromBos.TestCase
TestTalks.settings = TestTalksFromBos.settings = examples(60, stateful_step_count=25)


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where texts began to be split."""
    seen: list[int] = []
    split = SpecialTokenSplitter.split

    def of(self: SpecialTokenSplitter, rendered: str, begin: int = 0, before: Control | None = None) -> Any:
        seen.append(begin)
        return split(self, rendered, begin, before)

    monkeypatch.setattr(SpecialTokenSplitter, "split", of)
    return seen


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def test_a_longer_conversation_is_split_where_it_is_new(begins: list[int]) -> None:
    ours = prompter(tokenizer_of(START, END, STOP), ReplyTokensMemo())
    first = ours.chat(talk([user("the world"), assistant("hello"), user("and now?")]))
    ours.chat(talk([user("the world"), assistant("hello"), user("and then?")]))
    ours.chat(talk([user("the world"), assistant("hello"), user("and now?"), assistant("a"), user("b")]))
    until = first.text.index("user\nand now?")
    assert begins == [0, until, until]


def test_replies_in_other_conversations_change_nothing(begins: list[int]) -> None:
    """Nor those behind what is remembered."""
    ours = prompter(tokenizer_of(START, END, STOP), ReplyTokensMemo())
    other = ours.chat(talk([user("else")]))
    ours.remember(other, "the world", list(b"the world"))
    chat = [user("the world"), assistant("hello"), user("and now?")]
    prompt = ours.chat(talk(chat))
    until = prompt.text.index("user\nand now?")
    begins.clear()
    ours.remember(other, "the he", list(b"the he"))
    ours.remember(prompt, "the he", list(b"the he"))
    begins.clear()
    ours.chat(talk([*chat, assistant("the he"), user("b")]))
    assert begins == [until]
    begins.clear()
    ours.remember(ours.chat(talk(chat[:1])), "hello", list(b"hello"))
    begins.clear()
    ours.chat(talk([*chat, assistant("the he"), user("c")]))
    assert begins == [0], "its first reply is spelled otherwise now"


def test_what_is_in_use_keeps_its_spelling() -> None:
    """Of replies in a conversation that goes on, although they are not looked up any more."""
    tokenizer = tokenizer_of(START, END, STOP)
    reply_tokens = ReplyTokensMemo(limit=2)
    ours = prompter(tokenizer, reply_tokens)
    chat: list[Message] = [user("the world")]
    ours.remember(ours.chat(talk(chat)), "the he", list(b"the he"))
    chat += [assistant("the he"), user("more")]
    for number in range(5):
        tokens = ours.chat(talk([*chat, user(f"{number}")])).tokens.tolist()
        assert [END.id, *b"\n", START.id, *b"assistant\nthe he", END.id] in [tokens[at : at + 20] for at in range(len(tokens))]
        ours.remember(ours.chat(talk([user(f"{number}")])), "the", list(b"the"))


def test_spelled_and_not_are_kept_apart() -> None:
    tokenizer, reply_tokens = tokenizer_of(START, END, STOP), ReplyTokensMemo()
    shared, plain = prompter(tokenizer, reply_tokens), prompter(tokenizer, reply_tokens, memo_bytes=0)
    chat: list[Message] = [user("the world")]
    shared.remember(shared.chat(talk(chat)), "the he", list(b"the he"))
    chat += [assistant("the he"), user("more")]
    for use_reply_tokens in (True, False, True, False):
        assert told(shared.chat(talk(chat), use_reply_tokens=use_reply_tokens)) == told(
            plain.chat(talk(chat), use_reply_tokens=use_reply_tokens)
        )


def test_what_is_remembered_at_once_is_forgotten_too() -> None:
    ours = prompter(tokenizer_of(START, END, STOP), ReplyTokensMemo())
    chat: list[Message] = [user("the world")]
    [learned] = ours.remember(ours.chat(talk(chat)), "the he", list(b"the he"))
    chat += [assistant("the he"), user("more")]
    ours.chat(talk(chat))
    assert ours.forget(ours.continued(talk(chat)), []) == [learned.key]
    assert list(b"the he") not in [ours.chat(talk(chat)).tokens.tolist()[at:][:6] for at in range(40)]


def test_no_control_token_reaches_over_what_is_remembered() -> None:
    ours, reply_tokens = tokenizer_of(START, END, STOP, LONGER), ReplyTokensMemo()
    shared = prompter(ours, reply_tokens)
    shared.chat(talk([user("a"), user("b")]))
    chat = [user("a"), assistant("b")]
    assert told(shared.chat(talk(chat))) == told(prompter(ours, reply_tokens, memo_bytes=0).chat(talk(chat)))


def test_the_least_recently_used_go_first() -> None:
    one, two, three = (TokenisedPrefix(text=name * 1000, tokens=as_tokens([0])) for name in "abc")
    known = PrefixMemo(int(2.5 * one.size))
    known.add("", one)
    known.add("", two)
    assert known.find("", one.text + "more") is one
    known.add("", three)
    assert known.find("", two.text) is None
    assert known.find("", one.text) is one
    assert known.find("other", one.text) is None
    known.add("", TokenisedPrefix(text="d" * 10_000))
    assert known.find("", one.text) is one, "what is too large puts nothing out"
    longer = TokenisedPrefix(text=one.text + "b", tokens=one.tokens)
    known.add("", longer, instead=one)
    assert known.find("", longer.text) is longer
    assert known.find("", one.text) is None
