"""Violation: what a failed check raises."""

from __future__ import annotations


class Violation(AssertionError):
    """Something that must never happen."""


def require(holds: object, what: str) -> None:
    """Raises Violation unless it holds."""
    if not holds:
        raise Violation(what)
