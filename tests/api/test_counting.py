"""Bodies of very many values are refused before they are parsed, and long texts are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.api import counting
from headstart.api.body import StructuredOutputs, load
from headstart.api.counting import MOST_COMMAS, MOST_PARTS, check_count
from headstart.api.errors import TooLarge


def parts(value: Any) -> int:
    """Strings, keys included, lists and objects."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts, value.values()))
    return 1 + sum(map(parts, value)) if isinstance(value, list) else int(isinstance(value, str))


def accepted(data: bytes) -> bool:
    try:
        check_count(data)
    except TooLarge:
        return False
    return True


MANY = {
    "lists": [[]] * MOST_PARTS,
    "objects": [{}] * MOST_PARTS,
    "texts": [""] * MOST_PARTS,
    "keys": {str(number): 0 for number in range(MOST_PARTS)},
    "messages": [{"role": "user", "content": "hi"}] * (MOST_PARTS // 5),
    "numbers": [1] * (MOST_COMMAS + 2),
}


@pytest.mark.parametrize("name", MANY)
def test_very_many_values_are_refused(name: str) -> None:
    data = json.dumps({"messages": MANY[name]}).encode()
    assert not accepted(data)
    with pytest.raises(TooLarge, match="send fewer"):
        load(data)


@pytest.mark.parametrize(
    "text",
    ["a, b, [c], {d}" * 300_000, '"quoted", ' * 300_000, '\\", [' * 300_000, "\\" * 2_000_001, "é, " * 300_000],
    ids=["commas", "quotes", "both", "backslashes", "letters"],
)
@pytest.mark.parametrize("shift", range(4))
def test_a_long_text_is_one_value(text: str, shift: int) -> None:
    """At whichever byte the pieces begin in which a body is read."""
    assert accepted(json.dumps({"messages": [{"role": "user", "content": "x" * shift + text}]}).encode())


def test_lists_of_tokens_are_accepted() -> None:
    assert accepted(json.dumps({"prompt": list(range(1_000_000))}).encode())


TEXTS = st.text(st.sampled_from('a\\"[{,]}é'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


@examples(400)
@given(VALUES, st.integers(1, 9), st.booleans())
def test_the_count_is_that_of_the_values(value: Any, piece: int, plain: bool) -> None:
    data, count = json.dumps(value, ensure_ascii=plain).encode(), parts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_PIECE", piece)
        patch.setattr(counting, "MOST_PARTS", count)
        assert accepted(data)
        patch.setattr(counting, "MOST_PARTS", count - 1)
        assert not accepted(data)


def test_a_schema_that_is_written_as_text_is_counted_too() -> None:
    with pytest.raises(TooLarge, match="send fewer"):
        StructuredOutputs.model_validate({"json": '{"enum": [' + "[]," * MOST_PARTS + "1]}"})
