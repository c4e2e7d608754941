"""Report: what one call cost, summed over its prompts and choices, in the forms that answers, log and metrics share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headstart.explain.explain import Explanation
from headstart.serving.request import Report


@dataclass(frozen=True, slots=True)
class Summary:
    """One call. Tokens, and seconds.

    A prompt counts once, whatever the number of its choices: `prompt` = `cached` + `computed`. The few tokens that each further
    choice computes again, to have logits of its own, are no part of that.
    """

    prompt: int
    live: int
    restored: int
    computed: int
    completion: int
    tiers: dict[str, int]
    mode: Literal["fast", "exact"]
    explanation: Explanation | None
    dropped: int
    queued: float
    prefill: float
    ttft: float
    decode: float

    @property
    def cached(self) -> int:
        return self.live + self.restored


def summarise(prompts: Sequence[Sequence[Report]]) -> Summary:
    """Sums the reports of each prompt's choices (at least one prompt, at least one choice each).

    Times are the longest of any choice, except `ttft`: the shortest. The explanation is that of the prompt that computed most.
    """
    # Of one prompt's choices, the one that computed most did so for the others too.
    mains = [max(choices, key=lambda report: report.computed) for choices in prompts]
    every = [report for choices in prompts for report in choices]
    worst = max(mains, key=lambda report: report.computed)
    tiers: Counter[str] = Counter()
    for main in mains:
        tiers.update(main.tiers)
    return Summary(
        prompt=sum(main.prompt for main in mains),
        live=sum(main.live for main in mains),
        restored=sum(main.restored for main in mains),
        computed=sum(main.computed for main in mains),
        completion=sum(report.completion for report in every),
        tiers=dict(tiers),
        mode=worst.mode,
        explanation=worst.explanation,
        dropped=max(main.dropped for main in mains),
        queued=min(report.queued for report in every),
        prefill=max(main.prefill for main in mains),
        ttft=min(report.ttft for report in every),
        decode=max(report.decode for report in every),
    )


def usage(summary: Summary) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": summary.prompt,
        "completion_tokens": summary.completion,
        "total_tokens": summary.prompt + summary.completion,
        "prompt_tokens_details": {"cached_tokens": summary.cached, "cache_write_tokens": summary.computed},
    }


def timings(summary: Summary) -> dict[str, Any]:
    """llama-server's `timings`. The first token belongs to the prompt, so rates count the gaps between tokens."""
    gaps = max(0, summary.completion - 1)
    return {
        "cache_n": summary.cached,
        "prompt_n": summary.computed,
        "prompt_ms": round(1e3 * summary.prefill, 3),
        "prompt_per_token_ms": round(_ratio(1e3 * summary.prefill, summary.computed), 4),
        "prompt_per_second": round(_ratio(summary.computed, summary.prefill), 2),
        "predicted_n": summary.completion,
        "predicted_ms": round(1e3 * summary.decode, 3),
        "predicted_per_token_ms": round(_ratio(1e3 * summary.decode, gaps), 4),
        "predicted_per_second": round(_ratio(gaps, summary.decode), 2),
    }


def headstart(summary: Summary) -> dict[str, Any]:
    """headstart's own account of what was reused, and why not more."""
    return {
        "cached": summary.cached,
        "live": summary.live,
        "restored": summary.restored,
        "computed": summary.computed,
        "tiers": summary.tiers,
        "mode": summary.mode,
        **explained(summary.explanation),
        "dropped": summary.dropped,
    }


def explained(found: Explanation | None) -> dict[str, Any]:
    """Why not more was reused: the coarse word and the place as ever, the cause, what it cost and how to avoid it."""
    if found is None:
        return dict.fromkeys(("reason", "diverged_at", "cause")) | {"missed": 0, "seconds": 0.0, "mend": None}
    return {
        "reason": found.meaning.reason,
        "diverged_at": found.diverged_at,
        "cause": found.cause.value,
        "missed": found.tokens,
        "seconds": rounded(found.seconds),
        "mend": found.meaning.mend.with_flags,
    }


def rounded(seconds: float | None) -> float | None:
    """To milliseconds; None, which nobody knows, stays that."""
    return None if seconds is None else round(seconds, 3)


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
