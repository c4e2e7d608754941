"""Coerce: converts values that a model wrote in another notation than JSON, such as `True` or bare text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.output.json_values import json_text, json_value
from headstart.output.python_source import WORDS, literal
from headstart.output.schemas import alternatives, any_string, constants_in, type_of, types_of

_NULLS = tuple(word for word, value in WORDS.items() if value is None)


def cast(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Converts a parameter's text to a type that its schema allows. Returns the text itself if it is no such value.

    If the schema allows any string, the value is a string, except for `null` (or `None`, as some templates write it) if the
    schema allows that too.

    Args:
        root: the schema that has the definitions.
    """
    types = types_of(schema, root)
    word = text.strip()
    if any_string(schema, root) or types == {"string"}:
        return None if word in _NULLS and "null" in types else text
    if any(text in constants_in(each) for each in alternatives(schema, root)):
        return text
    if word in WORDS:
        value = WORDS[word]
        return value if not types or type_of(value) in types else text
    try:
        value = json_value(word)
    except ValueError:
        return literal(word, text) if types else text
    if not types and isinstance(value, str):
        return text  # quotes that nobody asked for are part of it
    return value


def partial_value(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The beginning of a value's JSON, of which the text broke off: none if it may still become another type. See `cast`."""
    types = types_of(schema, root)
    if types and "string" not in types:
        return text
    null = "null" in types and any(word.startswith(text.strip()) for word in _NULLS)
    string = types == {"string"} or (any_string(schema, root) and not null)
    return json_text(text)[:-1] if string else ""
