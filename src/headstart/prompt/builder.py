"""Prompt: messages → text → tokens.

    messages ──chat template──▶ text ──tokenizer──▶ tokens

The texts of control tokens *inside* a caller's strings are escaped before rendering and become plain text. So no message can
forge a turn. What a template may do with a string is allowed for: see `escape`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Conversation, Message, Tool
from headstart.interfaces.landmarks import Landmarks
from headstart.interfaces.tokenizer import Tokenizer
from headstart.interfaces.tokens import Tokens, as_tokens, common_prefix
from headstart.output.parser import meaning, parse
from headstart.prompt.adaptation import adapt
from headstart.prompt.chat_template import Template
from headstart.prompt.continuation import Continuation, returned
from headstart.prompt.escape import ESCAPE, Escaper
from headstart.prompt.family_detection import family_of
from headstart.prompt.landmarks import contents, landmarks
from headstart.prompt.overflow import TruncationMemo, exchanges, truncate_history
from headstart.prompt.reply_tokens import ReplyTokensMemo, ReplyTokensRecord, head_digest, text_digest
from headstart.prompt.tokenize import PromptTokenizer

_NONE = as_tokens([])

_BLANK = re.compile(r"\A\s|\s\Z")


@dataclass(frozen=True)
class Prompt:
    """A text with its tokens.

    Attributes:
        rendered: the text as the template wrote it, with control tokens of callers escaped.
        salt: the tenant's; part of every block's id.
        head: digest of the salt and of the tokens up to the last control token. With `lead`, it is the key of a reply's tokens.
        lead: the text between that control token and the reply.
        lead_tokens: the tokens of `lead`; a view of `tokens`.
        content_starts: for each message, where its content begins in `text`; -1 if the text does not contain it unchanged.
        dropped: messages that `--overflow truncate` left out.
        landmarks: positions that later prompts are likely to share.
        source: the conversation of this prompt; None for a raw text.
    """

    rendered: str
    tokens: Tokens
    salt: str = ""
    head: bytes = b""
    lead: str = ""
    lead_tokens: Tokens = field(default_factory=lambda: _NONE)
    content_starts: tuple[int, ...] = ()
    dropped: int = 0
    landmarks: Landmarks = field(default_factory=Landmarks)
    source: Conversation | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> str:
        return Escaper.unescape(self.rendered)


@dataclass
class Prompter:
    """Builds prompts for one model. Thread-safe.

    Attributes:
        family: how the model writes reasoning and tool calls.
        visible: ids of the control tokens that the reply parser needs as text.
        controls: ids of all control tokens, by their texts.

    Args:
        use_reply_tokens: whether earlier replies keep the tokens that the model produced (fast mode).
        memo_bytes: most bytes of remembered texts and tokens.
    """

    tokenizer: Tokenizer
    template: Template
    use_reply_tokens: bool = True
    memo_bytes: int = 64 << 20
    reply_tokens: ReplyTokensMemo = field(default_factory=ReplyTokensMemo)

    def __post_init__(self) -> None:
        controls = sorted(self.tokenizer.controls, key=lambda control: -len(control.text))
        self._prompt_tokenizer = PromptTokenizer(self.tokenizer, controls, self.reply_tokens, self.memo_bytes)
        self._escaper = Escaper(controls, self.template.replaced)
        self._ids = [control.id for control in controls]
        self.controls = {control.text: control.id for control in controls if control.text}
        self.family = family_of(self.template)
        self.visible = frozenset(control.id for control in controls if control.text in self.family.visible)
        self._truncations = TruncationMemo()

    def look_elsewhere(self, find: Callable[[str, bytes], ReplyTokensRecord | None]) -> None:
        """Sets where the tokens of replies are found that another server has made: see `PromptTokenizer.elsewhere`."""
        self._prompt_tokenizer.elsewhere = find

    def clear(self) -> None:
        """Drops all remembered texts, tokens and reply tokens. Later prompts take longer; nothing else changes."""
        for _ in self.clearing():
            pass

    def clearing(self) -> Iterator[None]:
        """Does the same in pieces."""
        self.reply_tokens.clear()
        yield from self._prompt_tokenizer.clearing()
        yield from self._truncations.clearing()

    def chat(
        self,
        conversation: Conversation,
        *,
        generation: bool = True,
        use_reply_tokens: bool = True,
    ) -> Prompt:
        """The prompt of a conversation.

        Args:
            generation: whether the prompt ends with the generation header, where the reply begins.
            use_reply_tokens: whether earlier replies keep the tokens that the model produced.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """
        safe, rendered = self._render(conversation, generation=generation)
        content_starts = tuple(contents(safe, rendered))
        where = conversation.breakpoints
        prompt = self._build(
            rendered, conversation.salt, content_starts, safe, use_reply_tokens=use_reply_tokens, breakpoints=where
        )
        return replace(prompt, source=conversation)

    def _render(self, source: Conversation, *, generation: bool) -> tuple[Sequence[Message], str]:
        """The messages with control tokens escaped, and their rendered text."""
        if not source.messages:
            raise InvalidRequest("A conversation needs at least one message.", param="messages")
        safe = self._escaper.escape(list(source.messages))
        tools = self._escaper.escape(list(source.tools)) if source.tools else None
        messages, tools = adapt(self.template, self.family, safe, tools)
        variables = self._escaper.escape(dict(source.template_kwargs))
        rendered = self.template.render(messages, tools=tools, generation=generation, variables=variables)
        if source.prefill:
            reasoning = self.family.reasoning if self.family.opened(rendered) else None
            rendered += (reasoning.ending if reasoning else "") + self._escaper.escape_last(source.prefill)
        return safe, rendered

    def continued(self, conversation: Conversation, *, parsed: Message | None = None) -> Continuation:
        """A conversation that ends with a reply, rendered with a next message: a tool's result if the reply calls a tool.

        Args:
            parsed: the message that the reply was parsed into; it is parsed here if it was not before.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        messages = conversation.messages
        calls = self._calls(parsed or messages[-1], () if parsed else conversation.tools)
        answer = {"role": "tool", "tool_call_id": calls[0].get("id")} if calls else {"role": "user"}

        def render(content: str) -> tuple[Sequence[Message], str]:
            return self._render(replace(conversation, messages=(*messages, {**answer, "content": content})), generation=True)

        return Continuation.of(conversation, render)

    def shared_prefix(self, conversation: Conversation) -> Prompt:
        """The prefix that all continuations of a conversation share.

        The prompt has one token more than the shared prefix, so that a block boundary at its very end counts too. If a
        conversation waits for a reply, all of it is the shared prefix. Replies have the tokenizer's tokens, not the model's.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """
        messages = conversation.messages
        if not messages or messages[-1].get("role") in ("user", "tool"):
            return self.chat(conversation, use_reply_tokens=False)
        return self.common(self.continued(conversation))

    def common(self, continuation: Continuation) -> Prompt:
        """The prompt of all that the continuations of a conversation share, as `shared_prefix` returns it."""
        source, messages = continuation.source, continuation.messages
        content_starts = tuple(contents(messages, continuation.rendered))
        one = self._build(
            continuation.rendered, source.salt, content_starts, messages, use_reply_tokens=False, breakpoints=source.breakpoints
        )
        other = self._prompt_tokenizer.tokenise(continuation.other, source.salt, use_reply_tokens=False)
        length = common_prefix(one.tokens, other.tokens)
        return replace(self.tokens(one.tokens[: length + 1].tolist(), salt=source.salt), landmarks=one.landmarks)

    def _calls(self, reply: Message, tools: Sequence[Tool]) -> Sequence[Mapping[str, Any]]:
        """The tool calls of a reply, also those that are still in its text. A tool's result follows them."""
        if reply.get("tool_calls") or not tools:
            return reply.get("tool_calls") or ()
        return parse(self.family, reply.get("content") or "", tools, thinking=False).get("tool_calls") or ()

    def truncated_chat(self, conversation: Conversation, limit: int, *, use_reply_tokens: bool = True) -> Prompt:
        """The prompt of a conversation after `truncate_history`. The cost of a turn does not grow with the number of turns.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """
        messages = conversation.messages
        latest: tuple[tuple[Message, ...], Prompt] | None = None

        def build(part: Sequence[Message]) -> Prompt:
            nonlocal latest
            if latest is None or latest[0] != tuple(part):
                bare = replace(conversation, messages=tuple(part), breakpoints=())
                latest = (bare.messages, self.chat(bare, use_reply_tokens=use_reply_tokens))
            return latest[1]

        settings = conversation.tools, conversation.salt, conversation.template_kwargs, conversation.prefill
        root = text_digest(repr((limit, use_reply_tokens, *settings)))
        kept = truncate_history(messages, lambda part: len(build(part)), limit, self._truncations, root)
        first = len(exchanges(messages)[0])
        prompt = build(kept.messages)
        if left := kept.standing(first, conversation.breakpoints):
            prompt = self.chat(
                replace(conversation, messages=kept.messages, breakpoints=tuple(left)), use_reply_tokens=use_reply_tokens
            )
        content_starts = (*prompt.content_starts[:first], *[-1] * kept.dropped, *prompt.content_starts[first:])
        return replace(prompt, content_starts=content_starts, dropped=kept.dropped)

    def text(self, text: str, *, salt: str = "", use_reply_tokens: bool = True) -> Prompt:
        """The prompt of a raw text. The texts of control tokens in it become control tokens."""
        return self._build(_marked(text), salt, (), (), use_reply_tokens=use_reply_tokens)

    def tokens(self, tokens: Sequence[int], *, salt: str = "") -> Prompt:
        """The prompt that consists of these tokens.

        Raises:
            InvalidRequest: a token that the model does not have.
        """
        if any(not 0 <= token < self.tokenizer.n_vocab for token in tokens):
            raise InvalidRequest(f"Tokens must lie in [0, {self.tokenizer.n_vocab}).", param="prompt")
        given = as_tokens(tokens)
        return Prompt(_marked(self._text(given)), given, salt)

    def remember(
        self,
        prompt: Prompt,
        reply: str,
        tokens: Sequence[int],
        message: Message | None = None,
        *,
        parsed: Message | None = None,
        continuation: Continuation | None = None,
    ) -> list[ReplyTokensRecord]:
        """Remembers the tokens of a reply, segment by segment between control tokens, where the tokenizer chooses others.

        Args:
            tokens: the tokens whose bytes were completely delivered in `reply`.
            message: the message that the caller will send back, if it is more than the reply's text. It is found by the text
                that the template writes for it. White space or the order of arguments may then differ from the reply.
            parsed: the message that `reply` was parsed into; it is parsed here if it was not before.
            continuation: the conversation with `message`, if it is rendered already.

        Returns:
            What was remembered.
        """
        made = as_tokens(tokens)
        if not self.use_reply_tokens or not prompt.head or not reply.startswith(self._text(made)):
            return []
        cuts = np.flatnonzero(np.isin(made, self._ids)).tolist()
        parts = [made[begin:end] for begin, end in zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(made)], strict=True)]
        texts = written = [self._text(part) for part in parts]
        plain: Message = {"role": "assistant", "content": reply}
        message = message or plain
        unchanged = message == plain and _BLANK.search(reply) is None
        if self._text(made) == reply and prompt.source is not None and not unchanged:
            try:
                continuation = continuation or self.continued(returned(prompt.source, message), parsed=parsed)
                written = self._written(prompt, continuation, reply, parsed, made[cuts].tolist()) or texts
            except InvalidRequest:  # the template refuses what the model has written
                written = texts
        learned = []
        for number, part in enumerate(parts):
            for text in dict.fromkeys(filter(None, (texts[number], written[number]))) if len(part) else ():
                chosen = as_tokens(self.tokenizer.tokenize(prompt.lead + text))
                if np.array_equal(np.concatenate([prompt.lead_tokens, part]), chosen):
                    self.reply_tokens.forget(prompt.head, prompt.lead, text)
                else:
                    whole = text != texts[number]
                    learned.append(self.reply_tokens.remember(prompt.head, prompt.lead, text, part, whole=whole))
            upto = cuts[number] + 1 if number < len(cuts) else len(made)
            head = head_digest(prompt.salt).update(np.concatenate([prompt.tokens, made[:upto]]).tobytes()).digest()
            prompt = replace(prompt, head=head, lead="", lead_tokens=_NONE)
        return learned

    def _written(
        self, prompt: Prompt, continuation: Continuation, reply: str, parsed: Message | None, controls: Sequence[int]
    ) -> list[str]:
        """The text that the template writes after the prompt for a returned reply, in segments between the same control tokens.
        Empty if that text has another meaning."""
        if not self._closes or not continuation.rendered.startswith(prompt.rendered):
            return []
        rest = continuation.rendered[len(prompt.rendered) : continuation.end]
        segments = [*islice(self._prompt_tokenizer.splitter.split(rest), len(controls) + 1)]
        # Without a further control token, nobody could tell where the reply ends and the template continues.
        found = [control for _, _, control in segments if control is not None]
        if len(found) != len(controls) + 1 or [control.id for control in found[:-1]] != [*controls]:
            return []
        texts = [text for _, text, _ in segments]
        text = "".join(text + control.text for text, control in zip(texts, found[:-1], strict=False)) + texts[-1]
        if text != reply:
            tools, thinking = continuation.source.tools, self.family.opened(prompt.rendered)
            parsed = parsed or parse(self.family, reply, tools, thinking=thinking)
            if meaning(parse(self.family, text, tools, thinking=thinking)) != meaning(parsed):
                return []
        return texts

    @cached_property
    def _closes(self) -> bool:
        """Whether the template writes a control token directly behind a reply."""
        probe = "headstart_reply"
        try:
            messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": probe})
            rendered = self._render(Conversation(messages), generation=False)[1]
        except InvalidRequest:
            return False
        _, found, rest = rendered.rpartition(probe)
        return bool(found) and any(control is not None for _, _, control in self._prompt_tokenizer.splitter.split(rest))

    def _text(self, tokens: Tokens) -> str:
        return b"".join(map(self.tokenizer.token_bytes, tokens.tolist())).decode("utf-8", "replace")

    def forget(self, continuation: Continuation, learned: Sequence[ReplyTokensRecord]) -> list[bytes]:
        """Drops the reply tokens of a conversation, and those that were `learned` of its last reply; returns their keys."""
        forgotten = [record.key for record in learned]
        if self.use_reply_tokens and len(self.reply_tokens):
            text, salt = continuation.rendered[: continuation.end], continuation.source.salt
            self._prompt_tokenizer.tokenise(text, salt, use_reply_tokens=True, forget=forgotten)
            self.reply_tokens.drop(learned)
        return [*dict.fromkeys(forgotten)]

    def _build(
        self,
        rendered: str,
        salt: str,
        content_starts: tuple[int, ...],
        messages: Sequence[Message],
        *,
        use_reply_tokens: bool,
        breakpoints: Sequence[tuple[int, int]] = (),
    ) -> Prompt:
        # The next prompt has new text only after the start of the last message.
        stable = max(content_starts, default=0)
        made = self._prompt_tokenizer.tokenise(
            rendered, salt, use_reply_tokens=use_reply_tokens and self.use_reply_tokens, stable=stable
        )
        return Prompt(
            rendered=rendered,
            tokens=made.tokens,
            salt=salt,
            head=made.head,
            lead=made.lead,
            lead_tokens=made.tokens[made.leading :],
            content_starts=content_starts,
            landmarks=landmarks(messages, content_starts, made.places, breakpoints) if messages else Landmarks(),
        )


def _marked(text: str) -> str:
    """A text in which nothing is escaped, as rendered text is written."""
    return text.replace(ESCAPE, ESCAPE * 2)
