"""Options: checks the options of the library's calls. Imported with the first call, because pydantic loads slowly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from headstart.chat.validation import condense
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Format
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import Sampling
from headstart.names import unknown

Count = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Real = Annotated[float, Field(ge=-3e38, le=3e38)]  # the engine computes in single precision
Positive = Annotated[float, Field(ge=0, le=3e38)]
NonEmptyText = Annotated[str, Field(min_length=1)]

_DEFAULT = Sampling()


class CheckedOptions(BaseModel):
    """The values of `library.Options`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    salt: str = ""
    max_tokens: Count | None = None
    stop: NonEmptyText | Sequence[NonEmptyText] = ()
    reuse: bool = True
    temperature: Positive = _DEFAULT.temperature
    top_k: Count = _DEFAULT.top_k
    top_p: Share = _DEFAULT.top_p
    min_p: Share = _DEFAULT.min_p
    repeat_penalty: Annotated[float, Field(gt=0, le=3e38)] = _DEFAULT.repeat_penalty
    presence_penalty: Real = _DEFAULT.presence_penalty
    frequency_penalty: Real = _DEFAULT.frequency_penalty
    penalty_last_n: Annotated[int, Field(ge=-1, lt=2**31)] = _DEFAULT.penalty_last_n
    logit_bias: Mapping[Count, Annotated[float, Field(ge=float("-inf"), le=3e38)]] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    grammar: NonEmptyText | None = None
    json_schema: dict[str, JsonValue] | type[BaseModel] | None = None
    regex: NonEmptyText | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], beside: Sequence[str] = ("stream",)) -> CheckedOptions:
        """The checked options. Raises InvalidRequest for a wrong type or range, and TypeError for an unknown option.

        `beside`: names of options that the caller has already removed.
        """
        if wrong := unknown("option", options, [*cls.model_fields, *beside]):
            raise TypeError(wrong)
        try:
            return cls(**options)
        except ValidationError as error:
            raise condense(error, options) from None

    def format(self) -> Format | None:
        """The format of the reply. Raises InvalidRequest if several options set it."""
        names = [name for name in _KINDS if getattr(self, name) is not None]
        if not names:
            return None
        if len(names) > 1:
            raise InvalidRequest(f"Invalid '{names[1]}': '{names[0]}' already sets the format of the reply.", param=names[1])
        value = getattr(self, names[0])
        if isinstance(value, type) and issubclass(value, BaseModel):
            value = value.model_json_schema()
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return Format(names[0], text, param=names[0])

    def params(self, usual: Sampling) -> GenerationParams:
        """The generation parameters. `usual`: sampling values for options that are not given."""
        given = {name: getattr(self, name) for name in _SAMPLING & self.model_fields_set}
        return GenerationParams(
            dataclasses.replace(usual, **given, logit_bias=tuple(self.logit_bias.items())),
            max_tokens=self.max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            reuse=self.reuse,
        )


_SAMPLING = {field.name for field in dataclasses.fields(Sampling)} & CheckedOptions.model_fields.keys() - {"logit_bias"}

_KINDS: tuple[Literal["grammar"], Literal["json_schema"], Literal["regex"]] = ("grammar", "json_schema", "regex")
