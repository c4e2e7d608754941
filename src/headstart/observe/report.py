"""Report: the costs of one call, summed over its prompts and choices. Answers, log and metrics use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headstart.explain.explain import Explanation
from headstart.serving.request import Report


@dataclass(frozen=True, slots=True)
class Summary:
    """The costs of one call, in tokens and seconds.

    A prompt counts once, whatever the number of its choices: `prompt` = `cached` + `computed`, unless it was cancelled before.
    The few tokens that each further choice computes again for its own logits are not included.

    Attributes:
        replies: how many choices have a token.
    """

    prompt: int
    live: int
    restored: int
    computed: int
    completion: int
    tiers: dict[str, int]
    mode: Literal["fast", "exact"]
    explanation: Explanation | None
    explained: bool
    dropped: int
    queued: float
    prefill: float
    ttft: float
    decode: float
    cancelled: bool = False
    replies: int = 1

    @property
    def decoded(self) -> int:
        """Tokens that took decoding. The first one of each reply belongs to its prompt."""
        return max(0, self.completion - self.replies)

    @property
    def cached(self) -> int:
        return self.live + self.restored


def summarise(prompts: Sequence[Sequence[Report]]) -> Summary:
    """Sums the reports of each prompt's choices (at least one prompt, at least one choice each).

    `prefill` and `decode` are the longest times of any choice, `queued` and `ttft` the shortest. The explanation is that of the
    prompt that computed most.
    """
    # The choice that computed most did it for the other choices of its prompt too.
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
        explained=worst.explained,
        dropped=max(main.dropped for main in mains),
        queued=min(report.queued for report in every),
        prefill=max(main.prefill for main in mains),
        ttft=min(report.ttft for report in every),
        decode=max(report.decode for report in every),
        cancelled=any(report.cancelled for report in every),
        replies=sum(report.completion > 0 for report in every),
    )
