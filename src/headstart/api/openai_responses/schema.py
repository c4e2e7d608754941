"""Responses' schema: the bodies of /v1/responses. `items` turns their items into messages."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Required, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
    with_config,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from headstart.api.body import Whole
from headstart.api.generation import Generation
from headstart.chat.messages import Effort, Hints, TemplateArguments, only_readable
from headstart.chat.validation import MANY, LongList, Strict
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Format, ToolChoice

Status = Literal["in_progress", "completed", "incomplete"]
Word = Annotated[str, StringConstraints(max_length=32)]
"""A value of an open list: newer clients send new ones."""
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]

PASSED_OVER = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "computer_call",
        "computer_call_output",
        "tool_search_call",
        "tool_search_output",
        "ghost_snapshot",
    }
)
"""Types of items that record work of another server. Clients that changed servers still send them; models do not need them."""


PartType = Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]


def _only_text(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("input_", "image", "file")) and value != "input_text":
        raise PydanticCustomError("content_part", "'{kind}' is not supported: this server reads text only", {"kind": value})
    return value


def _has_text(part: ResponsesPart) -> ResponsesPart:
    if part.get("refusal" if part["type"] == "refusal" else "text") is None:
        raise PydanticCustomError("content_text", "needs a text")
    return part


@with_config(MANY)
class ResponsesPart(Hints, total=False):
    """A part of a message or of a tool's result. Only text is supported."""

    type: Required[Annotated[PartType, BeforeValidator(_only_text)]]
    text: str | None
    refusal: str | None


Parts = LongList[Annotated[ResponsesPart, AfterValidator(_has_text)]]
Content = str | Parts


@with_config(MANY)
class MessageItem(Hints, total=False):
    """A message."""

    type: Literal["message"]
    id: str | None
    role: Required[Literal["user", "assistant", "system", "developer"]]
    content: Required[Content]


@with_config(MANY)
class FunctionCallItem(TypedDict, total=False):
    """A tool call of a reply."""

    type: Required[Literal["function_call"]]
    id: str | None
    call_id: Required[str]
    name: Required[str]
    namespace: str | None
    arguments: str


@with_config(MANY)
class CustomCallItem(TypedDict, total=False):
    """A custom tool's call, whose input is a text."""

    type: Required[Literal["custom_tool_call"]]
    id: str | None
    call_id: Required[str]
    name: Required[str]
    namespace: str | None
    input: str


def _of_result(output: Any) -> Any:
    return only_readable(output, get_args(PartType))


@with_config(MANY)
class CallOutputItem(Hints, total=False):
    """The result of a tool call."""

    type: Required[Literal["function_call_output", "custom_tool_call_output"]]
    id: str | None
    call_id: Required[str]
    output: Required[Annotated[Content, BeforeValidator(_of_result)]]


@with_config(MANY)
class ReasoningItem(TypedDict, total=False):
    """The reasoning of a reply, in any of three fields."""

    type: Required[Literal["reasoning"]]
    id: str | None
    summary: Parts | None
    content: Parts | None
    encrypted_content: str | None


@with_config(MANY)
class ReferenceItem(TypedDict, total=False):
    """A reference to an item that the server has stored."""

    type: Literal["item_reference"] | None
    id: Required[str]


@with_config({**MANY, "json_schema_extra": {"properties": {"type": {"enum": [*sorted(PASSED_OVER)]}}}})
class PassedOverItem(TypedDict, total=False):
    """See `PASSED_OVER`."""

    type: Required[str]
    id: str | None


def _kind(value: Any) -> str | None:
    """The tag of an item: its type in angle brackets, so that it cannot equal a key of the item."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        kind = "message" if "role" in value or "id" not in value else "item_reference"
    elif kind in ("function_call_output", "custom_tool_call_output"):
        kind = "output"
    elif isinstance(kind, str) and kind in PASSED_OVER:
        kind = "passed over"
    return f"<{kind}>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CallOutputItem, Tag("<output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")]
    | Annotated[PassedOverItem, Tag("<passed over>")],
    Discriminator(
        _kind,
        custom_error_type="item_kind",
        custom_error_message="is an item of a kind that this server cannot read",
    ),
]


class ResponsesTool(Strict):
    """A tool. Functions, custom tools and namespaces of them can be called. Other types cannot, see docs/clients.md."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ResponsesTool] | None = None

    @model_validator(mode="after")
    def _named(self) -> ResponsesTool:
        if self.type in ("function", "custom", "namespace") and self.name is None:
            raise PydanticCustomError("tool_name", "needs a name")
        return self


class ChosenName(Strict):
    type: str
    name: str | None = None


class ChosenTool(Strict):
    """The tool that must be called, or the tools that may be called."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ChosenName] | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _can_be_called(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("function", "custom", "allowed_tools"):
            raise PydanticCustomError("tool_choice", "a '{kind}' cannot be called here", {"kind": value[:40]})
        return value

    @model_validator(mode="after")
    def _something(self) -> ChosenTool:
        if not self.tools if self.type == "allowed_tools" else self.name is None:
            raise PydanticCustomError("tool_choice", "names no tool")
        return self


class TextFormat(Strict):
    """The format of a reply."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_given(self) -> TextFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("text_format", "needs a schema")
        return self


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Word | None = None


class ReasoningOptions(Strict):
    effort: Effort = None
    summary: Word | None = None
    generate_summary: Word | None = None


class CacheOptions(Strict):
    """`prewarm` only fills the cache. `comparison_response_id` asks for the cause of a cache miss. Other fields are hints."""

    comparison_response_id: str | None = None
    prewarm: bool | None = None


class ResponsesInput(Strict):
    """The fields that make the prompt of a response; also the body of POST /v1/responses/input_tokens."""

    model: str | None = None
    input: str | LongList[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateArguments | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _possible(self) -> ResponsesInput:
        for name, remedy in (("conversation", "use previous_response_id, or send the items"), ("prompt", "send instructions")):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"Invalid '{name}': it is not supported; {remedy}.", param=name)
        return self

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def format(self) -> Format | None:
        """The format of the reply."""
        given = self.text.format if self.text is not None else None
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return Format("json_object", param="text.format")
        return Format("json_schema", json.dumps(given.json_schema), bool(given.strict), "text.format")

    @property
    def choice(self) -> ToolChoice:
        """The tools that the reply may call, by the names in the body."""
        parallel, chosen = self.parallel_tool_calls is not False, self.tool_choice
        if not isinstance(chosen, ChosenTool):
            return ToolChoice(chosen or "auto", None, parallel)
        if chosen.type != "allowed_tools":
            return ToolChoice("required", chosen.name, parallel)
        names = tuple(tool.name for tool in chosen.tools or () if tool.name is not None)
        return ToolChoice.among(chosen.mode, names, parallel)


class ResponsesRequest(Generation, ResponsesInput):
    """Body of POST /v1/responses. Sampling options beside `temperature` and `top_p` are extensions."""

    WITHOUT_EFFECT = frozenset({"n", "max_tokens", "n_predict", "return_progress", "timings_per_token"})

    max_output_tokens: Annotated[Whole, Field(ge=0, lt=2**31)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    background: bool | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _in_front(self) -> ResponsesRequest:
        if self.background:
            raise InvalidRequest("Invalid 'background': responses cannot run in the background here.", param="background")
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        unheeded = self.text is not None and self.text.verbosity not in (None, "medium")
        return (*super().ignored, *(["text.verbosity"] if unheeded else []))

    def includes(self, what: str) -> bool:
        return what in (self.include or ())

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to return for each token; None for no log-probabilities."""
        asked = self.top_logprobs is not None or self.includes("message.output_text.logprobs")
        return (self.top_logprobs or 0) if asked else None


BODIES: tuple[type[Strict], ...] = (ResponsesInput, ResponsesRequest)
