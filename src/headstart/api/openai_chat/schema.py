"""Schema: what a caller may send. Strict about types and ranges; unknown fields are passed over, as clients send many, and
named in the answer where they might have changed it (`ignored`).

Fields that only carry identities or hints (`user`, `prompt_cache_key`, `metadata`, …) are accepted and never become part of a
prompt; of them only those that headstart reads are named here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from headstart.api.body import Body, Constrained, ResponseFormat
from headstart.chat.messages import ChatBody
from headstart.chat.validation import Strict, condense
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Format, ToolChoice
from headstart.output.json_values import countable


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer, also written as 1.0: to JSON these are the same."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]

class StreamOptions(Strict):
    include_usage: bool | None = None


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


class ChatRequest(Generation, ChatBody, Constrained):
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
    def choice(self) -> ToolChoice:
        """What the reply may call."""
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice("required", self.tool_choice.function.name, parallel)
        if isinstance(self.tool_choice, AllowedChoice):
            given = self.tool_choice.allowed_tools
            return ToolChoice.among(given.mode, tuple(tool.function.name for tool in given.tools), parallel)
        return ToolChoice(self.tool_choice or "auto", None, parallel)

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


class TemplateRequest(ChatBody):
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
