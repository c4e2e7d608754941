"""Canonical: a conversation as all dialects say it, before its noise is undone and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
"""In OpenAI's chat form: `role` (developer, system, user, assistant or tool), `content` (a text, or a list of text parts),
`reasoning_content`, `tool_calls`, `tool_call_id`, `name`. Hints to a cache may be anywhere in it."""

Tool = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters", "strict"}}`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a reply may call. `required`: one tool at least, `name` if that is given. `parallel`: more than one.

    `allowed`: only these; None for all. The prompt lists the others too, so that it stays the same.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None

    @classmethod
    def among(cls, mode: Literal["auto", "required"], allowed: tuple[str, ...], parallel: bool) -> Choice:
        """A choice among some tools: if it must be made of one, that one is named."""
        return cls(mode, allowed[0] if mode == "required" and len(allowed) == 1 else None, parallel, allowed)


@dataclass(frozen=True, slots=True)
class Format:
    """What the text of a reply must be. `text`: a JSON schema, regular expression or grammar, as `kind` says.

    `strict`: a schema with a word that cannot be guaranteed is refused.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar"]
    text: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What a caller asks a model to go on with.

    Attributes:
        breakpoints: what callers mark as the end of what will come again: (number of a message, characters of its content).
        extra: variables for the template.
        salt: the tenant's.
        continues: the last message is the beginning of the reply.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    choice: Choice = Choice()
    format: Format | None = None
    breakpoints: tuple[tuple[int, int], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    salt: str = ""
    continues: bool = False
