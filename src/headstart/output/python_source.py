"""Python source: reads the calls and literals that models write in Python's notation."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from headstart.output.json_values import countable, paired
from headstart.output.schemas import properties_of

WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
"""The words for values, JSON's and Python's."""

_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def literal(source: str, default: Any) -> Any:
    """The JSON value of a Python literal; `default` if it is anything else."""
    try:
        return _literal(ast.parse(source, mode="eval").body)
    except _UNREADABLE:
        return default


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
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
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
