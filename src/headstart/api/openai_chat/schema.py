"""OpenAI's schema: the bodies of chat completions and completions.

Types and ranges are strict. Clients send many other fields. Those are ignored, and named in the answer if they might have
changed it (`ignored`). Identities and hints (`user`, `prompt_cache_key`, `metadata`, …) are accepted and never become part of a
prompt. Only those that headstart reads are declared here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from headstart.api.body import Constrained, ResponseFormat, TokenId, Whole
from headstart.api.generation import Generation
from headstart.chat.messages import ChatBody
from headstart.chat.validation import LongList, Strict
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Format, ToolChoice


class Named(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: Named


class AllowedTools(Strict):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Strict):
    """The tools that may be called. All tools stay in the prompt, so the choice does not change it."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


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
        if given.schema_of is None:
            return [Format("json_object"), *super().formats]
        strict = given.json_schema is not None and bool(given.json_schema.strict)
        return [Format("json_schema", json.dumps(given.schema_of), strict), *super().formats]

    @property
    def choice(self) -> ToolChoice:
        """The tools that the reply may call."""
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
    | Annotated[LongList[str], Field(min_length=1, max_length=2048), Tag("texts")]
    | Annotated[LongList[TokenId], Field(min_length=1), Tag("tokens")]
    | Annotated[
        LongList[Annotated[LongList[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=2048), Tag("lists")
    ],
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


BODIES: tuple[type[Strict], ...] = (ChatRequest, CompletionRequest)
