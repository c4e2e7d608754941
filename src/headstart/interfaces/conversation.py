"""Conversation: one type from the dialect that takes it in to the prompt that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, Any]
"""In OpenAI's chat form: `role` (developer, system, user, assistant or tool), `content` (a text, or a list of text parts),
`reasoning_content`, `tool_calls`, `tool_call_id`, `name`. Hints to a cache may be anywhere in it."""

Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters", "strict"}}`."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools a reply may call.

    Attributes:
        mode: `required`: at least one call, of `name` if that is given.
        parallel: more than one call may be made.
        allowed: only these; None for all. The prompt lists the others too, so that it stays the same.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None

    @classmethod
    def among(cls, mode: Literal["auto", "required"], allowed: tuple[str, ...], parallel: bool) -> ToolChoice:
        """A choice among some tools. If a call is required and one tool is allowed, the choice names that tool."""
        return cls(mode, allowed[0] if mode == "required" and len(allowed) == 1 else None, parallel, allowed)


@dataclass(frozen=True, slots=True)
class Format:
    """What the text of a reply must be.

    Attributes:
        text: a JSON schema, a regular expression or a grammar, as `kind` says.
        strict: a schema with a keyword that cannot be guaranteed is refused.
        param: the caller's name for it, which errors use.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar"]
    text: str = ""
    strict: bool = False
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a model is asked to continue.

    Attributes:
        template_kwargs: variables for the chat template.
        salt: the tenant's; nothing that one salt computed is used for another.
        breakpoints: where the caller expects to come back to: (number of a message, characters of its content).
        continues: the last message is the beginning of the reply, until it is normalized.
        prefill: the beginning of the reply, which the caller has written.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    format: Format | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    salt: str = ""
    breakpoints: tuple[tuple[int, int], ...] = ()
    continues: bool = False
    prefill: str = ""
