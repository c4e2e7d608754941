"""Docstrings name what is there: each name under `Args:` is a parameter, each under `Attributes:` a field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import headstart

SOURCE = Path(headstart.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def named(docstring: str, section: str) -> Iterator[str]:
    """The names in a section of a docstring: `name: …` or `name, other: …`, indented once."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    for line in re.findall(r"^    (\w+(?:, \w+)*):", found[1] if found else "", re.MULTILINE):
        yield from line.split(", ")


def parameters(function: Function) -> set[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {argument.arg for argument in every if argument is not None}


def fields(node: ast.ClassDef) -> set[str]:
    """Names that the body of a class or an assignment to an attribute sets, and its methods and properties."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id if isinstance(inner, ast.Name) else inner.attr)
        elif isinstance(inner, Function):
            found.add(inner.name)
    return found


def strange(tree: ast.AST) -> Iterator[str]:
    """Names that docstrings explain and that do not exist."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            text, known = ast.get_docstring(node) or "", fields(node)
            init = next((inner for inner in node.body if isinstance(inner, Function) and inner.name == "__init__"), None)
            taken = known if init is None else parameters(init)
            yield from (f"{node.name}: {name}" for name in named(text, "Attributes") if name not in known)
            yield from (f"{node.name}: {name}" for name in named(text, "Args") if name not in taken)
        elif isinstance(node, Function):
            text, taken = ast.get_docstring(node) or "", parameters(node)
            yield from (f"{node.name}: {name}" for name in named(text, "Args") if name not in taken)


def test_docstrings_name_what_is_there() -> None:
    for path in MODULES:
        assert list(strange(ast.parse(path.read_text("utf-8")))) == [], path


def test_a_strange_name_is_found() -> None:
    text = 'class A:\n    """A.\n\n    Attributes:\n        x, y: both.\n    """\n\n    x: int\n'
    text += 'def f(a):\n    """F.\n\n    Args:\n        a: known.\n            further: text.\n        b: gone.\n    """\n'
    assert list(strange(ast.parse(text))) == ["A: y", "f: b"]
