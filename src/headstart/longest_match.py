"""Longest match: one regular expression for many fixed texts.

`re` tries the branches of `a|b|c` one after the other at each place. Models have up to 6,000 control tokens, so such an
expression takes seconds for a long prompt, and holds the interpreter meanwhile. Here texts with the same beginning share a
branch, so each place costs about the length of what matches there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix


def longest_of(texts: Iterable[str]) -> str:
    """The source of an expression that matches the longest of these texts at a place. It never matches an empty text."""
    return _source(sorted({*texts} - {""})) or "(?!)"


def _source(texts: Sequence[str]) -> str:
    """The same for different texts in order."""
    if not texts:
        return ""
    start = commonprefix((texts[0], texts[-1]))  # noqa: RUF071 – by characters
    ends = texts[0] == start
    rest = [text[len(start) :] for text in texts[ends:]]
    branches = "|".join(_source([*alike]) for _, alike in groupby(rest, itemgetter(0)))
    return re.escape(start) + (f"(?:{branches})" + "?" * ends if branches else "")
