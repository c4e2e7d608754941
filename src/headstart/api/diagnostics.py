"""Diagnostics: placeholder until the vendors' words are merged."""

from __future__ import annotations

from typing import Any


def anthropic(found: Any, *, known: bool = True) -> dict[str, Any] | None:
    """Anthropic's `diagnostics.cache_miss_reason`; None if nothing was missed."""
    if not known:
        return {"type": "previous_message_not_found"}
    return None if found is None else {"type": "unavailable"}
