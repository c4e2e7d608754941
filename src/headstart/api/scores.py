"""Scores: tokens with their log-probabilities, as chats, completions, responses and llama-server write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headstart.serving.request import TokenLogprob

FLOOR = -9999.0
"""Stands for a log-probability of minus infinity, which JSON does not have."""


def token_scores(logprobs: Sequence[TokenLogprob], *, ids: bool = False) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities, in the format of chats and responses. `ids` adds token ids, as in llama-server."""

    def score(token: int, text: bytes, logprob: float) -> dict[str, Any]:
        scored = {"token": shown(text), "logprob": finite(logprob), "bytes": list(text)}
        return {"id": token, **scored} if ids else scored

    return [
        {**score(item.token, item.text, item.logprob), "top_logprobs": [score(*other) for other in item.top]}
        for item in logprobs
    ]


def shown(text: bytes) -> str:
    """A token's text for JSON; invalid UTF-8 is replaced."""
    return text.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """A log-probability for JSON."""
    return logprob if math.isfinite(logprob) else FLOOR
