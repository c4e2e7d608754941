"""Anthropic's schema: the bodies of /v1/messages. Types are strict. Unknown fields, such as those of betas, are ignored (see
`ignored`)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator, with_config
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from headstart.api.body import Body, Whole
from headstart.chat.messages import Effort, in_place_of, only_readable
from headstart.chat.validation import MANY, LongList, Strict
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Format, ToolChoice

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]

LEFT_OUT = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
"""Beginnings of the types of tools that the vendor's servers run. A reply does not need them, so they are left out."""

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


@with_config(MANY)
class CacheControl(TypedDict, total=False):
    """A cache breakpoint. It is a hint and changes no prompt, so all values are accepted."""

    type: Required[str]
    ttl: str | None


class Marked(TypedDict, total=False):
    """An object that may have a cache breakpoint."""

    cache_control: CacheControl | None


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@with_config(MANY)
class TextBlock(Marked):
    type: Required[Literal["text"]]
    text: Required[str]


AnyText = Annotated[TextBlock, BeforeValidator(_readable)]


@with_config(MANY)
class ThinkingBlock(TypedDict, total=False):
    """Reasoning. Its signature is not checked: nothing depends on who wrote the reasoning."""

    type: Required[Literal["thinking"]]
    thinking: Required[str]
    signature: str | None


@with_config(MANY)
class RedactedThinkingBlock(TypedDict, total=False):
    """Encrypted reasoning of another server. It cannot be read."""

    type: Required[Literal["redacted_thinking"]]
    data: str | None


@with_config(MANY)
class ToolUseBlock(Marked):
    """A tool call of a reply. Models may invent names, and send an input that is not an object."""

    type: Required[Literal["tool_use"]]
    id: Required[Annotated[str, StringConstraints(min_length=1)]]
    name: Required[str]
    input: Required[Any]


@with_config(MANY)
class TextSource(TypedDict):
    type: Literal["text"]
    data: str


@with_config(MANY)
class ContentSource(TypedDict):
    type: Literal["content"]
    content: str | LongList[AnyText]


@with_config(MANY)
class DocumentBlock(Marked, total=False):
    type: Required[Literal["document"]]
    source: Required[Annotated[TextSource | ContentSource, Field(discriminator="type"), BeforeValidator(_textual)]]
    title: str | None
    context: str | None


@with_config(MANY)
class SearchResultBlock(Marked):
    type: Required[Literal["search_result"]]
    source: Required[str]
    title: Required[str]
    content: Required[LongList[AnyText]]


Written = TextBlock | DocumentBlock | SearchResultBlock
"""Blocks that are text, or can be written as text."""
WRITTEN = frozenset({"text", "document", "search_result"})
"""The types of `Written`."""


def _of_result(content: Any) -> Any:
    """What a tool has returned, as blocks of `WRITTEN`."""
    return only_readable(list(map(_returned, content)) if isinstance(content, list) else content, WRITTEN)


def _returned(block: Any) -> Any:
    """A block that a tool has returned. A tool that was found is written as its name, because all tools are in the prompt."""
    if not isinstance(block, dict):
        return block
    kind, source, name = block.get("type"), block.get("source"), block.get("tool_name")
    if kind == "tool_reference" and isinstance(name, str):
        return {**block, "type": "text", "text": name}
    if kind != "document" or not isinstance(source, dict) or source.get("type") == "text":
        return block
    if source.get("type") == "content":
        return {**block, "source": {**source, "content": only_readable(source.get("content"), ("text",))}}
    return {**block, "type": "text", "text": in_place_of(kind)}


@with_config(MANY)
class ToolResultBlock(Marked, total=False):
    type: Required[Literal["tool_result"]]
    tool_use_id: Required[Annotated[str, StringConstraints(min_length=1)]]
    content: Annotated[
        str | LongList[Annotated[Written, Field(discriminator="type"), BeforeValidator(_readable)]] | None,
        BeforeValidator(_of_result),
    ]
    is_error: bool | None


UserBlock = Written | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


@with_config(MANY)
class UserMessage(TypedDict):
    role: Literal["user"]
    content: str | LongList[Annotated[UserBlock, Field(discriminator="type"), BeforeValidator(_readable)]]


@with_config(MANY)
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | LongList[Annotated[AssistantBlock, Field(discriminator="type"), BeforeValidator(_readable)]]


@with_config(MANY)
class SystemMessage(TypedDict):
    role: Literal["system"]
    content: str | LongList[AnyText]


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_CALLABLE: list[JsonDict] = [
    {"required": ["name", "input_schema"], "properties": {"name": {"type": "string"}, "input_schema": {"type": "object"}}},
    {"required": ["type"], "properties": {"type": {"type": "string", "pattern": f"^({'|'.join(LEFT_OUT)})"}}},
]
"""The condition of `_can_be_called` as a JSON schema, for the OpenAPI document."""


def left_out(tool: ClientTool) -> bool:
    """Whether the vendor's servers run this tool."""
    return tool.get("input_schema") is None and (tool.get("type") or "").startswith(LEFT_OUT)


def _can_be_called(tool: ClientTool) -> ClientTool:
    if left_out(tool) or (tool.get("name") is not None and tool.get("input_schema") is not None):
        return tool
    if tool.get("type") in (None, "custom"):
        raise PydanticCustomError("tool", "needs a name and an input_schema")
    raise PydanticCustomError(
        "tool", "'{kind}' is not known here: give the tool a name and an input_schema", {"kind": (tool["type"] or "")[:40]}
    )


@with_config({**MANY, "json_schema_extra": {"anyOf": [*_CALLABLE]}})
class ClientTool(Marked, total=False):
    """A tool. With a schema it is a function, whatever its type. Without one it is left out if the vendor's servers run it."""

    type: str | None
    name: Name | None
    description: str | None
    input_schema: dict[str, Any] | None
    strict: bool | None


class AnyToolChoice(Strict):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(Strict):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Thinking(Strict):
    """`budget_tokens` has no effect: `max_tokens` limits reasoning and answer together. An unknown `type` has none either."""

    type: str
    budget_tokens: Whole | None = None
    display: str | None = None

    @property
    def wanted(self) -> bool | None:
        """Whether to think; None leaves it to the template."""
        return {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}.get(self.type)


class JsonFormat(Strict):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Effort = None
    format: JsonFormat | None = None


class Metadata(Strict):
    user_id: str | None = None


class Diagnostics(Strict):
    previous_message_id: str | None = None


class ContextManagement(Strict):
    """Edits of the context that the caller asks for. This server makes none (reasons: docs/clients.md), and answers say so."""

    edits: list[dict[str, Any]] | None = None


class CountTokensRequest(Body):
    """Body of POST /v1/messages/count_tokens. `cache_salt`: as in /v1/chat/completions."""

    cache_control: CacheControl | None = None
    model: str | None = None
    messages: Annotated[LongList[AnyMessage], Field(min_length=1, max_length=100_000)]
    system: str | LongList[AnyText] | None = None
    tools: list[Annotated[ClientTool, AfterValidator(_can_be_called)]] | None = None
    tool_choice: Annotated[AnyToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    metadata: Metadata | None = None
    context_management: ContextManagement | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None

    @property
    def choice(self) -> ToolChoice:
        """The tools that the reply may call."""
        given = self.tool_choice
        if given is None:
            return ToolChoice()
        parallel = not given.disable_parallel_tool_use
        if isinstance(given, NamedToolChoice):
            return ToolChoice("required", given.name, parallel)
        return ToolChoice("required" if given.type == "any" else given.type, None, parallel)

    @property
    def format(self) -> Format | None:
        """The format of the reply's text. `output_format` was the name of the field in a beta."""
        given, param = self.output_config.format if self.output_config is not None else None, "output_config.format"
        if given is None:
            given, param = self.output_format, "output_format"
        return None if given is None else Format("json_schema", json.dumps(given.json_schema), strict=True, param=param)

    @property
    def hours(self) -> int:
        """How many breakpoints ask for a time to live of one hour."""
        contents = [self.system, *(message["content"] for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        marks = [self.cache_control, *(marked.get("cache_control") for marked in (*(self.tools or ()), *blocks))]
        return sum(mark.get("ttl") == "1h" for mark in marks if mark is not None)

    @model_validator(mode="after")
    def _something_to_call(self) -> CountTokensRequest:
        if self.tools and all(map(left_out, self.tools)):
            kind = (self.tools[0]["type"] or "")[:40]
            raise InvalidRequest(f"Invalid 'tools': no tool can be called: this server does not run '{kind}'.", param="tools")
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


BODIES: tuple[type[Strict], ...] = (MessagesRequest, CountTokensRequest)
