"""The line of a finished request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from headstart.api.usage import timings
from headstart.observe.logs import Caller, finished
from headstart.observe.report import summarise
from headstart.serving.request import Report

CALLER = Caller("req_1", "POST /v1/chat/completions", "127.0.0.1")


def line(**given: Any) -> Any:
    report = Report(**{"prompt": 100, "live": 0, "restored": 0, "computed": 100, "completion": 2, "mode": "fast", **given})
    with capture_logs() as lines:
        finished(CALLER, summarise([[report]]), ["stop"], 1.0)
    return lines[0]


@pytest.mark.parametrize(("completion", "pace"), [(0, None), (1, None), (2, 2.0), (5, 8.0)])
def test_a_pace_that_nobody_knows_is_null(completion: int, pace: float | None) -> None:
    assert line(completion=completion, decode=0.5)["tokens_per_s"] == pace
    assert line(completion=completion, decode=0.0)["tokens_per_s"] is None


def test_the_first_token_of_each_reply_belongs_to_its_prompt() -> None:
    """Of a request with several prompts, only one token was left out of the pace."""
    report = Report(prompt=100, live=0, restored=0, computed=100, completion=5, mode="fast", decode=0.5)
    for prompts, pace in (([[report]], 8.0), ([[report], [report]], 16.0), ([[report, report]], 16.0)):
        assert timings(summarise(prompts))["predicted_per_second"] == pace
    assert timings(summarise([[report], [replace(report, completion=0)]]))["predicted_per_second"] == 8.0


def test_tokens_of_the_shared_tier_are_named() -> None:
    assert line(restored=64, computed=36, tiers={"memory": 24, "shared": 40})["shared"] == 40
    assert "shared" not in line(restored=64, computed=36, tiers={"memory": 64})
