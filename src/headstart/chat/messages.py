"""Messages and tools in OpenAI's form, as HTTP and the library take them, and the form that all dialects share.

Strict about types; unknown fields are passed over, as clients send many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, with_config
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from headstart.chat.validation import MANY, Strict
from headstart.interfaces.conversation import Conversation, Message

RESERVED = frozenset("self messages tools salt spelled generation begun breakpoints add_generation_prompt strftime_now".split())
"""Names in `chat_template_kwargs` that would replace what the request itself says."""


def _nothing_reserved(value: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(RESERVED & value.keys()):
        raise PydanticCustomError("template_kwargs", "may not contain '{name}'", {"name": taken[0]})
    return value


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_nothing_reserved)]

EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
"""How much to think, in the words of all vendors. Others come with newer clients, and say nothing here."""


def _known_effort(value: str | None) -> str | None:
    return value if value in EFFORTS else None


Effort = Annotated[str | None, AfterValidator(_known_effort)]


_SPEAKING: list[JsonDict] = [
    {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
    {"required": ["role"], "properties": {"role": {"const": "assistant"}}},
]
"""What `_says_something` asks, for the document."""


def _only_text(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "refusal":
        return {**value, "type": "text", "text": value.get("refusal")}
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError(
            "content_part", "has a part of type '{kind}': this server reads text only", {"kind": kind[:40]}
        )
    return value


class Hints(TypedDict, total=False):
    """What may carry a hint to a cache: it marks a breakpoint, and is no part of a prompt."""

    cache_control: dict[str, Any] | None
    prompt_cache_breakpoint: dict[str, Any] | None


@with_config(MANY)
class TextPart(Hints):
    """A part of a message's content. Only text can be read; a refusal is text too."""

    type: Required[Literal["text"]]
    text: Required[str]


IMAGE_LEFT_OUT = "[image left out: this server reads text only]"


def without_images(content: Any) -> Any:
    """The content of a tool's result with a line for each image: the model has not chosen to be shown one."""

    def read(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("image", "image_url", "input_image"):
            return part
        return {**part, "type": "text", "text": IMAGE_LEFT_OUT}

    return list(map(read, content)) if isinstance(content, list) else content


@with_config(MANY)
class FunctionCallBody(TypedDict, total=False):
    name: Required[str]
    arguments: str | dict[str, Any] | None


@with_config(MANY)
class ToolCall(TypedDict, total=False):
    id: str | None
    type: Literal["function"]
    function: Required[FunctionCallBody]


def _readable(value: Any) -> Any:
    if isinstance(value, dict) and value.get("role") in ("tool", "function"):
        return {**value, "content": without_images(value.get("content"))}
    return value


def _says_something(message: ChatMessage) -> ChatMessage:
    if message.get("content") is None and message["role"] != "assistant":
        raise PydanticCustomError("content_missing", "needs content: only an assistant's message may have none")
    return message


@with_config({**MANY, "json_schema_extra": {"anyOf": [*_SPEAKING]}})
class ChatMessage(Hints, total=False):
    """A message. `function` and `function_call` are what `tool` and `tool_calls` were once."""

    role: Required[Literal["developer", "system", "user", "assistant", "tool", "function"]]
    content: str | list[Annotated[TextPart, BeforeValidator(_only_text)]] | None
    refusal: str | None
    name: str | None
    tool_calls: list[ToolCall] | None
    function_call: FunctionCallBody | None
    tool_call_id: str | None
    reasoning_content: str | None
    reasoning: str | None


@with_config({**MANY, "extra": "allow"})
class Function(TypedDict, total=False):
    """A function that a reply may call."""

    name: Required[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


def _only_functions(value: Any) -> Any:
    if isinstance(value, str) and value != "function":
        raise PydanticCustomError("tool", "'{kind}' is not supported: tools are functions", {"kind": value[:40]})
    return value


@with_config(MANY)
class ToolBody(Hints):
    """A tool. Only functions can be called."""

    type: Required[Annotated[Literal["function"], BeforeValidator(_only_functions)]]
    function: Required[Function]


class ChatBody(Strict):
    """Messages and what the template is given beside them."""

    messages: Annotated[
        list[Annotated[ChatMessage, BeforeValidator(_readable), AfterValidator(_says_something)]], Field(min_length=1)
    ]
    tools: list[ToolBody] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Effort = None
    continue_final_message: bool | None = None


def without_nulls(given: Mapping[str, Any], *lists: str) -> dict[str, Any]:
    """What an object says: null is the same as nothing, also in the objects of its `lists`."""
    kept = {key: value for key, value in given.items() if value is not None}
    for name in lists:
        if isinstance(parts := kept.get(name), list):
            kept[name] = [*map(without_nulls, parts)]
    return kept


def conversation_of(form: ChatBody, salt: str = "") -> Conversation:
    """What a body says, in the form that all dialects share."""
    return Conversation(
        messages=tuple(map(_message, form.messages)),
        tools=tuple(map(_tool, form.tools or ())),
        template_kwargs={**effort(form.reasoning_effort), **(form.chat_template_kwargs or {})},
        salt=salt,
        continues=bool(form.continue_final_message) and form.messages[-1]["role"] == "assistant",
    )


def _message(given: ChatMessage) -> Message:
    message = without_nulls(given, "content")
    spelled = message.pop("reasoning", None)
    if spelled and "reasoning_content" not in message:
        message["reasoning_content"] = spelled
    refusal, once = message.pop("refusal", ""), message.pop("function_call", None)
    if once is not None and "tool_calls" not in message:
        message["tool_calls"] = [{"function": once}]
    if "tool_calls" in message:
        message["tool_calls"] = [*map(_call, message["tool_calls"])]
    role = "tool" if message["role"] == "function" else message["role"]
    return {**message, "role": role, "content": message.get("content") or refusal}


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**without_nulls({"id": given.get("id")}), "type": "function", "function": without_nulls(given["function"])}


def _tool(given: ToolBody) -> dict[str, Any]:
    return {**without_nulls(given), "function": without_nulls(given["function"])}


def effort(given: str | None) -> dict[str, Any]:
    """How much to think, as templates of reasoning models ask for it."""
    return {} if given is None else {"reasoning_effort": given, "enable_thinking": given != "none"}
