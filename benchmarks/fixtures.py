"""Fixtures: the tests' models and templates, for benchmarks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

_TESTS = str(Path(__file__).resolve().parents[1] / "tests")


def of_tests(name: str) -> ModuleType:
    """A module of the tests."""
    if _TESTS not in sys.path:
        sys.path.append(_TESTS)
    return importlib.import_module(name)
