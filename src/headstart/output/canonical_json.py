"""Canonical JSON: one form for call arguments and tool definitions with the same meaning.

Clients parse JSON and write it again with other spacing and order of keys. Both functions here depend on the value only, so
such changes do not change the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headstart.output.json_values import json_value

HINTS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Keys that tell a cache something and a model nothing."""

_KEYWORDS = (
    "type function name title description enum const default format pattern minimum maximum exclusiveMinimum exclusiveMaximum"
    " multipleOf minLength maxLength minItems maxItems uniqueItems parameters input_schema properties required items"
    " prefixItems additionalProperties anyOf oneOf allOf not if then else strict $ref $defs definitions"
)
_ORDER = {key: rank for rank, key in enumerate(_KEYWORDS.split())}
_SCHEMA = frozenset({"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})


def canonical_arguments(arguments: str | Mapping[str, Any] | None, schema: Mapping[str, Any] | None) -> dict[str, Any] | str:
    """A call's arguments: keys in the order of the schema's properties, at every depth that it describes; others by name.

    None and a blank text mean no arguments. A text is returned as it is if it is not the JSON of an object, or if `json_value`
    cannot read it.
    """
    value: Any = arguments
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            value = json_value(arguments)
        except ValueError:
            return arguments
        if not isinstance(value, dict):
            return arguments
    root = schema if isinstance(schema, Mapping) else {}
    ordered: dict[str, Any] = _arranged(value or {}, root, root)
    return ordered


def canonical_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's definition, in OpenAI's form, with all keys in a fixed order and without hints.

    The properties of a schema: the required ones in the order in which they are required, then the others by name.
    """
    bare = {key: value for key, value in tool.items() if key not in HINTS}
    function = bare.get("function")
    if isinstance(function, Mapping):
        inner = {key: value for key, value in function.items() if key not in HINTS}
        bare["function"] = {key: _part(key, inner[key]) for key in _ranked(inner)}
    return {key: bare[key] if key == "function" else _part(key, bare[key]) for key in _ranked(bare)}


def _arranged(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return value
    schema = _resolved(schema, root)
    if isinstance(value, Mapping):
        properties = schema.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        names = [name for name in known if name in value]
        if len(names) < len(value):
            names += sorted(value.keys() - known.keys())
        return {name: _arranged(value[name], known.get(name, schema.get("additionalProperties")), root) for name in names}
    if isinstance(value, list | tuple):
        return [_arranged(item, schema.get("items"), root) for item in value]
    return value


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a local `$ref` names; an empty one if there is none."""
    for _ in range(8):  # a reference may name itself
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for step in reference[1:].strip("/").split("/") if reference != "#" else ():
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return {}


def _ranked(value: Mapping[str, Any]) -> list[str]:
    if value.keys() <= _ORDER.keys():
        return sorted(value, key=_ORDER.__getitem__)
    return sorted(value, key=lambda key: (_ORDER.get(key, len(_ORDER)), key))


def _part(key: str, value: Any) -> Any:
    return _schema(value) if key in ("parameters", "input_schema") else _sorted(value)


def _schema(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return _sorted(schema)
    return {key: _keyword(key, schema[key], schema) for key in _ranked(schema)}


def _keyword(key: str, value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return value
    if key in _SCHEMA:
        return _schema(value)
    if key in _SCHEMAS and isinstance(value, Sequence):
        return [_schema(item) for item in value]
    if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
        required = schema.get("required") if key == "properties" else None
        asked = [name for name in required if isinstance(name, str)] if isinstance(required, list | tuple) else []
        first = [name for name in dict.fromkeys(asked) if name in value]
        return {name: _schema(value[name]) for name in [*first, *sorted(value.keys() - set(first))]}
    return _sorted(value)


def _sorted(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value
