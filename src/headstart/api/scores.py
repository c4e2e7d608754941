"""Scores: tokens with their log-probabilities, as chats, completions, responses and llama-server write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headstart.serving.request import TokenLogprob

FLOOR = -9999.0
"""Written for a log-probability of minus infinity, which JSON cannot say."""


def token_scores(logprobs: Sequence[TokenLogprob], *, ids: bool = False) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities, as chats and responses have them; with their `ids`, as llama-server does."""

    def score(token: int, text: bytes, logprob: float) -> dict[str, Any]:
        scored = {"token": shown(text), "logprob": finite(logprob), "bytes": list(text)}
        return {"id": token, **scored} if ids else scored

    return [
        {**score(item.token, item.text, item.logprob), "top_logprobs": [score(*other) for other in item.top]}
        for item in logprobs
    ]


def shown(text: bytes) -> str:
    """A token's text, as JSON can have it."""
    return text.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """A log-probability, as JSON can have it."""
    return logprob if math.isfinite(logprob) else FLOOR
