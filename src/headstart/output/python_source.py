"""Python source: reads the calls and literals that models write in Python's notation."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from headstart.output.json_values import countable, paired
from headstart.output.schemas import properties_of

WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
"""The words for values, JSON's and Python's."""

_STRING = r"""(?P<quote>"{3}|'{3}|["'])(\\.|(?!(?P=quote)).)*+((?P=quote)|\Z)"""
_COMMENT = r"#[^\n]*"
_NAME = r"""(?P<name>[^\s"'#()\[\]{}=,][^"'#()\[\]{}=,]*)"""
_PARTS = re.compile(rf"{_STRING}|{_COMMENT}|[()\[\]{{}}]|{_NAME}", re.DOTALL)
_HEX = "[0-9a-fA-F]"
_ESCAPE = rf"""\\(?:[\\'"abfnrtv]|[0-7]{{1,3}}|x{_HEX}{{2}}|u{_HEX}{{4}}|U00(?:10|0{_HEX}){_HEX}{{4}}|N\{{[^}}]*\}})"""
_IN_STRING = re.compile(rf"{_ESCAPE}|[\\\x00-\x1f]")
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def literal(source: str, default: Any) -> Any:
    """The JSON value of a Python literal; `default` if it is anything else."""
    try:
        return _literal(ast.parse(_readable(source)[0], mode="eval").body)
    except _UNREADABLE:
        return default


def calls_in(source: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls in a Python list of calls with literal arguments; None if it is anything else.

    Names need not be Python's: tools may be called `get-weather`, and parameters `from`. Positional arguments take the names
    of the schema's properties in their order.
    """
    try:
        text, names = _readable(source.strip())
        body = ast.parse(text, mode="eval").body
        return [_call(node, names, schemas) for node in body.elts] if isinstance(body, ast.List) and body.elts else None
    except _UNREADABLE:
        return None


def _readable(source: str) -> tuple[str, dict[str, str]]:
    """A list of calls as Python reads it, and the name of each identifier.

    Identifiers stand in place of the names of functions and parameters. In strings, control characters are escaped, and
    backslashes that begin no escape: some templates write strings as they are, so models do too.
    """
    names: dict[str, str] = {}
    depth = 0

    def replaced(found: re.Match[str]) -> str:
        nonlocal depth
        text, follows = found[0], source[found.end() : found.end() + 1]
        if text in "([{":
            depth += 1
        elif text in ")]}":
            depth -= 1
        elif found["quote"] and not source[found.start() - 1 : found.start()].isalpha():  # else it is raw, or of bytes
            return _IN_STRING.sub(_escaped, text)
        elif found["name"] and (depth, follows) in ((1, "("), (2, "=")):
            names[identifier := f"n{len(names)}"] = text.strip()
            return identifier
        return text

    return _PARTS.sub(replaced, source), names


def _escaped(found: re.Match[str]) -> str:
    text = found[0]
    if len(text) > 1:  # an escape
        return text
    return r"\\" if text == "\\" else rf"\x{ord(text):02x}"


def _call(node: ast.expr, names: Mapping[str, str], schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names:
        raise ValueError("not a call")
    name = names[node.func.id]
    keys = list(properties_of(schemas.get(name, {})))
    if len(node.args) > len(keys):
        raise ValueError("an argument without a name")
    given = {key: _literal(value) for key, value in zip(keys, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg not in names:
            raise ValueError("unpacked arguments")
        given[names[keyword.arg]] = _literal(keyword.value)
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
