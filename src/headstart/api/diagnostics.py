"""Diagnostics: a cause in the vendors' formats, as the types of their SDKs define them."""

from __future__ import annotations

from typing import Any

from headstart.explain.explain import Explanation

_WITHOUT_TOKENS = frozenset({"unavailable", "previous_message_not_found"})
_BARE = frozenset({"unavailable", "comparison_response_not_found"})
"""Objects that have no field but `type`."""


def anthropic(found: Explanation | None, *, known: bool = True) -> dict[str, Any] | None:
    """Anthropic's `diagnostics.cache_miss_reason`; None if there was no miss.

    `known`: False if this server did not send the message that `previous_message_id` names.
    """
    if not known:
        return {"type": "previous_message_not_found"}
    if found is None:
        return None
    kind = found.meaning.anthropic
    return {"type": kind} if kind in _WITHOUT_TOKENS else {"type": kind, "cache_missed_input_tokens": found.recomputed}


def responses(found: Explanation | None, *, known: bool = True) -> dict[str, Any]:
    """OpenAI's `prompt_cache_diagnostics`. `known`: False if this server did not send the response `comparison_response_id`."""
    if not known:
        return {"type": "comparison_response_not_found"}
    if found is None:
        return {"type": "cache_hit"}
    kind = found.meaning.responses
    if kind in _BARE:
        return {"type": kind}
    return {
        "type": "cache_miss",
        "reason": kind,
        "cache_missed_tokens": found.recomputed,
        "comparison_reusable_tokens": found.token,
    }
