"""Anthropic schema: what a caller of /v1/messages may send. As strict, and as deaf to unknown fields, as `schema`.

Betas are headers and fields that nobody has to understand: those that are not named here are ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from headstart.api.canonical import Choice, Format
from headstart.api.schema import Effort, Whole, _Form, without_images
from headstart.errors import InvalidRequest

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]

LEFT_OUT = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
"""What the types of tools begin with that the vendor's servers run. A reply can do without them, so they are left out."""

_READABLE = frozenset("text thinking redacted_thinking tool_use tool_result document search_result".split())


def _readable(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _READABLE:
        raise PydanticCustomError(
            "content_block", "has a block of type '{kind}': this server reads text only", {"kind": kind[:40]}
        )
    return value


def _textual(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("text", "content"):
        raise PydanticCustomError(
            "document_source", "is a document of type '{kind}': this server reads text only", {"kind": kind[:40]}
        )
    return value


class CacheControl(_Form):
    """The end of what will come again. A hint: what it says changes no prompt, so anything may be said."""

    type: str
    ttl: str | None = None


class Marked(_Form):
    """What may carry a breakpoint."""

    cache_control: CacheControl | None = None


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class TextBlock(Marked):
    type: Literal["text"]
    text: str


Text = Annotated[TextBlock, BeforeValidator(_readable)]


class ThinkingBlock(_Form):
    """Reasoning. Its signature is not looked at: nothing here depends on who thought it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Form):
    """Another server's reasoning, which cannot be read."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Marked):
    """A call that a reply made. A model may make up names, and call with what is no object."""

    type: Literal["tool_use"]
    id: Annotated[str, StringConstraints(min_length=1)]
    name: str
    input: Any


class TextSource(_Form):
    type: Literal["text"]
    data: str


class ContentSource(_Form):
    type: Literal["content"]
    content: str | list[Text]


class DocumentBlock(Marked):
    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type"), BeforeValidator(_textual)]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Marked):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[Text]


Written = TextBlock | DocumentBlock | SearchResultBlock
"""What is text, or can be written as text."""


class ToolResultBlock(Marked):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, StringConstraints(min_length=1)]
    content: Annotated[
        str | list[Annotated[Written, Field(discriminator="type"), BeforeValidator(_readable)]] | None,
        BeforeValidator(without_images),
    ] = None
    is_error: bool | None = None


UserBlock = Written | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserMessage(_Form):
    role: Literal["user"]
    content: str | list[Annotated[UserBlock, Field(discriminator="type"), BeforeValidator(_readable)]]


class AssistantMessage(_Form):
    role: Literal["assistant"]
    content: str | list[Annotated[AssistantBlock, Field(discriminator="type"), BeforeValidator(_readable)]]


class SystemMessage(_Form):
    role: Literal["system"]
    content: str | list[Text]


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_CALLABLE: list[JsonDict] = [
    {"required": ["name", "input_schema"], "properties": {"name": {"type": "string"}, "input_schema": {"type": "object"}}},
    {"required": ["type"], "properties": {"type": {"type": "string", "pattern": f"^({'|'.join(LEFT_OUT)})"}}},
]
"""What `ClientTool._can_be_called` asks, for the document."""


class ClientTool(Marked):
    """A tool with a schema is a function, whatever its type. Without one a type that nobody here runs is left out."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [*_CALLABLE]})

    type: str | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def left_out(self) -> bool:
        return self.input_schema is None and (self.type or "").startswith(LEFT_OUT)

    @model_validator(mode="after")
    def _can_be_called(self) -> ClientTool:
        if self.left_out or (self.name is not None and self.input_schema is not None):
            return self
        if self.type in (None, "custom"):
            raise PydanticCustomError("tool", "needs a name and an input_schema")
        raise PydanticCustomError(
            "tool", "'{kind}' is not known here: give the tool a name and an input_schema", {"kind": (self.type or "")[:40]}
        )


class ToolChoice(_Form):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(_Form):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Thinking(_Form):
    """`budget_tokens` is not kept: `max_tokens` bounds reasoning and reply together. An unknown type says nothing."""

    type: str
    budget_tokens: Whole | None = None
    display: str | None = None

    @property
    def wanted(self) -> bool | None:
        """Whether to think; None if that is left to the template."""
        return {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}.get(self.type)


class JsonFormat(_Form):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Form):
    effort: Effort = None
    format: JsonFormat | None = None


class Metadata(_Form):
    user_id: str | None = None


class Diagnostics(_Form):
    previous_message_id: str | None = None


class ContextManagement(_Form):
    """Edits that a server may make. None is made here (docs/clients.md says why), and answers say so."""

    edits: list[dict[str, Any]] | None = None


class CountTokensRequest(Marked):
    """Body of POST /v1/messages/count_tokens. `cache_salt`: as in /v1/chat/completions."""

    model: str | None = None
    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=100_000)]
    system: str | list[Text] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    metadata: Metadata | None = None
    context_management: ContextManagement | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None

    @property
    def choice(self) -> Choice:
        """What the reply may call."""
        given = self.tool_choice
        if given is None:
            return Choice()
        parallel = not given.disable_parallel_tool_use
        if isinstance(given, NamedToolChoice):
            return Choice("required", given.name, parallel)
        return Choice("required" if given.type == "any" else given.type, None, parallel)

    @property
    def format(self) -> Format | None:
        """What the text of the reply must be. `output_format` is how a beta spelled it."""
        given = (self.output_config.format if self.output_config is not None else None) or self.output_format
        return Format("json_schema", json.dumps(given.json_schema), strict=True) if given is not None else None

    @property
    def hours(self) -> int:
        """Marks that ask for an hour."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        marked = [one for one in (self, *(self.tools or ()), *blocks) if isinstance(one, Marked)]
        return sum(one.cache_control is not None and one.cache_control.ttl == "1h" for one in marked)

    @model_validator(mode="after")
    def _something_to_call(self) -> CountTokensRequest:
        if self.tools and all(tool.left_out for tool in self.tools):
            kind = (self.tools[0].type or "")[:40]
            raise InvalidRequest(f"Invalid 'tools': this server does not run '{kind}', and there is no other.", param="tools")
        return self


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages. `max_tokens` 0 only fills the cache."""

    max_tokens: Annotated[Whole, Field(ge=0, lt=2**31)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    diagnostics: Diagnostics | None = None


BODIES: tuple[type[_Form], ...] = (MessagesRequest, CountTokensRequest)
