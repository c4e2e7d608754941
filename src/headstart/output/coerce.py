"""Coerce: converts values that a model wrote in another notation than JSON, such as `True` or bare text."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from headstart.output.json_values import countable, json_text, json_value, paired
from headstart.output.schemas import alternatives, any_string, constants_in, properties_of, type_of, types_of

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_NULLS = tuple(word for word, value in _WORDS.items() if value is None)
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


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
    if word in _WORDS:
        value = _WORDS[word]
        return value if not types or type_of(value) in types else text
    try:
        value = json_value(word)
    except ValueError:
        return _python(word, text) if types else text
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


def _python(word: str, text: str) -> Any:
    try:
        return _literal(ast.parse(word, mode="eval").body)
    except _UNREADABLE:
        return text


def calls_in(source: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls in a Python list of calls with literal arguments; None if it is anything else.

    Positional arguments take the names of the schema's properties in their order.
    """
    try:
        body = ast.parse(source.strip(), mode="eval").body
        return [_call(node, schemas) for node in body.elts] if isinstance(body, ast.List) and body.elts else None
    except _UNREADABLE:
        return None


def _call(node: ast.expr, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("not a call")
    name = ast.unparse(node.func)
    names = list(properties_of(schemas.get(name, {})))
    if len(node.args) > len(names):
        raise ValueError("an argument without a name")
    given = {key: _literal(value) for key, value in zip(names, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("unpacked arguments")
        given[keyword.arg] = _literal(keyword.value)
    return name, given


def _literal(node: ast.expr) -> Any:
    """The JSON value of a literal; JSON's own words are understood too."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if isinstance(value, str):
        return paired(value)
    if value is None or (isinstance(value, bool | int | float) and countable(value)):
        return value
    raise ValueError("no JSON value")


def _key(node: ast.expr | None) -> str:
    key = _literal(node) if node is not None else None
    return key if isinstance(key, str) else json.dumps(key)
