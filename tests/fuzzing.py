"""Requests made from a server's own OpenAPI document, by schemathesis."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

TRUE = [status_code_conformance, content_type_conformance, response_schema_conformance]
CHECKS = [not_a_server_error, *TRUE]
DEAR = frozenset(
    {
        *("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/apply-template", "/headstart/explain"),
        *("/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate"),
        *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"),
        *("/v1/completions", "/completion", "/completions"),
    }
)
"""Routes whose bodies have conversations, tools, grammars or many options: to make one up takes a quarter of a second."""


def fuzz(schema: Any, method: str, path: str, *, positive: bool, examples: int) -> None:
    """Sends requests that the document allows, or (not `positive`) does not. Each answer must be one that it promises.

    Args:
        examples: requests; a tenth of them where they are dear.
    """
    mode = schemathesis.GenerationMode.POSITIVE if positive else schemathesis.GenerationMode.NEGATIVE

    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=max(2, examples // 10) if path in DEAR else examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=60)

    run()
