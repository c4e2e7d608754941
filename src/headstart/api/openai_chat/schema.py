"""Schema: what a caller may send. Strict about types and ranges; unknown fields are passed over, as clients send many, and
named in the answer where they might have changed it (`ignored`).

Fields that only carry identities or hints (`user`, `prompt_cache_key`, `metadata`, …) are accepted and never become part of a
prompt; of them only those that headstart reads are named here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Required, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
    with_config,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypedDict

from headstart.api.body import Body, Constrained, ResponseFormat, Strict
from headstart.chat.conversation import Choice, Format
from headstart.errors import InvalidRequest
from headstart.output.json_values import countable


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer, also written as 1.0: to JSON these are the same."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]

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


MANY = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
"""How TypedDicts are read: what a body has many of becomes dicts, with their keys in the order of the fields."""


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
class FunctionCall(TypedDict, total=False):
    name: Required[str]
    arguments: str | dict[str, Any] | None


@with_config(MANY)
class ToolCall(TypedDict, total=False):
    id: str | None
    type: Literal["function"]
    function: Required[FunctionCall]


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
    function_call: FunctionCall | None
    tool_call_id: str | None
    reasoning_content: str | None
    reasoning: str | None


class StreamOptions(Strict):
    include_usage: bool | None = None


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
class Tool(Hints):
    """A tool. Only functions can be called."""

    type: Required[Annotated[Literal["function"], BeforeValidator(_only_functions)]]
    function: Required[Function]


class Named(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: Named


class AllowedTools(Strict):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Strict):
    """Tools that may be called. The others stay in the prompt, which is the same for every choice."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Generation(Body):
    """What all endpoints share. `id_slot` is a hint that nobody needs here: a prompt goes where most of it is.

    `n_predict` is what llama-server calls `max_tokens`.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=16)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    max_tokens: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[TokenKey, Bias] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    cache_prompt: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    ignore_eos: bool | None = None
    n_predict: Annotated[Whole, Field(ge=-2, lt=2**31)] | None = None
    id_slot: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)


class Conversation(Strict):
    """Messages and what the template is given beside them."""

    messages: Annotated[
        list[Annotated[ChatMessage, BeforeValidator(_readable), AfterValidator(_says_something)]], Field(min_length=1)
    ]
    tools: list[Tool] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Effort = None
    continue_final_message: bool | None = None


class ChatRequest(Generation, Conversation, Constrained):
    """Body of POST /v1/chat/completions."""

    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")] | None
    ) = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    @property
    def formats(self) -> list[Format]:
        given = self.response_format
        if given is None or given.type == "text":
            return super().formats
        asked = given.json_schema
        if given.type == "json_object" or asked is None:
            return [Format("json_object"), *super().formats]
        return [Format("json_schema", json.dumps(asked.json_schema), bool(asked.strict)), *super().formats]

    @property
    def choice(self) -> Choice:
        """What the reply may call."""
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            return Choice("required", self.tool_choice.function.name, parallel)
        if isinstance(self.tool_choice, AllowedChoice):
            given = self.tool_choice.allowed_tools
            return Choice.among(given.mode, tuple(tool.function.name for tool in given.tools), parallel)
        return Choice(self.tool_choice or "auto", None, parallel)

    @model_validator(mode="after")
    def _top_of_something(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("Invalid 'top_logprobs': it needs 'logprobs' to be true.", param="top_logprobs")
        return self


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return "tokens" if isinstance(first, int) else "lists" if isinstance(first, list) else "texts"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=2048), Tag("texts")]
    | Annotated[list[TokenId], Field(min_length=1), Tag("tokens")]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=2048), Tag("lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_kind",
        custom_error_message="Input should be a text, a list of tokens, or a list of either",
    ),
]


class CompletionRequest(Generation, Constrained):
    """Body of POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    best_of: Annotated[Whole, Field(ge=1, le=16)] | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.suffix:
            raise InvalidRequest("Invalid 'suffix': it is not supported.", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("Invalid 'best_of': it is supported only where it equals 'n'.", param="best_of")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TemplateRequest(Conversation):
    """Body of POST /apply-template and of POST /v1/chat/completions/input_tokens."""


class TokenizeRequest(Strict):
    """Body of POST /tokenize."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    tokens: list[TokenId]


BODIES: tuple[type[Strict], ...] = (
    ChatRequest,
    CompletionRequest,
    TemplateRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
Form = TypeVar("Form", bound=Strict)


def parse(form: type[Form], data: bytes) -> Form:
    """Reads a body.

    Raises:
        InvalidRequest: it is no JSON object, or not of this form; one sentence, with the field in `param`.
    """
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    try:
        found = form.model_validate(value)
    except ValidationError as error:
        raise condense(error, value) from None
    if not countable(value):
        raise InvalidRequest("The body is not valid JSON: a number is out of range.")
    if isinstance(found, Body):
        found.note(value)
    return found


def without_nulls(given: Mapping[str, Any], *lists: str) -> dict[str, Any]:
    """What an object says: null is the same as nothing, also in the objects of its `lists`."""
    kept = {key: value for key, value in given.items() if value is not None}
    for name in lists:
        if isinstance(parts := kept.get(name), list):
            kept[name] = [*map(without_nulls, parts)]
    return kept


def condense(error: ValidationError, value: Any) -> InvalidRequest:
    """All that is wrong with the deepest faulty field, as one sentence."""
    faults: dict[tuple[str | int, ...], list[str]] = {}
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        faults.setdefault(_path(fault["loc"], value, fault["type"]), []).append(fault["msg"])
    path, messages = max(faults.items(), key=lambda item: len(item[0]))
    said = [message.rstrip(".").replace(" after validation", "") for message in dict.fromkeys(messages)]
    should = ""
    if all(message.startswith("Input should be ") for message in said):
        should, said = "must be ", [message.removeprefix("Input should be ") for message in said]
    if not path:
        return InvalidRequest(f"The request is invalid: {'; '.join(said)}.")
    name = str(path[0]) + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path[1:])
    return InvalidRequest(f"Invalid '{name[:200]}': {should}{', or '.join(said)}.", param=name[:200])


def _path(location: tuple[str | int, ...], value: Any, kind: str) -> tuple[str | int, ...]:
    # pydantic mixes the names of union members into a location, and a key of the value may be called the same.
    return max(_ways(location, value, kind == "missing"), key=lambda way: (way[1], len(way[0])))[0]


def _ways(location: tuple[str | int, ...], value: Any, missing: bool) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    """Paths in the value that a location may mean, each with whether it takes the last step."""
    if not location:
        yield (), True
        return
    step, rest = location[0], location[1:]
    # The same name at another place may have a shorter list.
    inside = step in range(len(value)) if isinstance(value, list) else isinstance(value, dict) and step in value
    if inside:
        yield from (((step, *way), whole) for way, whole in _ways(rest, value[step], missing))
    if not rest:
        yield ((step,), True) if missing else ((), False)
    elif isinstance(step, str):
        yield from _ways(rest, value, missing)
    else:
        yield (), False
