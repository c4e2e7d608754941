from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from effort import examples
from headstart.output.python_source import calls_in, literal

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,8}", fullmatch=True)
KEYS = st.text("ab_-:./* é1", min_size=1, max_size=6).map(str.strip).filter(bool) | st.sampled_from(["from", "class", "None"])
TEXTS = st.text("ab=(),[]{}#'\"\\ \n:-", max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
ESCAPED = "\n\t\\'\"AAA\N{EM DASH}"
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


@examples(400)
@given(CALLS, st.sampled_from([", ", ",", " ,\n  "]), st.sampled_from(["=", " = "]))
@example([("get-weather", {"user-id": "a=f(b", "from": None}), ("a.b:c/d", {})], ", ", "=")
def test_calls_with_names_that_are_not_pythons(calls: Any, comma: str, equals: str) -> None:
    written = [f"{name}({comma.join(f'{key}{equals}{value!r}' for key, value in given.items())})" for name, given in calls]
    assert calls_in(f"[{comma.join(written)}]", {}) == calls


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("[f('a', n=(1, -2), m={1: (2,), 'b': [x]})]", None),
        ("[f('a', n=(1, -2), m={1: (2,), 'b': [true]})]", [("f", {"p": "a", "n": [1, -2], "m": {"1": [2], "b": [True]}})]),
        ("[f(n=1,  # as g(m=2) says\n m=3) , g ( )]", [("f", {"n": 1, "m": 3}), ("g", {})]),
        ("[f(n=r'\\d', m='''it's \"\"\"(''')]", [("f", {"n": "\\d", "m": 'it\'s """('})]),
        ('[f(n=\'a\nb\tc\r\0\', m={"k\n": ["""\n"""]})]', [("f", {"n": "a\nb\tc\r\0", "m": {"k\n": ["\n"]}})]),
        (r"[f(n='\n\t\\\'\"\x41\u0041\101\N{EM DASH}', m='\d C:\users \x')]", [("f", {"n": ESCAPED, "m": r"\d C:\users \x"})]),
        ("[f(n='a\\\nb', m={'k': r'\\d', 'l':R'\\n'})]", [("f", {"n": "a\\\nb", "m": {"k": r"\d", "l": r"\n"}})]),
        ("[f(n=b'a')]", None),
        ("[f(n=1)(m=2)]", None),
        ("[f(n=1), (2)]", None),
        ("[(f)(n=1)]", None),
        ("[f(**{'n': 1})]", None),
        ("[f(n==1)]", None),
        ("[f(n=g(1))]", None),
        ("[f(n='a)]", None),
        ("[[f(n=1)]]", None),
        ("[1]", None),
        ("[]", None),
        ("f(n=1)", None),
    ],
)
def test_calls(source: str, calls: Any) -> None:
    assert calls_in(source, {"f": {"properties": {"p": {}}}}) == calls


def test_open_quotes_take_no_quadratic_time() -> None:
    assert calls_in("[f(a=" + '"""\\' * 100_000, {}) is None


@examples(400)
@given(st.text('ab\n\r\t\0\x1f é(=,#\\"', max_size=8), st.booleans())
def test_strings_as_they_are_between_quotes(text: str, inside: bool) -> None:
    """As LFM2.5's template writes them."""
    text = text.replace("\\", "\\ ")  # which begins no escape
    value, expected = (f"{{'k': '{text}'}}", {"k": text}) if inside else (f"'{text}'", text)
    assert calls_in(f"[f(n={value})]", {}) == [("f", {"n": expected})]
    assert literal(value, None) == expected
