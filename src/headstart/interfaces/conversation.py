"""Conversation: the one type of a conversation, from the dialect that parses it to the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, Any]
"""In OpenAI's chat form: `role` (developer, system, user, assistant or tool), `content` (a text, or a list of text parts),
`reasoning_content`, `tool_calls`, `tool_call_id`, `name`. Cache hints may be anywhere in it."""

Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters", "strict"}}`."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools a reply may call.

    Attributes:
        mode: `required`: the reply has at least one call, of the tool `name` if that is set.
        parallel: whether the reply may have several calls.
        allowed: only these tools; None for all. The prompt lists the others too, so that it stays the same.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None

    @classmethod
    def among(cls, mode: Literal["auto", "required"], allowed: tuple[str, ...], parallel: bool) -> ToolChoice:
        """A choice among some tools. If a call is required and one tool is allowed, the choice names that tool."""
        return cls(mode, allowed[0] if mode == "required" and len(allowed) == 1 else None, parallel, allowed)


FormatKind = Literal["json_object", "json_schema", "regex", "grammar"]


@dataclass(frozen=True, slots=True)
class Format:
    """The form that the text of a reply must have.

    Attributes:
        text: a JSON schema, a regular expression or a grammar, depending on `kind`.
        strict: whether a schema with an unsupported keyword is refused.
        param: the caller's name for the field, for errors.
    """

    kind: FormatKind
    text: str = ""
    strict: bool = False
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that a model continues.

    Attributes:
        template_kwargs: variables for the chat template.
        salt: separates owners. KV that was computed with one salt is never used for another.
        breakpoints: positions that the caller expects to reuse: (number of a message, characters of its content).
        continues: whether the last message is the beginning of the reply. Normalizing moves it to `prefill`.
        prefill: the beginning of the reply, written by the caller.
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
