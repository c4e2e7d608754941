"""Prompt: messages → text → tokens.

Spellings of control tokens *inside* the caller's strings are escaped before rendering and end as plain text: nobody forges a
turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Conversation, Message, Tool
from headstart.interfaces.engine import Tokenizer
from headstart.interfaces.landmarks import Landmarks
from headstart.interfaces.tokens import Tokens, as_tokens, common_prefix
from headstart.output.parser import Parser, meaning, message_of
from headstart.prompt.chat_template import Template
from headstart.prompt.escape import MARK, Escaper
from headstart.prompt.family_detection import adapt, family_of
from headstart.prompt.landmarks import contents, landmarks
from headstart.prompt.overflow import Replays, exchanges, slide
from headstart.prompt.reply_tokens import Spelled, Spellings, head_digest, text_digest
from headstart.prompt.tokenize import Piecewise

_NONE = as_tokens([])

_BLANK = re.compile(r"\A\s|\s\Z")

_SENTINELS = ("1", "2")
"""Two messages that have no token in common."""


@dataclass(frozen=True)
class Prompt:
    """A text with its tokens.

    Attributes:
        salt: the tenant's; part of every block's id.
        head: digest of salt and tokens up to the last control token: together with `lead`, what a reply hangs on.
        lead: the text after that control token: what comes right before the reply.
        lead_tokens: those of `lead`; a view of `tokens`.
        marks: for each message, where its content begins in `text`; -1 if it is not there as it was given.
        dropped: messages that `--overflow slide` left out.
        landmarks: where the conversation may part from others, or from what is sent back of it.
        source: the conversation that it is the prompt of.
    """

    text: str
    tokens: Tokens
    salt: str = ""
    head: bytes = b""
    lead: str = ""
    lead_tokens: Tokens = field(default_factory=lambda: _NONE)
    marks: tuple[int, ...] = ()
    dropped: int = 0
    landmarks: Landmarks = field(default_factory=Landmarks)
    source: Conversation | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def locate(self, offset: int) -> tuple[int | None, int]:
        """The message that `offset` lies in, and the offset within its content; (None, offset) before the first."""
        for number in range(len(self.marks) - 1, -1, -1):
            if 0 <= self.marks[number] <= offset:
                return number, offset - self.marks[number]
        return None, offset


@dataclass
class Prompter:
    """Builds prompts for one model. Thread-safe.

    Attributes:
        family: how the model writes reasoning and tool calls.
        visible: the control tokens that it does so with.
        controls: ids of all control tokens by their texts.

    Args:
        spelling: whether replies are matched by how they were really spelled (fast mode).
        memo_bytes: most bytes of remembered text with its tokens.
    """

    tokenizer: Tokenizer
    template: Template
    spelling: bool = True
    memo_bytes: int = 64 << 20
    spellings: Spellings = field(default_factory=Spellings)

    def __post_init__(self) -> None:
        controls = sorted(self.tokenizer.controls, key=lambda control: -len(control.text))
        self._piecewise = Piecewise(self.tokenizer, controls, self.spellings, self.memo_bytes)
        self._escaper = Escaper(controls)
        self._ids = [control.id for control in controls]
        self.controls = {control.text: control.id for control in controls if control.text}
        self.family = family_of(self.template)
        self.visible = frozenset(control.id for control in controls if control.text in self.family.visible)
        self._replays = Replays()

    def clear(self) -> None:
        """Forgets all texts that it has seen, and how replies in them were spelled; that costs time, and nothing else."""
        self._piecewise.clear()
        self._replays.clear()
        self.spellings.clear()

    def chat(
        self,
        conversation: Conversation,
        *,
        generation: bool = True,
        spelled: bool = True,
        forget: list[bytes] | None = None,
    ) -> Prompt:
        """The prompt of a conversation.

        Args:
            generation: whether it ends where the reply begins.
            spelled: whether earlier replies in it keep the tokens that they were made of.
            forget: replies keep their tokens for the last time, and the keys of what was known of them are added here.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """
        safe, rendered = self._render(conversation, generation=generation)
        marks = tuple(contents(safe, rendered))
        where = conversation.breakpoints
        prompt = self._build(rendered, conversation.salt, marks, safe, spelled=spelled, breakpoints=where, forget=forget)
        return replace(prompt, source=conversation)

    def _render(self, source: Conversation, *, generation: bool) -> tuple[Sequence[Message], str]:
        """Messages whose control spellings are escaped, and the text that they render to."""
        if not source.messages:
            raise InvalidRequest("A conversation needs at least one message.", param="messages")
        safe = self._escaper.escape(list(source.messages))
        tools = self._escaper.escape(list(source.tools)) if source.tools else None
        messages, tools = adapt(self.family, safe, tools, neighbours=self.template.neighbours)
        variables = self._escaper.escape(dict(source.template_kwargs))
        rendered = self.template.render(messages, tools=tools, generation=generation, variables=variables)
        if source.prefill:
            reasoning = self.family.reasoning if self.family.opened(rendered) else None
            rendered += (reasoning.ending if reasoning else "") + self._escaper.escape(source.prefill)
        return safe, rendered

    def stem(self, conversation: Conversation) -> Prompt:
        """What all continuations of a conversation begin with: what its prompts with two different next messages share.

        One token more is in it, so that it ends behind a block boundary even if all of it is on one. A conversation that waits
        for a reply is its own stem. Earlier replies are spelled as the tokenizer chooses, not as the model has.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """

        def chat(following: Sequence[Message]) -> Prompt:
            return self.chat(replace(conversation, messages=(*messages, *following)), spelled=False)

        messages = conversation.messages
        if not messages or messages[-1].get("role") in ("user", "tool"):
            return chat(())
        calls = self._calls(messages[-1], conversation.tools)
        answer = {"role": "tool", "tool_call_id": calls[0].get("id")} if calls else {"role": "user"}
        one, other = (chat([{**answer, "content": text}]) for text in _SENTINELS)
        length = common_prefix(one.tokens, other.tokens)
        return replace(self.tokens(one.tokens[: length + 1].tolist(), salt=conversation.salt), landmarks=one.landmarks)

    def _calls(self, reply: Message, tools: Sequence[Tool]) -> Sequence[Mapping[str, Any]]:
        """The calls in a reply, after which a tool's result is what comes next, also if they are in its text."""
        if reply.get("tool_calls") or not tools:
            return reply.get("tool_calls") or ()
        parser = Parser(self.family, tools=tools)
        calls: Sequence[Mapping[str, Any]] = message_of(parser.feed(reply.get("content") or "")).get("tool_calls") or ()
        return calls

    def slide(self, conversation: Conversation, limit: int, *, spelled: bool = True) -> Prompt:
        """The prompt of a conversation after the function `slide`. The cost of a turn does not grow with their number.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """
        messages = conversation.messages
        latest: tuple[tuple[Message, ...], Prompt] | None = None

        def build(part: Sequence[Message]) -> Prompt:
            nonlocal latest
            if latest is None or latest[0] != tuple(part):
                bare = replace(conversation, messages=tuple(part), breakpoints=())
                latest = (bare.messages, self.chat(bare, spelled=spelled))
            return latest[1]

        said = conversation.tools, conversation.salt, conversation.template_kwargs, conversation.prefill
        root = text_digest(repr((limit, spelled, *said)))
        kept = slide(messages, lambda part: len(build(part)), limit, self._replays, root)
        first = len(exchanges(messages)[0])
        prompt = build(kept.messages)
        if left := kept.standing(first, conversation.breakpoints):
            prompt = self.chat(replace(conversation, messages=kept.messages, breakpoints=tuple(left)), spelled=spelled)
        marks = (*prompt.marks[:first], *[-1] * kept.dropped, *prompt.marks[first:])
        return replace(prompt, marks=marks, dropped=kept.dropped)

    def text(self, text: str, *, salt: str = "", spelled: bool = True) -> Prompt:
        """The prompt of a raw text; control spellings in it are control tokens."""
        return self._build(text.replace(MARK, MARK * 2), salt, (), (), spelled=spelled)

    def tokens(self, tokens: Sequence[int], *, salt: str = "") -> Prompt:
        """The prompt of given tokens.

        Raises:
            InvalidRequest: a token that the model does not have.
        """
        if any(not 0 <= token < self.tokenizer.n_vocab for token in tokens):
            raise InvalidRequest(f"Tokens must lie in [0, {self.tokenizer.n_vocab}).", param="prompt")
        given = as_tokens(tokens)
        return Prompt(self._text(given), given, salt)

    def remember(self, prompt: Prompt, reply: str, tokens: Sequence[int], message: Message | None = None) -> list[Spelled]:
        """Learns how a reply was spelled, part by part between control tokens; returns what the tokenizer spells otherwise.

        Args:
            tokens: those whose bytes were wholly delivered in `reply`, and no more.
            message: what the caller will send back, if that is not just the reply's text. It is found again by what the
                template writes for it: then blanks, or the order of a call's arguments, may differ from what was delivered.
        """
        said = as_tokens(tokens)
        if not self.spelling or not prompt.head or not reply.startswith(self._text(said)):
            return []
        cuts = np.flatnonzero(np.isin(said, self._ids)).tolist()
        parts = [said[begin:end] for begin, end in zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(said)], strict=True)]
        texts = written = [self._text(part) for part in parts]
        message = message or {"role": "assistant", "content": reply}
        as_said = message == {"role": "assistant", "content": reply} and _BLANK.search(reply) is None
        if self._text(said) == reply and prompt.source is not None and not as_said:
            written = self._returned(prompt.source, reply, message, said[cuts].tolist()) or texts
        learned = []
        for number, part in enumerate(parts):
            for text in dict.fromkeys(filter(None, (texts[number], written[number]))) if len(part) else ():
                chosen = as_tokens(self.tokenizer.tokenize(prompt.lead + text))
                if np.array_equal(np.concatenate([prompt.lead_tokens, part]), chosen):
                    self.spellings.forget(prompt.head, prompt.lead, text)
                else:
                    whole = text != texts[number]
                    learned.append(self.spellings.remember(prompt.head, prompt.lead, text, part, whole=whole))
            upto = cuts[number] + 1 if number < len(cuts) else len(said)
            head = head_digest(prompt.salt).update(np.concatenate([prompt.tokens, said[:upto]]).tobytes()).digest()
            prompt = replace(prompt, head=head, lead="", lead_tokens=_NONE)
        return learned

    def _returned(self, source: Conversation, reply: str, message: Message, controls: Sequence[int]) -> list[str]:
        """What the template writes behind the prompt for a reply that comes back, in pieces between the same control tokens;
        nothing if that does not mean the same."""
        try:
            before = self._render(source, generation=True)[1]
            whole = replace(source, messages=(*source.messages, message), prefill="")
            after = self._render(whole, generation=False)[1]
        except InvalidRequest:
            return []
        if not after.startswith(before):
            return []
        pieces = [*islice(self._piecewise.pieces.of(after[len(before) :]), len(controls) + 1)]
        # Without a control token behind the last one, nothing tells where the reply ends and the template goes on.
        found = [control.id for _, _, control in pieces if control is not None]
        if len(found) != len(controls) + 1 or found[:-1] != [*controls]:
            return []
        thinking = self.family.opened(before)
        text = (
            "".join(piece + (control.text if control is not None else "") for _, piece, control in pieces[:-1]) + pieces[-1][1]
        )
        meant = (meaning(self.family, one, source.tools, thinking) for one in (text, reply))
        return [piece for _, piece, _ in pieces] if next(meant) == next(meant) else []

    def _text(self, tokens: Tokens) -> str:
        return b"".join(map(self.tokenizer.token_bytes, tokens.tolist())).decode("utf-8", "replace")

    def forget(self, conversation: Conversation) -> list[bytes]:
        """Forgets how the replies in a conversation were spelled; returns the keys of what was known."""
        forgotten: list[bytes] = []
        if self.spelling and len(self.spellings):
            self.chat(conversation, generation=False, forget=forgotten)
        return forgotten

    def _build(
        self,
        rendered: str,
        salt: str,
        marks: tuple[int, ...],
        messages: Sequence[Message],
        *,
        spelled: bool,
        breakpoints: Sequence[tuple[int, int]] = (),
        forget: list[bytes] | None = None,
    ) -> Prompt:
        # What follows the last message, or stands in its place, is what is new in the next prompt.
        stable = max(marks, default=0)
        made = self._piecewise.tokenise(rendered, salt, spelled=spelled and self.spelling, stable=stable, forget=forget)
        return Prompt(
            text=Escaper.unescape(rendered),
            tokens=made.tokens,
            salt=salt,
            head=made.head,
            lead=made.lead,
            lead_tokens=made.tokens[made.leading :],
            marks=marks,
            landmarks=landmarks(messages, marks, made.places, breakpoints) if messages else Landmarks(),
        )
