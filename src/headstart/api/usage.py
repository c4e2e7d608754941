"""Usage: the costs of a call, in the formats of OpenAI, llama-server and headstart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headstart.chat.reply_builder import ReplyBuilder
from headstart.observe.report import Summary, summarise


def usage(summary: Summary) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": summary.prompt,
        "completion_tokens": summary.completion,
        "total_tokens": summary.prompt + summary.completion,
        "prompt_tokens_details": {"cached_tokens": summary.cached, "cache_write_tokens": summary.computed},
    }


def timings(summary: Summary) -> dict[str, Any]:
    """llama-server's `timings`. Rates leave out the first token of each reply, which belongs to its prompt."""
    return {
        "cache_n": summary.cached,
        "prompt_n": summary.computed,
        "prompt_ms": round(1e3 * summary.prefill, 3),
        "prompt_per_token_ms": round(_ratio(1e3 * summary.prefill, summary.computed), 4),
        "prompt_per_second": round(_ratio(summary.computed, summary.prefill), 2),
        "predicted_n": summary.completion,
        "predicted_ms": round(1e3 * summary.decode, 3),
        "predicted_per_token_ms": round(_ratio(1e3 * summary.decode, summary.decoded), 4),
        "predicted_per_second": round(_ratio(summary.decoded, summary.decode), 2),
    }


def headstart(summary: Summary) -> dict[str, Any]:
    """headstart's own field: what was reused, and why not more."""
    return {
        "cached": summary.cached,
        "live": summary.live,
        "restored": summary.restored,
        "computed": summary.computed,
        "tiers": summary.tiers,
        "mode": summary.mode,
        **_miss(summary),
        "dropped": summary.dropped,
    }


def _miss(summary: Summary) -> dict[str, Any]:
    """Why not more was reused: the reason, the place, the cause, its costs, and how to avoid it.

    With `--explain off` nothing looks for a cause, and the costs are null.
    """
    if (found := summary.explanation) is None:
        cost = {"recomputed": 0, "seconds": 0.0} if summary.explained else {"recomputed": None, "seconds": None}
        return {**dict.fromkeys(("reason", "diverged_at", "cause", "hint")), **cost}
    return {
        "reason": found.meaning.reason,
        "diverged_at": found.diverged_at,
        "cause": found.cause.value,
        "recomputed": found.recomputed,
        "seconds": rounded(found.seconds),
        "hint": found.meaning.hint.with_flags,
    }


def rounded(seconds: float | None) -> float | None:
    """Rounded to milliseconds; None (unknown) stays None."""
    return None if seconds is None else round(seconds, 3)


def timings_so_far(builder: ReplyBuilder, seconds: float) -> dict[str, Any]:
    """llama-server's `timings` of an unfinished reply, `seconds` after its call arrived."""
    assert builder.report is not None
    report = replace(builder.report, completion=builder.tokens, decode=max(0.0, seconds - builder.began))
    return timings(summarise([[report]]))


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
