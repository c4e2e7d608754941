"""llama-server's schema: the bodies of its routes."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from headstart.api.body import TokenId, Whole
from headstart.api.generation import Generation
from headstart.chat.validation import LongList, Strict
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Format


def _llama_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    plain = any(isinstance(part, int) for part in value) or not value
    return "mixed" if plain else "several"


Mixed = Annotated[LongList[str | TokenId], Field(min_length=1)]
LlamaPrompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Mixed, Tag("mixed")]
    | Annotated[LongList[str | Mixed], Field(min_length=1, max_length=2048), Tag("several")],
    Discriminator(
        _llama_prompt,
        custom_error_type="prompt_kind",
        custom_error_message="Input should be a text, a list of tokens and texts, or a list of either",
    ),
]


class LlamaRequest(Generation):
    """Body of POST /completion. `n_predict` 0 only fills the cache."""

    prompt: LlamaPrompt
    n_probs: Annotated[Whole, Field(ge=0, le=100)] | None = None
    n_cmpl: Annotated[Whole, Field(ge=1, le=16)] | None = None
    return_tokens: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_in_pairs(cls, value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            return value
        return {str(token): -100.0 if bias is False else bias for token, bias in value}

    @model_validator(mode="after")
    def _one_format(self) -> LlamaRequest:
        if self.grammar and self.json_schema is not None:
            raise InvalidRequest("Invalid 'grammar': a reply can have one format only.", param="grammar")
        return self

    @property
    def prompts(self) -> list[str | list[str | int]]:
        """Each prompt, as a text or as a list of tokens and texts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if any(isinstance(part, int) for part in self.prompt):
            return [[part for part in self.prompt if not isinstance(part, list)]]
        return [part for part in self.prompt if not isinstance(part, int)]

    @property
    def format(self) -> Format | None:
        if self.json_schema is not None:
            return Format("json_schema", json.dumps(self.json_schema), param="json_schema")
        return Format("grammar", self.grammar, param="grammar") if self.grammar else None


class TokenizeRequest(Strict):
    """Body of POST /tokenize."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    tokens: LongList[TokenId]


BODIES: tuple[type[Strict], ...] = (LlamaRequest, TokenizeRequest, DetokenizeRequest)
