"""Record: an earlier prompt with its reply. Explanations compare new prompts with records."""

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
    """A hash that is equal for messages with the same meaning. Valid within one process only."""
    content, calls = message.get("content") or "", nameless(message).get("tool_calls")
    text = content if isinstance(content, str) else repr(content)
    return hash((message.get("role"), text, repr(calls) if calls else ""))


def nameless(message: Message) -> dict[str, Any]:
    """A message without the ids of its calls, which differ between replies with the same meaning."""
    kept = {name: value for name, value in message.items() if name != "tool_call_id"}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [{name: value for name, value in call.items() if name != "id"} for call in kept["tool_calls"]]
    return kept


@dataclass(frozen=True)
class Record:
    """An earlier prompt with its reply.

    Attributes:
        root: parent of its first block, which depends on salt and fingerprint.
        text, tokens: those of prompt and reply together.
        canonical: leading tokens whose KV was canonical when the request ended.
        reply: the reply's text, the end of `text`.
        returned: the message that the client is expected to send back; None if it is just the text.
        source: the conversation; None for a raw text.
        id, alias: ids of the request and of its answer.
        tenant: the tenant; "" if unknown.
        salt, session: those of the request. A session is a hint; "" if there was none.
        time: when it ended, by the caller's clock.
        reports: the caller's reports of all choices, by number; one object for all of them.
        written: when it was stored first, in seconds since 1970.
        ids: of the full blocks of `tokens`.
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
    ids: tuple[BlockId, ...] = ()

    @property
    def answer(self) -> Message:
        """The reply as a message of the assistant."""
        return self.returned or {"role": "assistant", "content": self.reply}

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """The keys of all messages, the reply's last."""
        messages = self.source.messages if self.source is not None else ()
        return tuple(map(key_of, (*messages, self.answer) if self.reply else messages))

    @cached_property
    def known(self) -> frozenset[int]:
        """The keys as a set."""
        return frozenset(self.keys)

    @cached_property
    def size(self) -> int:
        """Approximate bytes in memory."""
        source = self.source
        parts = (source.messages, source.tools, source.template_kwargs) if source is not None else ()
        return sys.getsizeof(self.text) + sys.getsizeof(self.reply) + self.tokens.nbytes + bytes_of(parts)
