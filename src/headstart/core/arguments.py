"""Arguments: placeholder until it is merged."""

from __future__ import annotations

from typing import Any


def canonical_arguments(arguments: Any, schema: Any) -> Any:
    return arguments


def canonical_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return tool
