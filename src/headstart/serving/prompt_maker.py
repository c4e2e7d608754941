"""Prompt maker: the settings of a server, and a model's tokenizer → prompts that fit. No engine is needed.

A replica of a fleet and the front before it make the same prompts, because both make them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from headstart import templates
from headstart.config import Overflow, Reuse, Settings
from headstart.errors import ContextTooLong, InvalidRequest
from headstart.interfaces.conversation import Conversation
from headstart.interfaces.tokenizer import Tokenizer
from headstart.prompt.builder import Prompt, Prompter
from headstart.prompt.chat_template import Template
from headstart.serving.gate import Gate
from headstart.templates import ChatTemplate

TRUNCATED_SHARE = 0.75
"""Share of the context that a truncated conversation may fill. The rest is for the reply."""


@dataclass(frozen=True)
class PromptMaker:
    """Makes the prompts of one model. Thread-safe.

    Attributes:
        chat_template: the template that renders conversations, and its origin.
        ctx: tokens that a conversation may hold.
        gate: is shut before the tokenizer is freed.
    """

    prompter: Prompter
    chat_template: ChatTemplate
    reuse: Reuse
    overflow: Overflow
    ctx: int
    gate: Gate = field(default_factory=Gate)

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: Settings, ctx: int) -> PromptMaker:
        """Uses the settings `chat_template`, `reuse` and `overflow`.

        Raises:
            ConfigError: the chat template is missing or broken.
        """
        chosen = settings.template() or templates.of_model(tokenizer.chat_template)
        template = Template(chosen.source, tokenizer.names)
        prompter = Prompter(tokenizer, template, use_reply_tokens=settings.reuse == "fast")
        return cls(prompter, chosen, settings.reuse, settings.overflow, ctx)

    def chat(self, conversation: Conversation, *, use_reply_tokens: bool = True) -> Prompt:
        """Renders and tokenises a conversation. It takes milliseconds.

        Args:
            use_reply_tokens: whether earlier replies in it keep the tokens that the model produced.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
            ContextTooLong: the conversation exceeds the context, and `overflow` is `error` (or its last exchange does).
            Unavailable: the gate is shut.
        """
        with self.tokenizer_open():
            if self.overflow == "truncate":
                prompt = self.prompter.truncated_chat(
                    conversation, int(self.ctx * TRUNCATED_SHARE), use_reply_tokens=use_reply_tokens
                )
            else:
                prompt = self.prompter.chat(conversation, use_reply_tokens=use_reply_tokens)
            return self.check(prompt, "messages")

    def shared_prefix(self, conversation: Conversation) -> Prompt:
        """The prefix that all continuations of a conversation share. Raises what `chat` raises."""
        with self.tokenizer_open():
            return self.check(self.prompter.shared_prefix(conversation), "messages")

    def text(self, text: str | Sequence[int], *, salt: str = "", use_reply_tokens: bool = True) -> Prompt:
        """Tokenises a raw text, or takes tokens as they are. The names of control tokens become these tokens.

        Raises:
            InvalidRequest: an empty prompt, or unknown tokens.
            ContextTooLong: it exceeds the context.
            Unavailable: the gate is shut.
        """
        with self.tokenizer_open():
            if isinstance(text, str):
                return self.check(self.prompter.text(text, salt=salt, use_reply_tokens=use_reply_tokens), "prompt")
            return self.check(self.prompter.tokens(text, salt=salt), "prompt")

    @contextmanager
    def tokenizer_open(self) -> Iterator[Tokenizer]:
        """Keeps the tokenizer from being freed while it is in use. Raises Unavailable if the gate is shut."""
        with self.gate.entered():
            yield self.prompter.tokenizer

    def check(self, prompt: Prompt, param: str) -> Prompt:
        """The same prompt.

        Raises:
            InvalidRequest: it is empty.
            ContextTooLong: it exceeds the context.
        """
        if not len(prompt):
            raise InvalidRequest("The prompt is empty.", param=param)
        if len(prompt) >= self.ctx:
            raise ContextTooLong(len(prompt), self.ctx, param=param, truncates=self.overflow == "truncate")
        return prompt
