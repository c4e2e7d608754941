"""Messages: messages and tools in OpenAI's format → the `Conversation` that all dialects share. HTTP and the library use it.

Types are strict. Unknown fields are ignored, because clients send many.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, with_config
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from headstart.chat.validation import MANY, LongList, Strict
from headstart.interfaces.conversation import Conversation, Message

OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now"})
"""Variables of a template whose values come from the request itself; `chat_template_kwargs` may not contain them."""


def _no_own_variables(value: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(OWN_VARIABLES & value.keys()):
        raise PydanticCustomError("template_kwargs", "may not contain '{name}'", {"name": taken[0]})
    return value


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_no_own_variables)]

EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
"""Values of all vendors for how much to think. Other values, from newer clients, have no effect."""


def _known_effort(value: str | None) -> str | None:
    return value if value in EFFORTS else None


Effort = Annotated[str | None, AfterValidator(_known_effort)]


_SPEAKING: list[JsonDict] = [
    {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
    {"required": ["role"], "properties": {"role": {"enum": ["assistant", "tool", "function"]}}},
]
"""The condition of `_says_something` as a JSON schema, for the OpenAPI document."""


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
    """An object that may have a cache hint. A hint sets a breakpoint, and is not part of the prompt."""

    cache_control: dict[str, Any] | None
    prompt_cache_breakpoint: dict[str, Any] | None


@with_config(MANY)
class TextPart(Hints):
    """A part of a message's content. Only text is supported; a refusal counts as text."""

    type: Required[Literal["text"]]
    text: Required[str]


def in_place_of(kind: str) -> str:
    """The line in place of a part that cannot be read. `kind`: its type in any dialect."""
    name = kind.removeprefix("input_").removesuffix("_url")
    return f"[{name[:40]} left out: this server reads text only]"


def only_readable(content: Any, kinds: Collection[str]) -> Any:
    """The content of a tool's result, with a line of text in place of each part of another type than `kinds`. An error would
    stop the agent: it cannot choose what its tools return, and sends it again with every request."""

    def read(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        return {**part, "type": "text", "text": in_place_of(kind)} if isinstance(kind, str) and kind not in kinds else part

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
        return {**value, "content": only_readable(value.get("content"), ("text", "refusal"))}
    return value


def _says_something(message: ChatMessage) -> ChatMessage:
    if message.get("content") is None and message["role"] not in ("assistant", "tool", "function"):
        raise PydanticCustomError("content_missing", "needs content: only a reply or a tool's result may have none")
    return message


@with_config({**MANY, "json_schema_extra": {"anyOf": [*_SPEAKING]}})
class ChatMessage(Hints, total=False):
    """A message. `function` and `function_call` are old names of `tool` and `tool_calls`."""

    role: Required[Literal["developer", "system", "user", "assistant", "tool", "function"]]
    content: str | LongList[Annotated[TextPart, BeforeValidator(_only_text)]] | None
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
    """Messages, tools, and the template's variables."""

    messages: Annotated[
        LongList[Annotated[ChatMessage, BeforeValidator(_readable), AfterValidator(_says_something)]], Field(min_length=1)
    ]
    tools: list[ToolBody] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Effort = None
    continue_final_message: bool | None = None


def without_nulls(given: Mapping[str, Any], *lists: str) -> dict[str, Any]:
    """An object without its null fields. The same for the objects in the fields that `lists` names."""
    kept = {key: value for key, value in given.items() if value is not None}
    for name in lists:
        if isinstance(parts := kept.get(name), list):
            kept[name] = [*map(without_nulls, parts)]
    return kept


def conversation_of(body: ChatBody, salt: str = "") -> Conversation:
    """The conversation of a body, in the form that all dialects share."""
    return Conversation(
        messages=tuple(map(_message, body.messages)),
        tools=tuple(map(_tool, body.tools or ())),
        template_kwargs={**effort(body.reasoning_effort), **(body.chat_template_kwargs or {})},
        salt=salt,
        continues=bool(body.continue_final_message) and body.messages[-1]["role"] == "assistant",
    )


def _message(given: ChatMessage) -> Message:
    message = without_nulls(given, "content")
    reasoning = message.pop("reasoning", None)
    if reasoning and not message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    refusal, function = message.pop("refusal", ""), message.pop("function_call", None)
    if function is not None and not message.get("tool_calls"):
        message["tool_calls"] = [{"function": function}]
    if "tool_calls" in message:
        message["tool_calls"] = [*map(_call, message["tool_calls"])]
    role = "tool" if message["role"] == "function" else message["role"]
    return {**message, "role": role, "content": message.get("content") or refusal}


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**without_nulls({"id": given.get("id")}), "type": "function", "function": without_nulls(given["function"])}


def _tool(given: ToolBody) -> dict[str, Any]:
    return {**without_nulls(given), "function": without_nulls(given["function"])}


def effort(given: str | None) -> dict[str, Any]:
    """Template variables that say how much a reasoning model should think."""
    return {} if given is None else {"reasoning_effort": given, "enable_thinking": given != "none"}
