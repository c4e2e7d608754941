"""Ollama's schema: the bodies of its routes. Types are strict. Unknown fields and options are ignored (see `ignored`)."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from headstart.api.body import Body, Whole
from headstart.chat.messages import in_place_of
from headstart.chat.validation import MANY, LongList, Strict
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Format
from headstart.output.json_values import json_value

TEXT_ONLY = "this server reads text only"

_DURATION = re.compile(r"[-+]?(?:0|(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+)")
"""A duration as Go writes it: `5m`, `1h30m`, `-1s`, `0`."""
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([a-zµμ]*)")
_LONGEST = 100
"""Characters of a duration."""
_UNITS = {"": 1.0, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _duration(value: float | str) -> float | str:
    if isinstance(value, str) and _DURATION.fullmatch(value) is None:
        raise PydanticCustomError("duration", "must be seconds, or a duration like '5m'")
    return value


KeepAlive = Annotated[
    float
    | Annotated[str, StringConstraints(max_length=_LONGEST), Field(json_schema_extra={"pattern": r"^-?[0-9]{1,6}(s|m|h)$"})],
    AfterValidator(_duration),
]
"""Seconds, or a duration like `5m`. A negative one means for ever."""


def keep_seconds(keep_alive: object) -> float | None:
    """For how many seconds without a request a model is kept, by a body's `keep_alive`: 0 to unload it at once, infinite to
    keep it. None if the body does not say so.
    """
    if isinstance(keep_alive, str) and len(keep_alive) <= _LONGEST and _DURATION.fullmatch(keep_alive) is not None:
        seconds = math.fsum(float(number) * _UNITS[unit] for number, unit in _PART.findall(keep_alive))
        return math.inf if keep_alive.startswith("-") and seconds else seconds
    if isinstance(keep_alive, bool) or (isinstance(keep_alive, float) and math.isnan(keep_alive)):
        return None
    if isinstance(keep_alive, int | float):
        return math.inf if keep_alive < 0 else float(min(keep_alive, sys.float_info.max))
    return None


def _no_images(value: list[str] | None) -> list[str] | None:
    if value:
        raise PydanticCustomError("images", f"cannot be used: {TEXT_ONLY}")
    return value


NoImages = Annotated[list[str] | None, AfterValidator(_no_images), Field(json_schema_extra={"maxItems": 0})]


def _arguments(value: Any) -> Any:
    """Older clients write arguments as JSON text."""
    if isinstance(value, str):
        try:
            parsed = json_value(value or "{}")
        except ValueError:
            return value
        return parsed if isinstance(parsed, dict) else value
    return value


@with_config(MANY)
class CalledFunction(TypedDict, total=False):
    name: Required[str]
    arguments: Annotated[dict[str, Any] | None, BeforeValidator(_arguments)]


@with_config(MANY)
class CalledTool(TypedDict, total=False):
    """A call in a reply. Most clients send no id."""

    id: str | None
    function: Required[CalledFunction]


def _without_results_images(value: Any) -> Any:
    """A tool's result with a line of text in place of its images. An error would stop the agent, which cannot choose what its
    tools return."""
    if not isinstance(value, dict) or value.get("role") != "tool" or not value.get("images"):
        return value
    content = value.get("content")
    written = [*([content] if isinstance(content, str) and content else []), in_place_of("image")]
    return {**value, "content": "\n".join(written), "images": None}


@with_config(MANY)
class OllamaMessage(TypedDict, total=False):
    """A message. A tool's result belongs to the call with its id, else to the next one of its tool, else to the next one."""

    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: str | None
    thinking: str | None
    images: NoImages
    tool_calls: list[CalledTool] | None
    tool_name: str | None
    tool_call_id: str | None


@with_config({**MANY, "extra": "allow"})
class ToolFunction(TypedDict, total=False):
    name: Required[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]]
    description: str | None
    parameters: dict[str, Any] | None


@with_config(MANY)
class OllamaTool(TypedDict, total=False):
    """A tool. Its type has no effect: all tools are functions."""

    type: str | None
    function: Required[ToolFunction]


Likelihood = Annotated[float, Field(ge=0, le=1)]


class OllamaOptions(Strict):
    """Sampling options. Those that say how to load a model have no effect: `headstart serve` has options for that.

    `num_predict` below 1 is as many tokens as fit.
    """

    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    num_predict: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    top_p: Likelihood | None = None
    min_p: Likelihood | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None

    @property
    def limit(self) -> int | None:
        """Most tokens of the reply; None for as many as fit."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)


class OllamaBody(Body):
    """What both bodies share. They stream unless `stream` is false. `cache_salt`: as in /v1/chat/completions."""

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def wanted(self) -> OllamaOptions:
        return self.options or OllamaOptions()

    @property
    def reply_format(self) -> Format | None:
        """The form that the reply must have."""
        if isinstance(self.format, dict):
            return Format("json_schema", json.dumps(self.format), param="format") if self.format else None
        return Format("json_object", param="format") if self.format else None

    @property
    def scores(self) -> int | None:
        """How many alternatives to report with each token; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def unloads(self) -> bool:
        """Whether it asks to unload the model, if there is nothing to answer."""
        return keep_seconds(self.keep_alive) == 0


class OllamaChatRequest(OllamaBody):
    """Body of POST /api/chat. Without messages it only asks for the model to be loaded or unloaded."""

    messages: Annotated[
        LongList[Annotated[OllamaMessage, BeforeValidator(_without_results_images)]] | None, Field(max_length=100_000)
    ] = None
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaBody):
    """Body of POST /api/generate. Without a prompt it only asks for the model to be loaded or unloaded.

    With `raw` the prompt is the model's text, without a template.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: NoImages = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    template: Annotated[str, Field(max_length=0)] | None = None
    context: Annotated[list[int], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _possible(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name, why in _REFUSED.items():
                if value.get(name):
                    raise InvalidRequest(f"Invalid '{name}': {why}.", param=name)
        return value

    @model_validator(mode="after")
    def _raw_alone(self) -> OllamaGenerateRequest:
        if self.raw and self.system:
            raise InvalidRequest("Invalid 'system': with 'raw' the prompt is all that the model reads.", param="system")
        return self


_REFUSED = {
    "context": "this server has no contexts. Send the messages to /api/chat: those that it has read cost nothing again",
    "suffix": "this server does not fill in between two texts",
    "template": "the server has one chat template, from the model or --chat-template. With 'raw' you can send any text",
}
"""Fields that this server cannot follow, and why."""


class OllamaShowRequest(Strict):
    """Body of POST /api/show. `name` is an old name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaPullRequest(Strict):
    """Body of POST /api/pull. It streams unless `stream` is false. `name` is an old name of `model`."""

    model: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    insecure: bool | None = None
    stream: bool | None = None

    @property
    def wanted(self) -> str:
        """The model to fetch. Raises InvalidRequest without one."""
        if (name := self.model or self.name) is None:
            raise InvalidRequest("Invalid 'model': it names the model to fetch.", param="model")
        return name


BODIES: tuple[type[Strict], ...] = (OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest, OllamaPullRequest)
