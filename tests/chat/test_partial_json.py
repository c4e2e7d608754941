"""Arguments of calls as JSON objects."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.chat.partial_json import Members, input_of, is_object

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def passed(text: str, size: int = 1) -> list[str]:
    members = Members()
    parts = [members.feed(text[at : at + size]) for at in range(0, len(text), size)]
    return [*parts, members.end()]


@given(value=st.dictionaries(st.text(), JSON, max_size=4), size=st.integers(1, 9), ascii=st.booleans())
def test_an_object_is_passed_on_as_it_is(value: dict[str, object], size: int, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert is_object(text)
    assert json.loads("".join(passed(text, size))) == input_of(text) == value


@given(value=st.dictionaries(st.text(), JSON, max_size=4), cut=st.integers(0, 200), junk=st.text(max_size=5))
def test_whatever_is_passed_on_becomes_an_object(value: dict[str, object], cut: int, junk: str) -> None:
    text = json.dumps(value)[:cut] + junk
    assert json.loads("".join(passed(text))) == input_of(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("str", {}),
        ("[1]", {}),
        ('{"path": nope}', {}),
        ('{"a": 1, "path": nope, "b": 2}', {"a": 1}),
        ('{"a": 1, "path": "/e', {"a": 1}),
        ('{"a": [1, {"b": "}"}], "n": 12', {"a": [1, {"b": "}"}]}),
        ('{"a": NaN}', {}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": 1}}', {"a": 1}),
    ],
)
def test_what_is_complete_of_a_broken_one_stays(text: str, value: dict[str, object]) -> None:
    assert input_of(text) == value
    assert not is_object(text)


def test_a_line_break_within_a_string_is_one() -> None:
    assert input_of('{"a": "x\ny"}') == {"a": "x\ny"}
    assert is_object('{"a": "x\ny"}')
    assert passed('{"a": "x\ny"}')[-2:] == ['{"a": "x\\ny"}', ""]


def test_members_are_passed_on_as_soon_as_they_are_complete() -> None:
    members = Members()
    assert [members.feed(part) for part in ('{"a"', ': "x', '", ', '"b": 1', "}")] == ["", "", '{"a": "x"', "", ', "b": 1}']
