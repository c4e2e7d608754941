"""Record: an earlier prompt with its reply, as explanations look back at it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headstart.interfaces.conversation import Conversation, Message
from headstart.interfaces.tokens import BlockId, Tokens
from headstart.output.json_values import bytes_of


def key_of(message: Message) -> int:
    """Equal for messages that say the same. Of use within one process only."""
    content, calls = message.get("content") or "", nameless(message).get("tool_calls")
    said = content if isinstance(content, str) else repr(content)
    return hash((message.get("role"), said, repr(calls) if calls else ""))


def nameless(message: Message) -> dict[str, Any]:
    """A message without the ids of calls: another reply that says the same has others."""
    said = {name: value for name, value in message.items() if name != "tool_call_id"}
    if said.get("tool_calls"):
        said["tool_calls"] = [{name: value for name, value in call.items() if name != "id"} for call in said["tool_calls"]]
    return said


@dataclass(frozen=True)
class Record:
    """An earlier prompt with its reply.

    Attributes:
        root: parent of its first block: no other salt, no other fingerprint.
        text, tokens: of prompt and reply together.
        canonical: leading tokens whose rows were canonical when it ended.
        reply: the reply's text, the end of `text`.
        returned: the message that the client is expected to send back; None for the text as it is.
        source: the conversation; None for a raw text.
        id, alias: the request's, and its answer's.
        tenant: who asked; "" if nobody knows.
        salt, session: the request's; a session is a hint, "" if there was none.
        time: when it ended, by the caller's clock.
        reports: the caller's, of all choices of the prompt by their numbers: one object for all of them.
        written: when it was first kept, in seconds since 1970.
    """

    root: BlockId
    text: str
    tokens: Tokens
    canonical: int = 0
    reply: str = ""
    returned: Message | None = None
    source: Conversation | None = None
    id: str = ""
    alias: str = ""
    tenant: str = ""
    salt: str = ""
    session: str = ""
    time: float = 0.0
    reports: Mapping[int, object] = field(default_factory=dict)
    written: float = 0.0

    @property
    def answer(self) -> Message:
        """The reply as a message."""
        return self.returned or {"role": "assistant", "content": self.reply}

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Of all messages, the reply's last."""
        messages = self.source.messages if self.source is not None else ()
        return tuple(map(key_of, (*messages, self.answer) if self.reply else messages))

    @cached_property
    def known(self) -> frozenset[int]:
        """The keys, in no order."""
        return frozenset(self.keys)

    @cached_property
    def size(self) -> int:
        """Bytes, about."""
        source = self.source
        parts = (source.messages, source.tools, source.template_kwargs) if source is not None else ()
        return sys.getsizeof(self.text) + sys.getsizeof(self.reply) + self.tokens.nbytes + bytes_of(parts)
