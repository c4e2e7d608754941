"""Continuation: a finished turn, rendered as the next request will send it.

A template may strip or rewrite a reply once another message follows. So the conversation is rendered with a next message that
nobody has sent yet. One rendering answers three questions: how the template writes the reply, which tokens all next prompts
begin with, and which reply tokens no prompt needs any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headstart.interfaces.conversation import Conversation, Message

_NEXT, _OTHER = "1 headstart next message", "2 headstart next message"
"""Two contents of the next message. Their first tokens differ."""

Render = Callable[[str], tuple[Sequence[Message], str]]
"""The escaped messages and the rendered text of a conversation whose last message has this content."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A conversation with a next message.

    Attributes:
        source: the conversation, without the next message.
        messages: its messages and the next one, escaped.
        rendered: their text.
        end: where the content of the next message begins in that text.
        rendered_other: the text with another content, if the template does not write the content unchanged.
    """

    source: Conversation
    messages: Sequence[Message]
    rendered: str
    end: int
    rendered_other: str | None = None

    @classmethod
    def of(cls, source: Conversation, render: Render) -> Continuation:
        """Renders once; twice if the template does not write the content unchanged."""
        messages, rendered = render(_NEXT)
        end = rendered.rfind(_NEXT)
        if end >= 0:
            return cls(source, messages, rendered, end)
        other = render(_OTHER)[1]
        end = next((at for at, pair in enumerate(zip(rendered, other, strict=False)) if pair[0] != pair[1]), len(rendered))
        return cls(source, messages, rendered, end, other)

    @property
    def other(self) -> str:
        """The text with another content of the next message."""
        if self.rendered_other is not None:
            return self.rendered_other
        return self.rendered[: self.end] + _OTHER + self.rendered[self.end + len(_NEXT) :]


def returned(source: Conversation, message: Message) -> Conversation:
    """A conversation with the reply to it, as the next request will send it."""
    return replace(source, messages=(*source.messages, message), breakpoints=(), prefill="")
