"""Causes in the vendors' forms, read by the vendors' own types."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import response as types
from pydantic import TypeAdapter

from headstart.api.diagnostics import anthropic, responses
from headstart.explain.causes import Cause
from headstart.explain.explain import Explanation

OPENAI: TypeAdapter[Any] = TypeAdapter(types.PromptCacheDiagnostics)
EXPECTED = {
    Cause.TOOLS: ("tools_changed", "tools_changed"),
    Cause.SYSTEM: ("system_changed", "input_changed"),
    Cause.MESSAGE: ("messages_changed", "input_changed"),
    Cause.COMPACTED: ("messages_changed", "context_compacted"),
    Cause.MODEL: ("model_changed", "model_changed"),
}


@pytest.mark.parametrize("cause", [None, *Cause])
@pytest.mark.parametrize("known", [True, False])
def test_both_sdks_read_every_cause(cause: Cause | None, known: bool) -> None:
    found = Explanation(cause, token=7, recomputed=12) if cause is not None else None
    said = OPENAI.validate_python(responses(found, known=known))
    sdk = pytest.importorskip("anthropic.types")
    read = sdk.Diagnostics.model_validate({"cache_miss_reason": anthropic(found, known=known)}).cache_miss_reason
    if not known:
        assert (read.type, said.type) == ("previous_message_not_found", "comparison_response_not_found")
        return
    if cause is None:
        assert (read, said.type) == (None, "cache_hit")
        return
    if said.type == "cache_miss":
        assert (said.cache_missed_tokens, said.comparison_reusable_tokens) == (12, 7)
    if read.type.endswith("_changed"):
        assert read.cache_missed_input_tokens == 12
    if cause in EXPECTED:
        assert (read.type, getattr(said, "reason", said.type)) == EXPECTED[cause]
