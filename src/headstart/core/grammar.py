"""Grammar: what a reply must be."""

from __future__ import annotations

from headstart.engines.base import Grammar

__all__ = ["Grammar"]
