"""Body: how JSON bodies are parsed, and the fields that set the format of a reply (OpenAI, llama-server, vLLM)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from headstart.api.counting import check_count
from headstart.api.ignored import ignored
from headstart.chat.validation import Strict, condense
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Format, FormatKind
from headstart.output.json_values import countable


class Body(Strict):
    """A body that is answered with a reply."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Fields of the parent class that have no effect in this body."""

    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields that were ignored, and might have changed the answer."""
        return self._ignored

    @classmethod
    def known(cls) -> frozenset[str]:
        """Names of fields that have an effect, also of those inside other fields: `reasoning.effort`."""
        return _known(cls)

    def note(self, body: Mapping[str, Any]) -> None:
        """Notes the ignored fields of `body`, from which this object was parsed."""
        self._ignored = ignored(body, self.known())


@cache
def _known(model: type[Body]) -> frozenset[str]:
    return frozenset(_names(model)) - model.WITHOUT_EFFECT


def _names(model: type[BaseModel], within: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = within + (field.alias or name)
        yield path
        for inner in _models(field.annotation):
            yield from _names(inner, f"{path}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models of which a field's value can be one. Lists are left out: their objects are many, and not options."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation):
            yield from _models(part)


def _parsed(value: Any) -> Any:
    """A schema, which may be written as a string."""
    if isinstance(value, str):
        check_count(value.encode("utf-8", "replace"))
        try:
            return from_json(value)
        except ValueError:
            raise PydanticCustomError("json", "is not JSON") from None
    return value


class JsonSchema(Strict):
    """`schema` is a JSON schema. With `strict`, a schema that cannot be guaranteed is refused."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of a reply. `schema` is llama-server's place for a schema, beside either type of JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    llama_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _schema_given(self) -> ResponseFormat:
        if self.type == "json_schema" and self.schema_of is None:
            raise PydanticCustomError("response_format", "needs a json_schema with a schema")
        return self

    @property
    def schema_of(self) -> dict[str, Any] | None:
        """The schema of the reply; None for any JSON."""
        if self.type == "json_schema" and self.json_schema is not None and self.json_schema.json_schema is not None:
            return self.json_schema.json_schema
        return self.llama_schema if self.type == "json_schema" else self.llama_schema or None


NonEmpty = Annotated[str, StringConstraints(min_length=1)]


class StructuredOutputs(Strict):
    """vLLM's fields for the format of a reply; older versions call them `guided_…`."""

    json_schema: Annotated[dict[str, Any] | None, BeforeValidator(_parsed), Field(alias="json")] = None
    json_object: bool | None = None
    regex: NonEmpty | None = None
    choice: Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    grammar: NonEmpty | None = None

    @model_validator(mode="after")
    def _says_something(self) -> StructuredOutputs:
        if not self.formats(""):
            raise PydanticCustomError("structured_outputs", "needs one of json, json_object, regex, choice, grammar")
        return self

    def formats(self, prefix: str) -> list[Format]:
        """The formats. `prefix`: what the names of the fields begin with in the body."""

        def form(kind: FormatKind, field: str, text: str = "") -> Format:
            return Format(kind, text, param=f"{prefix}{field}")

        return [
            *([form("json_schema", "json", json.dumps(self.json_schema))] if self.json_schema is not None else []),
            *([form("json_object", "json_object")] if self.json_object else []),
            *([form("regex", "regex", self.regex)] if self.regex is not None else []),
            *([form("grammar", "choice", _any_of(self.choice))] if self.choice is not None else []),
            *([form("grammar", "grammar", self.grammar)] if self.grammar is not None else []),
        ]


def _any_of(texts: list[str]) -> str:
    """A Lark grammar that matches exactly these texts."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


class Constrained(Strict):
    """The format of a reply in the fields of llama-server (`grammar`, `json_schema`) and vLLM."""

    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[dict[str, Any] | None, BeforeValidator(_parsed)] = None
    guided_regex: NonEmpty | None = None
    guided_choice: Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    guided_grammar: NonEmpty | None = None

    @property
    def formats(self) -> list[Format]:
        """All formats in the body; more than one is an error."""
        guided = StructuredOutputs.model_construct(
            json_schema=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        schema = self.json_schema
        return [
            *([Format("json_schema", json.dumps(schema), param="json_schema")] if schema is not None else []),
            *([Format("grammar", self.grammar, param="grammar")] if self.grammar else []),
            *guided.formats("guided_"),
            *(self.structured_outputs.formats("structured_outputs.") if self.structured_outputs is not None else []),
        ]

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        if len(self.formats) > 1:
            raise InvalidRequest("Invalid 'response_format': a reply can have one format only.", param="response_format")
        return self


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer, which may be written as 1.0: JSON does not distinguish them."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]

LARGE = 1 << 20
"""Bytes of a body from which on it is parsed in a thread."""


BodyT = TypeVar("BodyT", bound=Strict)


def parse(model: type[BodyT], data: bytes) -> BodyT:
    """Parses a body.

    Raises:
        InvalidRequest: it is not a JSON object, or does not fit the model; one sentence, with the field in `param`.
        TooLarge: it has too many values.
    """
    return validate(model, load(data))


def load(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises InvalidRequest, and TooLarge if it has too many values."""
    check_count(data)
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


async def loaded(data: bytes) -> dict[str, Any]:
    """`load` for the event loop. A large body is parsed in a thread; with a small one the thread would take longer."""
    return await asyncio.to_thread(load, data) if len(data) > LARGE else load(data)


def validate(model: type[BodyT], value: dict[str, Any]) -> BodyT:
    """A body as an object of a model. Raises InvalidRequest."""
    try:
        found = model.model_validate(value)
    except ValidationError as error:
        raise condense(error, value) from None
    if not countable(value):
        raise InvalidRequest("The body is not valid JSON: a number is out of range.")
    if isinstance(found, Body):
        found.note(value)
    return found
