"""Names that were replaced stay replaced, and no two classes or aliases have one name (docs/glossary.md has the words)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import headstart

SOURCE = Path(headstart.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(SOURCE.rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(SOURCE.rglob("*.md"))]

TWICE: frozenset[str] = frozenset()
"""Classes and aliases that still have the name of another one. It may only shrink."""

CLASSES = frozenset(
    "About Appeared Asked Beginning Beginnings Erased Gone Memo Opening Openings Pieces Piecewise Refused Replays Rows Scan"
    " Edge Slide Spelled Spelling Spellings Teller Usage Wiped Wishes".split()
)
FUNCTIONS = frozenset(
    "_make_room _make_room_and_copy export_rows import_rows last_grid_point stem_prompt tokenize_special firm lay spell"
    " locate_text seat bury _has_rows".split()
)
PARAMETERS = frozenset(
    "GHOSTS_A_PIECE abouts beginnings draft grid grid_point mend missed openings ours restorer room _room row_bytes slides"
    " spelling spellings theirs unsettled _owed _dead _told _told_at _doomed SAY wipes _wipes forsaken".split()
)
"""Parameters, attributes and local names."""
KEYS = frozenset("mend missed ours theirs pieces spelled_otherwise grid row_bytes".split())
"""JSON keys and causes: whole texts in the source."""
OPTIONS = frozenset(["--grid"])
VALUES = frozenset(["--overflow slide", 'overflow="slide"'])
METRICS = frozenset(["headstart:missed_tokens", "headstart:store_pieces"])

IDENTIFIERS = CLASSES | FUNCTIONS | PARAMETERS
LEFT = {"room": ("fleet", "tiers/shared", "serving/runtime.py"), "_room": ("fleet", "tiers/shared")}
"""Names that are still used in some places. It may only shrink."""
KEPT = {
    "engines/llama/engine.py": {"grid"},  # hashed into the fingerprint: another key would change every id
    "engines/llama/identity.py": {"row_bytes"},
}
"""Texts that are no keys of an answer, by file."""


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def identifiers(text: str) -> set[str]:
    """All names in a source text, those in f-strings too, and in backticks in comments and docstrings."""
    found: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            found.add(token.string)
        elif token.type == tokenize.COMMENT:
            found |= quoted(token.string)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= quoted(node.value)
    return found


def quoted(text: str) -> set[str]:
    """Words in backticks."""
    return {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"(?<![-:/])\b[A-Za-z_]\w*", span)}


def texts(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_source_has_no_retired_name() -> None:
    words = re.compile(rf"(?:{'|'.join(OPTIONS | VALUES | METRICS)})(?!\w)")
    any_of_them = re.compile("|".join(map(re.escape, IDENTIFIERS | KEYS | OPTIONS | VALUES | METRICS)))
    for path in MODULES:
        text = path.read_text("utf-8")
        if not any_of_them.search(text):
            continue  # to read all sources takes seconds
        quoted_texts = [*texts(text)]
        assert not {one for one in identifiers(text) & IDENTIFIERS if not name(path).startswith(LEFT.get(one, ()))}, path
        assert not (set(quoted_texts) & KEYS) - KEPT.get(name(path), set()), path
        assert not [one for one in quoted_texts if words.search(one)], path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_have_no_retired_name(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not quoted(text) & IDENTIFIERS
    assert not set(re.findall(r'"(\w+)":', text)) & KEYS
    assert not [word for word in OPTIONS | VALUES | METRICS | {"spelled_otherwise"} if re.search(rf"{word}(?![\w-])", text)]


def test_no_class_or_alias_has_the_name_of_another_one() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text("utf-8")).body:
            match node:
                case ast.ClassDef(name=found):
                    pass
                case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)):
                    if found.isupper() or not found.lstrip("_")[:1].isupper():
                        continue  # a constant or a variable
                case _:
                    continue
            places[found].append(name(path))
    twice = {found: where for found, where in places.items() if len(where) > 1}
    assert set(twice) - TWICE == set(), twice
    assert set(twice) == TWICE, "take names that occur once out of TWICE"


def test_the_words_of_the_glossary_are_used() -> None:
    """A word that nothing else uses is not the project's word."""
    glossary = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    words = [word for entry in re.findall(r"^\* \*\*(.+?)\*\*", glossary, re.MULTILINE) for word in entry.split(", ")]
    assert "Block boundary" in words
    used = "\n".join(path.read_text("utf-8") for path in (*MODULES, *PAGES) if path.name != "glossary.md")
    unused = [word for word in words if not re.search(r"\b" + re.sub(r"[ -]", r"[\\s_-]+", word), used, re.IGNORECASE)]
    assert not unused


def test_the_list_would_find_a_name() -> None:
    text = 'def f(x):\n    """See `Rows`."""\n    return {"mend": f"{x.grid}"}\n'
    assert identifiers(text) & IDENTIFIERS == {"Rows", "grid"}
    assert set(texts(text)) & KEYS == {"mend"}
