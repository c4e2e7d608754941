"""Conversations, written shortly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headstart.interfaces.conversation import Conversation, Message, Tool


def talk(
    messages: Iterable[Message],
    *,
    tools: Iterable[Tool] | None = None,
    salt: str = "",
    prefill: str = "",
    breakpoints: Sequence[tuple[int, int]] = (),
    **template_kwargs: Any,
) -> Conversation:
    return Conversation(
        tuple(messages),
        tuple(tools or ()),
        salt=salt,
        prefill=prefill,
        breakpoints=tuple(breakpoints),
        template_kwargs=template_kwargs,
    )
