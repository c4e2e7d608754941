"""Talks: the conversations of the clients, and how they go on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from headstart.interfaces.conversation import Conversation, Message
from headstart.prompt.chat_template import Template
from headstart.testing.fake_engine import CHATML, FakeTokenizer
from headstart.testing.simulation.history import Happening

WORDS = (
    " the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one"
).split()
_TEMPLATE = "{% if style %}{{ 'style ' + style + '\n' }}{% endif %}" + CHATML
TEMPLATES = _TEMPLATE, _TEMPLATE.replace("<|im_end|>\n", "<|im_end|>")
"""Prompts of both begin with the same system prompt."""
SPOKEN = tuple(f" {word}" for word in WORDS)
SYSTEM = 24
"""Words of a system prompt."""
LONGEST = 12
"""Most messages of a conversation. A longer one begins anew."""


@cache
def tokenizer(template: int = 0) -> FakeTokenizer:
    """The tokenizer of all models, with one of the templates."""
    return FakeTokenizer((*SPOKEN, "user\n", "assistant\n", "system\n"), chat_template=TEMPLATES[template])


def compiled(source: str, names: Mapping[str, str]) -> Template:
    """A template, compiled once for all servers: they start often."""
    return _compiled(source, tuple(names.items()))


@cache
def _compiled(source: str, names: tuple[tuple[str, str], ...]) -> Template:
    return Template(source, dict(names))


def text(seed: int, words: int) -> str:
    return "".join(random.Random(seed).choices(SPOKEN, k=words))


@dataclass
class Talk:
    """A conversation of a tenant.

    Attributes:
        busy: a request of it runs.
        style: an option of the template.
        ids: the ids of the blocks of its latest turn.
    """

    messages: list[Message] = field(default_factory=list)
    busy: bool = False
    style: str = ""
    ids: tuple[bytes, ...] = ()

    def conversation(self, salt: str) -> Conversation:
        kwargs: dict[str, Any] = {"style": self.style} if self.style else {}
        return Conversation(tuple(self.messages), (), salt=salt, template_kwargs=kwargs)

    def go_on(self, event: Happening) -> None:
        """Changes the messages as an event says: then they wait for a reply."""
        how, said = event.how, message("user", text(event.seed, event.size))
        asked = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not self.messages or len(self.messages) > LONGEST:
            # Tenants have the same few system prompts, so each comes again.
            self.messages = [message("system", text(event.seed % 3, SYSTEM)), said]
            return
        dice = random.Random(event.seed)
        if how == "edit" and asked:
            at = dice.choice(asked)
            self.messages = [*self.messages[:at], said, *self.messages[at + 1 :]]
        elif how == "edit last" and asked:
            self.messages = [*self.messages[: asked[-1]], said]
        elif how == "branch" and asked:
            self.messages = [*self.messages[: dice.choice(asked)], said]
        elif how == "style":
            self.style = dice.choice(["", "short", "long"])
        elif how not in ("again", "retry"):
            self.messages = [*self.messages, said]
        if self.messages[-1]["role"] == "assistant":
            self.messages = self.messages[:-1] if how == "again" else [*self.messages, said]

    def answered(self, reply: str) -> None:
        self.messages = [*self.messages, message("assistant", reply)]


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
