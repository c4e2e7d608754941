"""Schemas: what the JSON schemas of functions' parameters allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COMBINED = ("allOf", "anyOf", "oneOf")
_NAMES = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each function's parameters, by its name; OpenAI's form of tools."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of an object's members."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def named(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference such as `#/$defs/unit` means in `root`; None if that is nothing."""
    start, *steps = reference.split("/")
    found: Any = root if start == "#" else None
    for step in steps:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def constants_in(schema: Mapping[str, Any]) -> Sequence[Any]:
    """The values that a schema lists as its only ones; none if it lists none."""
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    return constants if isinstance(constants, list | tuple) else ()


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas behind references and combinations, also behind `allOf`, which mostly has one.

    Args:
        root: the schema that has the definitions.
    """
    found: list[Mapping[str, Any]] = []
    references: set[str] = set()  # which may lead to themselves
    parts = [schema]
    for part in parts:  # which grows
        if not isinstance(part, Mapping):
            continue
        reference = part.get("$ref")
        if _types(part):
            found.append(part)
        elif isinstance(reference, str):
            if reference not in references:
                references.add(reference)
                parts.append(named(reference, root))
        elif inner := next((part[key] for key in _COMBINED if isinstance(part.get(key), list | tuple) and part[key]), None):
            parts += inner
        else:
            found.append(part)
    return found


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema names, also as alternatives or by its constants; none if it does not say. `root`: see
    `alternatives`.
    """
    return frozenset().union(*map(_types, alternatives(schema, root)))


def any_string(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a schema allows strings that it does not list. `root`: see `alternatives`."""
    return any("string" in _types(each) and not constants_in(each) for each in alternatives(schema, root))


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    return _NAMES.get(type(value), "object")


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    return frozenset(map(str, kinds) if isinstance(kinds, list | tuple) else map(type_of, constants_in(schema)))
