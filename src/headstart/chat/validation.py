"""Validation: how strictly input is parsed, and its errors as one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headstart.errors import InvalidRequest

MANY = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
"""The configuration of TypedDicts. Objects of which a body has many become dicts, with keys in the order of the fields."""


T = TypeVar("T")
LongList = Annotated[list[T], Field(fail_fast=True)]
"""A list that may be long. It is checked up to the first member with a fault: each fault costs time and memory."""
TOO_MANY: Final = 1000
"""Faults of which none is named."""


class Strict(BaseModel):
    """The configuration of models."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


def condense(error: ValidationError, value: Any, names: Mapping[str, str] | None = None) -> InvalidRequest:
    """All errors of the most deeply nested invalid field, as one sentence.

    Args:
        names: the caller's names of fields, where they differ.
    """
    if error.error_count() >= TOO_MANY:
        return InvalidRequest(f"The request is invalid in {error.error_count():,} places.")
    faults: dict[tuple[str | int, ...], list[str]] = {}
    found = error.errors(include_url=False, include_input=False, include_context=False)
    # Where a text or a list of texts may stand, pydantic also says of a bad text that it is no list.
    for fault in [fault for fault in found if fault["type"] != "sequence_str"] or found:
        faults.setdefault(_path(fault["loc"], value, fault["type"]), []).append(fault["msg"])
    path, messages = max(faults.items(), key=lambda item: len(item[0]))
    texts = [message.rstrip(".").replace(" after validation", "") for message in dict.fromkeys(messages)]
    should = ""
    if all(message.startswith("Input should be ") for message in texts):
        should, texts = "must be ", [message.removeprefix("Input should be ") for message in texts]
    if not path:
        return InvalidRequest(f"The request is invalid: {'; '.join(texts)}.")
    field = str(path[0])
    name = (names or {}).get(field, field) + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path[1:])
    return InvalidRequest(f"Invalid '{name[:200]}': {should}{', or '.join(texts)}.", param=name[:200])


def _path(location: tuple[str | int, ...], value: Any, kind: str) -> tuple[str | int, ...]:
    # pydantic adds the names of union members to a location, and a key of the value may have the same name.
    return max(_ways(location, value, kind == "missing"), key=lambda way: (way[1], len(way[0])))[0]


def _ways(location: tuple[str | int, ...], value: Any, missing: bool) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    """Paths in the value that a location may mean, each with whether it includes the last step."""
    if not location:
        yield (), True
        return
    step, rest = location[0], location[1:]
    # A list elsewhere with the same name may be shorter.
    if isinstance(value, list):
        inside = isinstance(step, int) and step < len(value)
    else:
        inside = isinstance(value, dict) and step in value
    if inside:
        yield from (((step, *way), whole) for way, whole in _ways(rest, value[step], missing))
    if not rest:
        yield ((step,), True) if missing else ((), False)
    elif isinstance(step, str):
        yield from _ways(rest, value, missing)
    else:
        yield (), False
